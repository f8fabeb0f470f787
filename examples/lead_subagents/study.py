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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from examples.lead_subagents.prepare import prepare
from examples.study import markdown, print_study, run_all, study_parser, trained
from examples.tiny_policy import WarmStart

CASES = ("joint-3", "lead-3", "subagent-3", "joint-2", "joint-1")
FROZEN = {"joint": "", "lead": "subagent", "subagent": "lead"}
"""Frozen agent, by trained agent."""
TRAINED = {"joint": "both", "lead": "the lead", "subagent": "subagents"}
MEASURED = "eval/held_out/mean"


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

    f1_before: float
    f1_after: float
    cpu_s: float
    """CPU-seconds of every process, from the command to the end of the last evaluation."""


def main() -> None:
    """Run the missing trials, and show all requested ones."""
    parser = study_parser(__doc__, steps=40, out=Path(".cache/lead_subagents/study.jsonl"))
    parser.add_argument("--cases", default=",".join(CASES), help="who is trained, and how many subagents there are")
    options = parser.parse_args()
    settings = product(options.cases.split(","), map(int, options.seeds.split(",")))
    results = run_all([Trial(case, seed, options.steps) for case, seed in settings], run, Result, options.out)
    print_study(table_of(results), results)


def run(trial: Trial) -> Result:
    """Train once."""
    prepared = Path(".cache/lead_subagents") / f"seed{trial.seed}"
    prepare(prepared, WarmStart(seed=trial.seed))
    changes = [*trial.changes, f"run.seed={trial.seed}", f"run.steps={trial.steps}", f"eval.every={trial.steps}"]
    num_rows = trial.steps + 2  # a row for every step and both evaluations
    return result_of(trial.steps, *trained("lead_subagents", prepared, num_rows, *changes))


def result_of(steps: int, rows: Sequence[dict[str, float]], cpu_s: float) -> Result:
    """Extract the figures of a run from its metrics."""
    measured = {row["step"]: row[MEASURED] for row in rows if MEASURED in row}
    return Result(measured[0], measured[steps], cpu_s)


def table_of(results: Mapping[Trial, Result]) -> str:
    """Build a Markdown table: a row for each case, the seeds side by side."""
    rows = []
    for case, trials in groupby(results, lambda trial: trial.case):
        seeds, (trained, _, width) = {trial.seed: results[trial] for trial in trials}, case.partition("-")
        cells = [
            " / ".join(map(str, seeds)),
            " / ".join(f"{run.f1_before:.3f}" for run in seeds.values()),
            " / ".join(f"{run.f1_after:.3f}" for run in seeds.values()),
            " / ".join(f"{run.cpu_s:.0f}" for run in seeds.values()),
        ]
        rows.append([TRAINED[trained], width, *cells])
    return markdown(["trained", "subagents", "seeds", "item-F1 before", "item-F1 after", "CPU-s"], rows)


if __name__ == "__main__":
    main()
