"""Runs of which all is known that a researcher may ask: what went wrong in them is planted here, once each.

questioned_run(tmp_path / "asked")                                 # 100 steps; its actor died after the last
swept_run(tmp_path / "sweep-1", lr=1e-6, step_s=2.0, best=0.5)     # one of several to compare
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.monitoring.events import (
    EvalDone,
    GroupDropped,
    GroupIssued,
    GroupPlaced,
    GroupRolledOut,
    GroupScored,
    RolloutsWritten,
    RunEnded,
    RunStarted,
    StepDone,
    WorkerFailed,
)
from rlsys.replay.rollout_json import RolloutRecord
from rlsys.replay.rollout_parquet import write_records
from rlsys.types import Episode, GroupKey, Message, Outcome, OutcomeKind, Task, Trajectory
from tests.histories import History, Shape
from tests.rollouts import said

STEPS, NUM_TASKS = 100, 12
"""Each step trains four of the tasks, with four episodes each; those of every tenth step are written."""
FORGOTTEN_TASK, FORGOTTEN_STEP = "task-7", 50
"""Solved up to this step, and never again."""
COLLAPSE_STEP = 90
"""First step in which entropy and every reward are lower."""
SLOW_REPLICA, SLOW_STEP = "rollout-2", 70
"""Takes six times as long as the others from this step on."""
STUCK_TASK, STUCK_STEP, STUCK_REPLICA, STUCK_S = "task-99", 60, "rollout-1", 315
"""Issued after this step, and at this replica ever since: so many seconds."""
DROPPED_TASK, DROPPED_STEP, DROPPED_REASON = "task-77", 40, "too_long"
"""Issued after this step, and dropped."""
LONGEST_STEP, LONGEST_TASK, LONGEST_TEXT, LONGEST_TOKENS = 30, "task-2", "and so on and on", 400
"""The longest of the two answers that were cut at the token limit."""
ODD_STEP, ODD_TASK, ODD_TEXT = 60, "task-1", "a banana is no number"
"""One answer of this step says this."""
EXCEPTION, NUM_EXCEPTIONS = "TimeoutError: the judge did not answer within 10 s", 20
"""Why two episodes of every tenth step have no reward."""
RARE_EXCEPTION = "ValueError: no number in the answer"
"""Why one of step 20 has none."""
BAD_SAMPLE = "held-3"
"""Task of the evaluation after step 100 of which a sample failed, by `EXCEPTION`."""
LAST_WORDS = "RuntimeError: CUDA error: an illegal memory access was encountered"
"""Last line of the actor's log."""


class _Episode(NamedTuple):
    text: str
    num_tokens: int
    reward: float | None
    outcome: Outcome


def questioned_run(folder: Path) -> Path:
    """Write it, and answer its folder."""
    history = History(folder, Shape(steps=STEPS))
    (folder / "config.resolved.yaml").write_text(_config(folder.name, 1e-6))
    history.emit(RunStarted(str(folder), 0, STEPS, 1))
    for step in range(1, STEPS + 1):
        _train(history, step)
        if step == STUCK_STEP:
            history.emit(GroupIssued(9000, STUCK_TASK, step, 4))
            history.emit(GroupPlaced(9000, STUCK_REPLICA))
        if step == DROPPED_STEP:
            history.emit(GroupIssued(9001, DROPPED_TASK, step, 4))
            history.emit(GroupDropped(9001, DROPPED_TASK, DROPPED_REASON, "it has 9,000 tokens"))
        if step in (50, 100):
            _evaluate(history, step)
    history.emit(WorkerFailed("actor", "training", "the process ended with SIGABRT"))
    history.emit(RunEnded(STEPS, "failed", "the actor died"))
    history.events.close()
    logs = folder / "logs"
    logs.mkdir()
    (logs / "actor.log").write_text(f"INFO step 99\nINFO step 100\nERROR {LAST_WORDS}\n")
    (logs / "rollout-0.log").write_text("INFO ready\n")
    return folder


def swept_run(folder: Path, lr: float, step_s: float, best: float) -> Path:
    """Write a finished run of 10 steps, whose reward rises to `best`; answer its folder."""
    history = History(folder, Shape(steps=10))
    (folder / "config.resolved.yaml").write_text(_config(folder.name, lr))
    history.emit(RunStarted(str(folder), 0, 10, 1))
    for step in range(1, 11):
        history.emit(StepDone(step, {"reward/mean": best * step / 10, "time/step": step_s}), after_s=step_s)
    history.emit(RunEnded(10, "finished", ""))
    history.events.close()
    return folder


def _train(history: History, step: int) -> None:
    """One step, from the issue of its groups on."""
    groups = {group_id: f"task-{group_id % NUM_TASKS}" for group_id in range(4 * step, 4 * step + 4)}
    played = {group_id: _played(step, group_id, task) for group_id, task in groups.items()}
    for group_id, task in groups.items():
        replica, episodes = f"rollout-{group_id % 4}", played[group_id]
        seconds = 6.0 if replica == SLOW_REPLICA and step >= SLOW_STEP else 1.0
        lengths = tuple(episode.num_tokens for episode in episodes)
        reasons = [episode.outcome.reason for episode in episodes if episode.reward is None]
        failures = {reason: float(reasons.count(reason)) for reason in reasons}
        num_cut = sum(episode.outcome.kind is OutcomeKind.TRUNCATED for episode in episodes)
        history.emit(GroupIssued(group_id, task, step - 1, 4))
        history.emit(
            GroupRolledOut(group_id, task, replica, step - 1, step - 1, lengths, num_cut, seconds, 0.0), seconds
        )
        history.emit(GroupScored(group_id, task, tuple(episode.reward for episode in episodes), failures))
    if step % 10 == 0:
        path = history.folder / "rollouts" / f"step_{step:06}.parquet"
        write_records(path, [_record(step, g, task, played[g]) for g, task in groups.items()])
        history.emit(RolloutsWritten(step, str(path)))
    every = [episode for episodes in played.values() for episode in episodes]
    rewards = [episode.reward for episode in every if episode.reward is not None]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/failed_frac": 1 - len(rewards) / len(every),
        "policy/entropy": exp(-max(0, step - COLLAPSE_STEP + 1)) + 0.01,
        "completions/length_mean": fmean(episode.num_tokens for episode in every),
    }
    history.emit(StepDone(step, metrics, tuple(groups)))


def _played(step: int, group_id: int, task: str) -> Sequence[_Episode]:
    """What its episodes said: three of four are right before the collapse, then one."""
    num_right = 3 if step < COLLAPSE_STEP else 1
    if task == FORGOTTEN_TASK:
        num_right = 4 if step <= FORGOTTEN_STEP else 0
    ok, cut, failed = Outcome(OutcomeKind.OK), OutcomeKind.TRUNCATED, OutcomeKind.FAILED
    episodes = [_Episode(f"The answer is {e}", 20, float(e < num_right), ok) for e in range(4)]
    if step == LONGEST_STEP and task in (LONGEST_TASK, "task-1"):
        num_tokens = LONGEST_TOKENS if task == LONGEST_TASK else LONGEST_TOKENS // 2
        episodes[0] = _Episode(LONGEST_TEXT, num_tokens, 0.0, Outcome(cut, ""))
    if step == ODD_STEP and task == ODD_TASK:
        episodes[2] = episodes[2]._replace(text=f"I think {ODD_TEXT}, so it is 3")
    if step % 10 == 0 and group_id == 4 * step:
        for e in (1, 3):
            episodes[e] = _Episode("", 20, None, Outcome(failed, EXCEPTION))
    if step == 20 and group_id == 4 * step + 1:
        episodes[1] = _Episode("", 20, None, Outcome(failed, RARE_EXCEPTION))
    return episodes


def _evaluate(history: History, step: int) -> None:
    """Four tasks of one sample each; one fails after the last step."""
    records, rewards = [], [1.0, 1.0, 0.0, None if step == STEPS else 1.0]
    for place, reward in enumerate(rewards):
        outcome = Outcome(OutcomeKind.OK) if reward is not None else Outcome(OutcomeKind.FAILED, EXCEPTION)
        records.append(_record(step, place, f"held-{place}", [_Episode("The answer is 1", 20, reward, outcome)]))
    write_records(history.folder / f"evaluations/held_out/step_{step:06}.parquet", records)
    num_failed = rewards.count(None)
    metrics = {"eval/held_out/mean": 0.75, "eval/held_out/failed_frac": num_failed / 4}
    history.emit(EvalDone(step, "held_out", "", 4.0, metrics, {EXCEPTION: float(num_failed)} if num_failed else {}))


def _record(step: int, group_id: int, task: str, episodes: Sequence[_Episode]) -> RolloutRecord:
    made = tuple(
        Episode((Trajectory("policy", (said(text, num),), outcome, reward),)) for text, num, reward, outcome in episodes
    )
    asked = Task(id=task, prompt=(Message(role="user", content=f"What is {task}?"),))
    assigned = (TrajectoryAdvantage(0, 0, 0.5),)
    return RolloutRecord(
        step, GroupKey(group_id, 1), asked, f"rollout-{group_id % 4}", step - 1, made, assigned, ({},) * len(made)
    )


def _config(name: str, lr: float) -> str:
    return f"run:\n  name: {name}\nalgorithm:\n  type: grpo\ntrain:\n  lr: {lr}\n  groups_per_step: 4\n"
