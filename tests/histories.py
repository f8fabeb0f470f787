"""Run folders made by hand, of any size, for tests and benchmarks of what reads them.

The events are real ones and go through the real `JsonlSink`; rollouts have the shape of `rlsys.replay.rollout_json`.
What they tell is made up, by a clock of its own: the same arguments make the same files, byte by byte.

    small_run(tmp_path / "run")                            # 30 steps, finished
    history = History(folder, Shape(), begin_s=time.time())  # or one that goes on while somebody watches
    history.start()
    history.step()
    history.end("failed", "out of memory")
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import TypeAlias

from rlsys.monitoring.events import (
    CheckpointSaved,
    EngineChosen,
    EvalDone,
    Event,
    Events,
    GroupDropped,
    GroupIssued,
    GroupPlaced,
    GroupReissued,
    GroupRolledOut,
    GroupScored,
    PhaseDone,
    QueueSeen,
    ReplicaSeen,
    RolloutsWritten,
    RunEnded,
    RunStarted,
    StepDone,
    WeightsPublished,
    WorkerBusy,
    WorkerFailed,
    WorkerRestarted,
)
from rlsys.monitoring.trackers.jsonl import JsonlSink
from tests.rollouts import write_lines

_Said: TypeAlias = tuple[str, int | None, list[tuple[str, str]]]
"""An agent, its parent, and of each turn what it heard and what it said."""

BEGIN_S = 1_767_225_600.0
"""1 January 2026: when runs begin, unless it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a run is."""

    steps: int = 30
    groups: int = 6
    """A step."""
    size: int = 4
    """Episodes of a group."""
    replicas: int = 4
    reward_workers: int = 2
    tasks: int = 24
    step_s: float = 2.0
    spans: int = 1
    """Times that a replica was busy for a group."""
    has_subagents: bool = True
    """Has every third group a lead that asks a subagent?"""
    max_staleness: int = 1


def small_run(folder: Path, begin_s: float = BEGIN_S) -> Path:
    """Write a finished run with everything there is to see, and answer its folder.

    30 steps of 6 groups of 4 episodes. Of every step, group 2 has equal rewards, group 3 has a failed episode, group 4
    a truncated one, groups 0 and 3 a lead with a subagent and tool calls. Replica `rollout-2` is lost at step 10 and
    back as `rollout-2.1`; a group is dropped at steps 5, 15 and 25, one is issued again at step 10; evaluations every
    10 steps. Three groups are pending when it ends.
    """
    history = History(folder, Shape(), begin_s)
    history.start()
    for _ in range(history.shape.steps):
        history.step()
    history.end("finished")
    return folder


def big_run(folder: Path, *, num_events: int = 1_000_000, num_episodes: int = 100_000) -> Path:
    """Write a run of about so many events and episodes, and answer its folder. Most events are `worker_busy`."""
    groups, size = 5, 8
    steps = max(1, num_episodes // (groups * size))
    spans = max(1, (num_events // steps - 14) // groups - 4)
    history = History(folder, Shape(steps=steps, groups=groups, size=size, tasks=500, spans=spans, has_subagents=False))
    history.start()
    for _ in range(steps):
        history.step()
    history.end("finished")
    return folder


def busy_step(step: int, num_groups: int, rollouts: Path) -> list[Event]:
    """Events of a step whose rollouts are in this file, at 4 replicas, at the time of this call."""
    now_s, groups, replicas = time.time(), [*range(num_groups * step, num_groups * (step + 1))], range(4)
    told: list[Event] = []
    for group_id in groups:
        task_id, replica = f"task-{group_id % 500}", f"rollout-{group_id % len(replicas)}"
        told += [
            GroupIssued(group_id, task_id, step, 8),
            WorkerBusy(replica, "generating", now_s - 0.1, now_s),
            GroupRolledOut(group_id, task_id, replica, step, step, (100,) * 8, 1, 0.1, 0.0),
            WorkerBusy("reward-0", "scoring", now_s - 0.01, now_s),
            GroupScored(group_id, task_id, (1.0, 0.0) * 4),
        ]
    told += [ReplicaSeen(f"rollout-{r}", step, False, 3, 0, 0.25, 100_000 + step) for r in replicas]
    told += [WorkerBusy(f"rollout-{r}", "pulling", now_s - 0.02, now_s) for r in replicas]
    told += [WorkerBusy("actor", a, now_s - 0.1, now_s) for a in ("fetching", "preparing", "training", "publishing")]
    told += [
        WeightsPublished(step, "c" * 32, 1_753_600, 1_753_600, 0.006, 0.02),
        RolloutsWritten(step, str(rollouts)),
        StepDone(step, {f"metric/{m}": 0.1 * m + step for m in range(60)}, tuple(groups)),
    ]
    return told


class History:
    """One run folder, written step by step. `now_s` is its clock: it moves by `shape.step_s` a step."""

    def __init__(self, folder: Path, shape: Shape, begin_s: float = BEGIN_S) -> None:
        self.folder, self.shape, self.now_s = folder, shape, begin_s
        self._sink = JsonlSink(folder)
        self.events = Events([self._sink], clock=lambda: self.now_s)
        self._random = Random(7)
        self._step = 0
        self._group_id = 0
        self._num_tokens = [0] * shape.replicas
        self._names = [f"rollout-{r}" for r in range(shape.replicas)]

    def start(self) -> None:
        """All that comes before the first step."""
        shape, tell = self.shape, self.events.emit
        (self.folder / "config.resolved.yaml").write_text(_config(self.folder, shape))
        tell(PhaseDone("load_data", 0.05))
        self.now_s += 3
        tell(PhaseDone("start_ray", 3.0))
        for name in self._names:
            tell(EngineChosen(name, "local", "0.4 million parameters on a CPU are not worth vLLM's start-up"))
        tell(RunStarted(str(self.folder), 0, shape.steps, shape.max_staleness))
        tell(WeightsPublished(0, _hash(0), 1_753_600, 1_753_600, 0.006, 0.02))
        for name in self._names:
            tell(ReplicaSeen(name, 0, False, 0, 0, 0.0, 0))
        for _ in range(3):
            self._issue()

    def step(self) -> None:
        """One training step: its groups from issue to training, and what else happens in that time."""
        shape, begin_s, before = self.shape, self.now_s, self._step
        first = self._group_id - 3
        lines = [line for g in range(shape.groups) if (line := self._group(first + g, g, begin_s))]
        self.now_s = begin_s + 0.7 * shape.step_s
        self.events.emit(WorkerBusy("actor", "fetching", self.now_s - 0.02, self.now_s))
        self.now_s = begin_s + 0.97 * shape.step_s
        self.events.emit(WorkerBusy("actor", "training", begin_s + 0.7 * shape.step_s, self.now_s))
        self.now_s = begin_s + shape.step_s
        self.events.emit(WorkerBusy("actor", "publishing", begin_s + 0.97 * shape.step_s, self.now_s))
        self._step += 1
        path = self.folder / "rollouts" / f"step_{self._step:06}.parquet"
        write_lines(path, lines)
        self.events.emit(RolloutsWritten(self._step, str(path)))
        group_ids = tuple(line["group_id"] for line in lines)
        self.events.emit(StepDone(self._step, self._metrics(lines), group_ids))
        self._after(before)

    def end(self, reason: str, detail: str = "") -> None:
        """The last event, and the files closed."""
        self.events.emit(RunEnded(self._step, reason, detail))
        self.events.close()

    def emit(self, event: Event, after_s: float = 0.0) -> None:
        """Something else that happened, `after_s` later than the last thing."""
        self.now_s += after_s
        self.events.emit(event)

    def _issue(self) -> None:
        task_id = f"task-{self._group_id % self.shape.tasks}"
        self.events.emit(GroupIssued(self._group_id, task_id, self._step, self.shape.size))
        self._group_id += 1

    def _group(self, group_id: int, place: int, begin_s: float) -> Mapping | None:
        """One group from its replica to its reward; nothing of it is left if it is dropped. Another is issued."""
        shape, replica = self.shape, group_id % self.shape.replicas
        name, task_id = self._names[replica], f"task-{group_id % self.shape.tasks}"
        self.now_s = begin_s + 0.6 * shape.step_s * place / shape.groups
        self.events.emit(GroupPlaced(group_id, name))
        began_s, seconds = self.now_s, 0.09 * shape.step_s
        for span in range(shape.spans):
            start_s = began_s + seconds * span / shape.spans
            self.now_s = start_s + 0.9 * seconds / shape.spans
            self.events.emit(WorkerBusy(name, "generating", start_s, self.now_s))
        self.now_s = began_s + seconds
        line = self._line(group_id, place, name, task_id)
        lengths = tuple(_num_tokens(e) for e in line["episodes"])
        outcomes = [e["trajectories"][0]["outcome"]["kind"] for e in line["episodes"]]
        self._num_tokens[replica] += sum(lengths)
        oldest = max(0, self._step - group_id % (shape.max_staleness + 1))
        self.events.emit(
            GroupRolledOut(
                group_id, task_id, name, oldest, oldest, lengths, outcomes.count("truncated"), seconds, 0.01 * seconds
            )
        )
        self.now_s += 0.02
        judge = f"reward-{group_id % shape.reward_workers}"
        self.events.emit(WorkerBusy(judge, "scoring", self.now_s - 0.02, self.now_s))
        rewards = tuple(e["trajectories"][0]["reward"] for e in line["episodes"])
        self.events.emit(GroupScored(group_id, task_id, rewards))
        self._issue()
        if place == 1 and self._step % 10 == 4:
            self.events.emit(GroupDropped(group_id, task_id, "failed", "its sandbox could not be made"))
            return None
        return line

    def _after(self, before: int) -> None:
        """What happens between steps: weights, a look at every replica, now and then an evaluation or a failure."""
        shape, step, tell = self.shape, self._step, self.events.emit
        tell(WeightsPublished(step, _hash(step), 1_753_600, 1_753_600, 0.006, 0.02))
        for r, name in enumerate(self._names):
            tell(WorkerBusy(name, "pulling", self.now_s - 0.03, self.now_s))
            running = (step + r) % 3
            tell(ReplicaSeen(name, step, False, running, (step + r) % 2, 0.1 + 0.2 * running, self._num_tokens[r]))
        tell(QueueSeen(3 + step % 4, step % 3))
        if step == 10 and shape.replicas > 2:
            tell(WorkerFailed("rollout-2", "rolling out group 58", "the process ended with SIGKILL"))
            group_id, task_id = self._group_id - 1, f"task-{(self._group_id - 1) % shape.tasks}"
            tell(GroupReissued(group_id, task_id, "rollout-2 died"))
            tell(GroupIssued(group_id, task_id, step, shape.size))
            self._names[2] = "rollout-2.1"
            tell(WorkerRestarted("rollout-2.1", 4.2))
        if step % 10 == 0:
            tell(CheckpointSaved(step, str(self.folder / "checkpoints" / f"step_{step:06}"), 0.1))
            values = {"mean": 0.3 + 0.01 * step, "mean_ci95": 0.02, "pass@1": 0.3 + 0.01 * step, "num_tasks": 64}
            metrics = {f"eval/held_out/{name}": value for name, value in values.items()}
            tell(EvalDone(before, "held_out", _hash(before), 1.5, metrics))

    def _line(self, group_id: int, place: int, replica: str, task_id: str) -> dict:
        """A group as `rlsys.replay.rollout_json` writes it."""
        shape, version = self.shape, max(0, self._step - group_id % (self.shape.max_staleness + 1))
        with_agents = shape.has_subagents and place % 3 == 0
        episodes, readings = [], []
        for e in range(shape.size):
            right = place != 2 and self._random.random() < 0.2 + 0.7 * self._step / shape.steps
            says = list(_agents(group_id, e, right) if with_agents else _alone(group_id, e, right))
            made = [self._trajectory(*said, version) for said in says]
            episodes.append(
                {"trajectories": [t for t, _ in made], "num_tool_calls": int(with_agents), "num_sequential": 0}
            )
            readings.append([r for _, r in made])
            _end(episodes[-1]["trajectories"][0], place, e, right)
        rewards = [e["trajectories"][0]["reward"] for e in episodes]
        parts = [{} if r is None else {"exact": float(r > 0.5), "format": 0.5 * (r % 1 > 0)} for r in rewards]
        return {
            "step": self._step + 1,
            "group_id": group_id,
            "task": {
                "id": task_id,
                "prompt": _prompt(group_id),
                "answer": str(group_id),
                "info": {"level": group_id % 5},
            },
            "replica": replica,
            "permit_version": version,
            "episodes": episodes,
            "assigned": list(_assigned(episodes, rewards)),
            "parts": parts,
            "policy": "policy",
            "columns": {},
            "readings": readings,
        }

    def _trajectory(self, agent: str, parent: int | None, said: list[tuple[str, str]], version: int) -> tuple:
        turns, readings, before = [], [], []
        for heard, text in said:
            pieces = re.findall(r"\s*\S+", text)
            logprobs = [round(-self._random.random() * 2, 6) for _ in pieces]
            before = [*before, *_ids(re.findall(r"\s*\S+", heard))]
            turns.append(
                {
                    "prompt_ids": before,
                    "output_ids": _ids(pieces),
                    "logprobs": logprobs,
                    "versions": [{"version": version, "num_tokens": len(pieces)}],
                    "finish": "stop",
                    "text": text,
                    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 64},
                }
            )
            before = [*before, *_ids(pieces)]
            readings.append(
                {
                    "said": heard,
                    "pieces": pieces,
                    "trainer_logprobs": [round(p - 0.05 * self._random.random(), 6) for p in logprobs],
                    "entropies": [round(1.5 * self._random.random(), 6) for _ in pieces],
                    "advantages": [],
                    "is_masked": [self._random.random() < 0.05 for _ in pieces],
                }
            )
        outcome = {"kind": "ok", "reason": ""}
        trajectory = {"agent": agent, "turns": turns, "outcome": outcome, "reward": None, "parent": parent}
        return {**trajectory, "policy": "policy"}, readings

    def _metrics(self, lines: list) -> Mapping[str, float]:
        """The metrics of a step that went well, with a little noise."""
        shape, noise, share = self.shape, self._random.random(), self._step / self.shape.steps
        rewards = [t["reward"] for line in lines for e in line["episodes"] if (t := e["trajectories"][0])]
        given = [r for r in rewards if r is not None]
        lengths = [_num_tokens(e) for line in lines for e in line["episodes"]]
        return {
            "loss": -0.01 * noise,
            "reward/mean": fmean(given),
            "reward/std": pstdev(given),
            "reward/min": min(given),
            "reward/max": max(given),
            "reward/failed_frac": 1 - len(given) / len(rewards),
            "reward/by/exact": fmean(given),
            "group/frac_zero_std": 1 / shape.groups,
            "policy/entropy": 1.6 * exp(-share) + 0.02 * noise,
            "policy/kl_ref": 0.02 * share + 0.001 * noise,
            "policy/clip_frac_high": 0.01 * noise,
            "sampler/mismatch_kl": 0.0004 + 0.0001 * noise,
            "sampler/ratio_p99": 1.05 + 0.02 * noise,
            "sampler/ratio_max": 1.2 + 0.1 * noise,
            "sampler/ess": 0.98 - 0.01 * noise,
            "completions/length_mean": fmean(lengths),
            "completions/length_p90": max(lengths),
            "completions/length_max": max(lengths),
            "completions/truncated_frac": 0.04,
            "gac/cosine": 0.02 * (noise - 0.5),
            "optim/grad_norm": 0.8 + 0.1 * noise,
            "optim/lr": 0.0003 * (1 - 0.9 * share),
            "async/staleness_mean": 0.5 * shape.max_staleness,
            "async/staleness_max": shape.max_staleness,
            "async/queue_depth": self._step % 3,
            "async/dropped": (self._step + 5) // 10,
            "async/dropped_stale": 0,
            "time/step": shape.step_s,
            "time/rollout": 0.55 * shape.step_s,
            "time/reward": 0.1 * shape.step_s,
            "time/fetch": 0.01 * shape.step_s,
            "time/train": 0.27 * shape.step_s,
            "time/publish": 0.03 * shape.step_s,
            "time/wait_batch": (0.66 + 0.04 * noise) * shape.step_s,
            "time/wait_permit": 0.05 * shape.step_s,
            "perf/tokens_per_s": sum(lengths) / shape.step_s,
            "driver/cpu_share": 0.2,
        }


def _prompt(group_id: int) -> list[dict]:
    return [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": f"What is {group_id} plus zero?"},
    ]


def _alone(group_id: int, episode: int, right: bool) -> Iterator[_Said]:
    answer = group_id if right else group_id + 1 + episode
    heard = f"<|im_start|>user\nWhat is {group_id} plus zero?<|im_end|>\n<|im_start|>assistant\n"
    yield "policy", None, [(heard, f"Adding zero changes nothing, so the answer is {answer}")]


def _agents(group_id: int, episode: int, right: bool) -> Iterator[_Said]:
    """A lead that calls a subagent as a tool, which answers it."""
    answer = group_id if right else group_id + 1 + episode
    call = f'<tool_call>\n{{"name": "ask", "arguments": {{"question": "{group_id} + 0"}}}}\n</tool_call>'
    asked = f"<|im_start|>user\nWhat is {group_id} plus zero?<|im_end|>\n<|im_start|>assistant\n"
    told = f"<|im_end|>\n<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n"
    yield "lead", None, [(asked, f"I will ask.\n{call}"), (told, f"The answer is {answer}")]
    yield "subagent", 0, [(f"<|im_start|>user\n{group_id} + 0<|im_end|>\n<|im_start|>assistant\n", f"That is {answer}")]


def _end(root: dict, place: int, episode: int, right: bool) -> None:
    """How the root's trajectory ended, and its reward."""
    root["reward"] = 1.0 if right else 0.0
    if place == 3 and episode == 1:
        root.update(reward=None, outcome={"kind": "failed", "reason": "the tool `ask` did not answer within 10 s"})
    if place == 4 and episode == 2:
        root.update(outcome={"kind": "truncated", "reason": ""})
        root["turns"][-1]["finish"] = "length"


def _assigned(episodes: list[dict], rewards: list[float | None]) -> Iterator[dict]:
    """The advantage of every trajectory of the episodes that have a reward: how far it is from the mean."""
    given = [r for r in rewards if r is not None]
    mean, spread = fmean(given), pstdev(given)
    for e, (episode, reward) in enumerate(zip(episodes, rewards, strict=True)):
        for t in range(len(episode["trajectories"]) if reward is not None else 0):
            advantage = round(((reward or 0) - mean) / (spread + 1e-6), 6)
            yield {"episode": e, "trajectory": t, "advantage": advantage, "sample": None}


def _num_tokens(episode: Mapping) -> int:
    return sum(len(turn["output_ids"]) for t in episode["trajectories"] for turn in t["turns"])


def _ids(pieces: list[str]) -> list[int]:
    return [zlib.crc32(piece.encode()) % 50_000 for piece in pieces]


def _hash(version: int) -> str:
    return f"{zlib.crc32(str(version).encode()):032x}"


def _config(folder: Path, shape: Shape) -> str:
    return f"""run:
  name: {folder.name}
  folder: {folder.parent}
  seed: 0
  steps: {shape.steps}
model:
  path: models/tiny-4
  dtype: float32
data:
  path: data/plus_zero.jsonl
algorithm:
  type: grpo
  group_size: {shape.size}
  clip_high: 0.28
rollout:
  engine: local
  replicas: {shape.replicas}
train:
  groups_per_step: {shape.groups}
  lr: 0.0003
asynchrony:
  max_staleness: {shape.max_staleness}
  window: 1
record:
  rollouts_every: 1
"""
