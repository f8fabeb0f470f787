"""A run of which every list and text is longer than a report has room for.

long_run(tmp_path / "long")
"""

from __future__ import annotations

from pathlib import Path

import orjson

from rlsys.config import Config
from rlsys.monitoring.events import EngineChosen, EvalDone, GroupIssued, GroupScored, WorkerFailed, WorkerRestarted
from tests.histories import History, Shape
from tests.hostile import HOSTILE
from tests.rollouts import lines_of, write_lines

_PROMPT = "A train leaves at 9:40 and travels 312 km at 78 km/h. When does it arrive?\n\nGive the time alone.\n" * 60
_ANSWER = (
    "First find how long it travels: 312 / 78 = 4 hours.\n\nThen add them to 9:40.\n" * 100 + "It arrives at 13:40."
)
_DETAIL = f"RuntimeError: CUDA out of memory while rolling out, see {HOSTILE}\n" * 40


def long_run(folder: Path) -> Path:
    """Write 200 steps with 12 replicas, 12 data sets, failures of episodes and workers, and answer the folder."""
    history = History(folder, Shape(steps=200, groups=4, size=8, replicas=12))
    history.start()
    for worker in range(12):
        history.emit(EngineChosen(f"rollout-{worker}", "vllm", f"there is a GPU of kind {worker}"))
    for step in range(1, 201):
        history.step()
        if step % 10 == 0:
            for dataset in range(12):
                history.emit(_evaluation(step, f"{dataset}_{'competition_mathematics_' * 5}"))
            failures = {f"{HOSTILE} {reason} {'W' * 3000}": 1.0 for reason in range(step)}
            history.emit(GroupScored(10_000 + step, f"task-{step % 24}", (None,) * step, failures))
            history.emit(WorkerFailed(f"rollout-{step % 12}", HOSTILE, _DETAIL))
            history.emit(WorkerRestarted(f"rollout-{step % 12}.1", 3.0), after_s=4)
    for group in range(40):
        history.emit(GroupIssued(20_000 + group, HOSTILE, 200, 8))
    history.end("failed", _DETAIL)
    for path in sorted(folder.glob("rollouts/*.parquet"))[-10:]:
        write_lines(path, map(_talkative, lines_of(path)))
    given = Config(
        run={"name": "long", "steps": 200},
        model={"path": "models/" + "qwen" * 30},
        data={"path": "data/train.jsonl"},
        eval={"data": {f"set_{n}": f"data/{n}.jsonl" for n in range(80)}, "every": 10},
        train={"lr": 3e-4, "groups_per_step": 4},
    )  # type: ignore[arg-type]
    (folder / "config.resolved.yaml").write_text(given.to_yaml())
    return folder


def _evaluation(step: int, dataset: str) -> EvalDone:
    values = {"mean": 0.3 + 0.002 * step, "mean_ci95": 0.02, "failed_frac": 0.04, "num_tasks": 64.0}
    values |= {f"pass@{2**k}": 0.3 + 0.001 * step + 0.05 * k for k in range(12)}
    metrics = {f"eval/{dataset}/{name}": value for name, value in values.items()}
    return EvalDone(step, dataset, "hash", 1.5, metrics, {HOSTILE: 3.0})


def _talkative(line: dict) -> dict:
    """A group with a long prompt and long answers, of which one is hostile."""
    line["task"] |= {"prompt": _PROMPT, "answer": _ANSWER}
    line["parts"] = [{f"{HOSTILE}{n}": 1.0 for n in range(9)} for _ in line["parts"]]
    for e, episode in enumerate(line["episodes"]):
        for trajectory in episode["trajectories"]:
            for turn in trajectory["turns"]:
                turn["text"] = orjson.dumps(HOSTILE * 9).decode() if e == 1 else _ANSWER
    return line
