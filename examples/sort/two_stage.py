"""Train by KTO alone, after a stage of rejection fine-tuning, and by rejection fine-tuning alone; print a table.

    python -m examples.sort.two_stage --seeds 0,1,2

The recipe of ToolSelf (arXiv:2602.07883): the policy first learns from its own samples that were rewarded, then by KTO
from good and bad ones. All cases take the same number of steps of the same size. Each stage is a run of
`examples/sort/run.yaml`; the second begins with the weights of the first, whose folder is its `model.path`. Finished
runs are lines of the file `--out` and not run again; all figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import answer_of, rows_of, train_command
from examples.sort.prepare import prepare_seed
from examples.study import markdown, run_all

ACCURACY = "eval/held_out/mean"
REJECTION = "algorithm={type: sft, reward_above: 0.99}"
KTO = "algorithm.type=kto"
CASES: Mapping[str, tuple[tuple[str, float], ...]] = {
    "KTO": ((KTO, 1.0),),
    "rejection fine-tuning, then KTO": ((REJECTION, 1 / 3), (KTO, 2 / 3)),
    "rejection fine-tuning": ((REJECTION, 1.0),),
}
"""Stages of each case: its override, and its share of the steps."""


@dataclass(frozen=True, slots=True)
class TwoStageRun:
    """Settings of the runs of one case."""

    case: str
    seed: int
    steps: int


@dataclass(frozen=True, slots=True)
class StageAccuracies:
    """Mean reward on held-out tasks, one sample each at temperature 1, at the end of each stage."""

    accuracies: list[float]


def train(run: TwoStageRun) -> StageAccuracies:
    """Train all stages. Raises `RuntimeError` with the end of the output if one fails."""
    prepared, _ = prepare_seed(run.seed)
    accuracies = []
    with tempfile.TemporaryDirectory(prefix="two_stage_") as name:
        model = prepared / "model"
        for number, (override, share) in enumerate(CASES[run.case]):
            folder = Path(name) / f"stage{number}"
            steps = round(share * run.steps)
            overrides = (
                f"run.seed={run.seed}",
                f"run.steps={steps}",
                override,
                f"checkpoint.every={steps}",
                f"eval.every={steps}",
                "eval.temperature=1",
            )
            answer_of([*train_command(prepared, folder, *overrides), f"model.path={model}"])
            rows = rows_of(folder / "run" / "metrics.jsonl")
            accuracies.append([row[ACCURACY] for row in rows if ACCURACY in row][-1])
            model = folder / "run"
    return StageAccuracies(accuracies)


def main() -> None:
    """Run what is missing; print the table, then JSON in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="of the warm start and of the run")
    parser.add_argument("--steps", type=int, default=150, help="of all stages together")
    parser.add_argument("--out", type=Path, default=Path(".cache/sort/two_stage.jsonl"), help="finished runs")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = {case: [TwoStageRun(case, seed, options.steps) for seed in seeds] for case in CASES}
    found = run_all((run for each in runs.values() for run in each), train, StageAccuracies, options.out)
    rows = []
    for case, each in runs.items():
        stages = zip(*(found[run].accuracies for run in each), strict=True)
        rows.append(
            [case, " / ".join(map(str, seeds)), ", then ".join(" / ".join(f"{r:.3f}" for r in s) for s in stages)]
        )
    print(markdown(["case", "seeds", "held-out accuracy at the end of each stage"], rows))
    print(json.dumps({"runs": [{"run": asdict(run), **asdict(rewards)} for run, rewards in found.items()]}), flush=True)


if __name__ == "__main__":
    main()
