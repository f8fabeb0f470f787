"""Train lead and subagents together, one role alone, and fewer subagents; print a table.

    python -m examples.lead_subagents.study --seeds 0,1,2

Each run is `rlsys train examples/lead_subagents/run.yaml` with the seed, its model and its data, and one of these:

| case | changed |
| --- | --- |
| joint-3, joint-2, joint-1 | `rollout.workflow.max_subagents`, in training and evaluation |
| lead-3 | only the lead is trained: `algorithm.frozen_agents=[subagent]` |
| subagent-3 | only subagents are: `algorithm.frozen_agents=[lead]` |

Every finished run is a line of the file `--out`. Runs already in that file are skipped, so that an interrupted study
can continue. A Markdown table goes to stdout, and all figures as JSON to its last line. Item-F1 is that of 256 held-out
tables, one sample each at temperature 1, before and after training.
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
from pathlib import Path

from benchmarks.measure import marks_of
from examples.finished import append, rows
from examples.imitation import Recipe
from examples.lead_subagents.prepare import prepare

CASES = ("joint-3", "lead-3", "subagent-3", "joint-2", "joint-1")
FROZEN = {"joint": "", "lead": "subagent", "subagent": "lead"}
"""Frozen agent, by trained agent."""
MEASURED = "eval/held_out/mean"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of one run."""

    case: str
    """Trained agents and number of subagents: `lead-3`."""
    seed: int
    steps: int

    @property
    def changes(self) -> list[str]:
        """Overrides for the command line."""
        trained, _, width = self.case.partition("-")
        return [f"rollout.workflow.max_subagents={width}", f"algorithm.frozen_agents=[{FROZEN[trained]}]"]


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run."""

    trial: Trial
    f1_before: float
    f1_after: float
    cpu_s: float
    """CPU-seconds of every process, from the command to the end of the last evaluation."""


def main() -> None:
    """Run the missing trials, and show all requested ones."""
    parser = argparse.ArgumentParser(description="Who has to learn, and how many does it take.")
    parser.add_argument("--cases", default=",".join(CASES), help="who is trained, and how many subagents there are")
    parser.add_argument("--seeds", default="0,1,2", help="of the warm start and of the run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(".cache/lead_subagents/study.jsonl"), help="finished runs")
    arguments = parser.parse_args()
    pairs = product(arguments.cases.split(","), map(int, arguments.seeds.split(",")))
    asked = [Trial(case, seed, arguments.steps) for case, seed in pairs]
    done = {result.trial: result for result in read(arguments.out)}
    for trial in asked:
        if trial not in done:
            print(f"{trial.case}, seed {trial.seed}", file=sys.stderr, flush=True)
            done[trial] = run(trial)
            append(arguments.out, done[trial])
    results = [done[trial] for trial in asked]
    print("\n".join(table_of(results)))
    print(json.dumps({"runs": [asdict(result) for result in results]}), flush=True)


def run(trial: Trial) -> Result:
    """Train once. Raises `RuntimeError` with the end of the output if that fails."""
    prepared = Path(".cache/lead_subagents") / f"seed{trial.seed}"
    prepare(prepared, Recipe(seed=trial.seed))
    with tempfile.TemporaryDirectory(prefix="lead_") as folder:
        command = [sys.executable, "-m", "rlsys.cli", "train", "examples/lead_subagents/run.yaml", *trial.changes]
        command += [f"run.folder={folder}", "run.name=run", f"run.seed={trial.seed}", f"run.steps={trial.steps}"]
        command += [f"model.path={prepared / 'model'}", f"data.path={prepared / 'train.jsonl'}"]
        command += [f"eval.data.held_out={prepared / 'eval.jsonl'}", f"eval.every={trial.steps}"]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        (end,) = marks_of(command, ENV, metrics, [trial.steps + 2])  # a row for every step and both evaluations
        measured = [json.loads(line) for line in metrics.read_text().splitlines()]
    return result_of(trial, measured, end.cpu_s)


def result_of(trial: Trial, rows: Sequence[dict[str, float]], cpu_s: float) -> Result:
    """Extract the figures of a run from its metrics."""
    measured = {row["step"]: row[MEASURED] for row in rows if MEASURED in row}
    return Result(trial, measured[0], measured[trial.steps], cpu_s)


def read(path: Path) -> Iterator[Result]:
    """Yield the finished runs."""
    for row in rows(path):
        yield Result(**{**row, "trial": Trial(**row["trial"])})


def table_of(results: Iterable[Result]) -> Iterator[str]:
    """Yield a Markdown table: a row for each case, the seeds side by side."""
    yield "| trained | subagents | seeds | item-F1 before | item-F1 after | CPU-s |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for case, group in groupby(results, lambda result: result.trial.case):
        runs, (trained, _, width) = list(group), case.partition("-")
        cells = [
            {"joint": "both", "lead": "the lead", "subagent": "subagents"}[trained],
            width,
            " / ".join(str(run.trial.seed) for run in runs),
            " / ".join(f"{run.f1_before:.3f}" for run in runs),
            " / ".join(f"{run.f1_after:.3f}" for run in runs),
            " / ".join(f"{run.cpu_s:.0f}" for run in runs),
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
