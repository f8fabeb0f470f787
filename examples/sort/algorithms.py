"""Train the tiny policy with several algorithms, seeds and staleness bounds, one after the other; print a table.

    python -m examples.sort.algorithms --algorithms grpo,ppo,kto --seeds 0,1,2 --staleness 0,4

Each run is `rlsys train examples/sort/run.yaml algorithm.type=NAME`, with the seed, its model and its data, and
`asynchrony.max_staleness`; nothing else is changed. A run takes a few minutes. Every finished run is a line of the file
`--out`. Runs already in that file are skipped, so that an interrupted study can continue.

A Markdown table goes to stdout, and all figures as JSON to its last line. CPU-seconds are those of every process, from
the command to the end of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from math import ceil
from pathlib import Path
from statistics import fmean

from benchmarks.measure import marks_of
from examples.curve import running_mean
from examples.finished import append, rows
from examples.sort.prepare import Recipe, prepare

GOAL = 0.9
"""Reward goal of the mean of ten steps; the first step that reaches it is reported."""
LAST = 0.1
"""Share of the steps, at the end, over which figures are averaged."""
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True, slots=True, order=True)
class Trial:
    """Settings of one run."""

    algorithm: str
    staleness: int
    seed: int
    steps: int


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run."""

    trial: Trial
    reward_last: float
    """Mean over the last tenth of the steps."""
    steps_to_goal: int | None
    """First step at which the mean of ten steps reaches `GOAL`; None without one."""
    cpu_s: float
    explained_variance: float | None
    """Explained variance of the critic, mean over the last tenth of the steps; None without a critic."""


def main() -> None:
    """Run the missing trials, and show all requested ones."""
    parser = argparse.ArgumentParser(description="Compare algorithms on the tiny task.")
    parser.add_argument("--algorithms", default="grpo,ppo,kto", help="names of installed algorithms")
    parser.add_argument("--seeds", default="0,1,2", help="of the warm start and of the run")
    parser.add_argument("--staleness", default="0,4", help="values of asynchrony.max_staleness")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path(".cache/sort/algorithms.jsonl"), help="finished runs")
    arguments = parser.parse_args()
    asked = [
        Trial(algorithm, int(staleness), int(seed), arguments.steps)
        for algorithm, staleness, seed in product(
            arguments.algorithms.split(","), arguments.staleness.split(","), arguments.seeds.split(",")
        )
    ]
    done = {result.trial: result for result in read(arguments.out)}
    for trial in asked:
        if trial not in done:
            print(f"{trial.algorithm}, staleness {trial.staleness}, seed {trial.seed}", file=sys.stderr, flush=True)
            done[trial] = run(trial)
            append(arguments.out, done[trial])
    results = [done[trial] for trial in asked]
    print("\n".join(table_of(results)))
    print(json.dumps({"runs": [asdict(result) for result in results]}), flush=True)


def run(trial: Trial) -> Result:
    """Train once. Raises `RuntimeError` with the end of the output if that fails."""
    prepared = Path(".cache/sort") / f"seed{trial.seed}"
    prepared.mkdir(parents=True, exist_ok=True)
    prepare(prepared, Recipe(seed=trial.seed))
    with tempfile.TemporaryDirectory(prefix="sort_") as folder:
        command = [sys.executable, "-m", "rlsys.cli", "train", "examples/sort/run.yaml"]
        command += [f"algorithm.type={trial.algorithm}", f"asynchrony.max_staleness={trial.staleness}"]
        command += [f"run.folder={folder}", "run.name=run", f"run.seed={trial.seed}", f"run.steps={trial.steps}"]
        command += [f"model.path={prepared / 'model'}", f"data.path={prepared / 'train.jsonl'}"]
        command += [f"eval.data.held_out={prepared / 'eval.jsonl'}"]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        (end,) = marks_of(command, ENV, metrics, [trial.steps])
        measured = [json.loads(line) for line in metrics.read_text().splitlines()]
    return result_of(trial, [row for row in measured if "reward/mean" in row], end.cpu_s)


def result_of(trial: Trial, rows: Sequence[dict[str, float]], cpu_s: float) -> Result:
    """Extract the figures of a run from its metrics, one row per step."""
    rewards = [row["reward/mean"] for row in rows]
    last = rows[-ceil(LAST * len(rows)) :]
    explained = [row["critic/explained_variance"] for row in last if "critic/explained_variance" in row]
    return Result(
        trial=trial,
        reward_last=fmean(row["reward/mean"] for row in last),
        steps_to_goal=next((n for n, mean in enumerate(running_mean(rewards), 1) if mean >= GOAL), None),
        cpu_s=cpu_s,
        explained_variance=fmean(explained) if explained else None,
    )


def read(path: Path) -> Iterator[Result]:
    """Yield the finished runs."""
    for row in rows(path):
        yield Result(**{**row, "trial": Trial(**row["trial"])})


def table_of(results: Iterable[Result]) -> Iterator[str]:
    """Yield a Markdown table: a row for each algorithm and bound, the seeds side by side."""
    head = ["algorithm", "max_staleness", "seeds", "reward, last tenth", f"steps to {GOAL:.2f}", "CPU-s"]
    head += ["explained variance"]
    yield f"| {' | '.join(head)} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    ordered = sorted(results, key=lambda result: result.trial)
    for (algorithm, staleness), group in groupby(ordered, lambda r: (r.trial.algorithm, r.trial.staleness)):
        runs = list(group)
        cells = [
            algorithm,
            str(staleness),
            " / ".join(str(run.trial.seed) for run in runs),
            " / ".join(f"{run.reward_last:.3f}" for run in runs),
            " / ".join(str(run.steps_to_goal or "never") for run in runs),
            " / ".join(f"{run.cpu_s:.0f}" for run in runs),
            " / ".join(f"{ev:.2f}" for run in runs if (ev := run.explained_variance) is not None) or "no critic",
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
