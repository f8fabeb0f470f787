"""Train the tiny policy with several algorithms, seeds and staleness bounds, one after the other; print a table.

    python -m examples.sort.algorithms --algorithms grpo,ppo,kto --seeds 0,1,2 --staleness 0,4

Each run is `rlsys train examples/sort/run.yaml algorithm.type=NAME`, with the seed, its model and its data, and
`asynchrony.max_staleness`; nothing else is changed. A run takes a few minutes. Every finished run is a line of the file
`--out`. Runs already in that file are skipped, so that an interrupted study can continue.

A Markdown table goes to stdout, and all figures as JSON to its last line. CPU-seconds are those of every process, from
the command to the end of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import ceil
from pathlib import Path
from statistics import fmean

from examples.sort.prepare import Recipe, prepare
from examples.study import markdown, print_study, run_all, running_mean, study_parser, trained

GOAL = 0.9
"""Reward goal of the mean of ten steps; the first step that reaches it is reported."""
LAST = 0.1
"""Share of the steps, at the end, over which figures are averaged."""
HEAD = ("algorithm", "max_staleness", "seeds", "reward, last tenth", f"steps to {GOAL:.2f}", "CPU-s")


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

    reward_last: float
    """Mean over the last tenth of the steps."""
    steps_to_goal: int | None
    """First step at which the mean of ten steps reaches `GOAL`; None without one."""
    cpu_s: float
    explained_variance: float | None
    """Explained variance of the critic, mean over the last tenth of the steps; None without a critic."""


def main() -> None:
    """Run the missing trials, and show all requested ones."""
    parser = study_parser(__doc__, steps=150, out=Path(".cache/sort/algorithms.jsonl"))
    parser.add_argument("--algorithms", default="grpo,ppo,kto", help="names of installed algorithms")
    parser.add_argument("--staleness", default="0,4", help="values of asynchrony.max_staleness")
    options = parser.parse_args()
    settings = product(*(values.split(",") for values in (options.algorithms, options.staleness, options.seeds)))
    trials = [Trial(name, int(staleness), int(seed), options.steps) for name, staleness, seed in settings]
    results = run_all(trials, run, Result, options.out)
    print_study(table_of(results), results)


def run(trial: Trial) -> Result:
    """Train once."""
    prepared = Path(".cache/sort") / f"seed{trial.seed}"
    prepare(prepared, Recipe(seed=trial.seed))
    changes = [f"algorithm.type={trial.algorithm}", f"asynchrony.max_staleness={trial.staleness}"]
    changes += [f"run.seed={trial.seed}", f"run.steps={trial.steps}"]
    rows, cpu_s = trained("sort", prepared, trial.steps, *changes)
    return result_of([row for row in rows if "reward/mean" in row], cpu_s)


def result_of(rows: Sequence[dict[str, float]], cpu_s: float) -> Result:
    """Extract the figures of a run from its metrics, one row per step."""
    rewards = [row["reward/mean"] for row in rows]
    last = rows[-ceil(LAST * len(rows)) :]
    explained = [row["critic/explained_variance"] for row in last if "critic/explained_variance" in row]
    return Result(
        reward_last=fmean(row["reward/mean"] for row in last),
        steps_to_goal=next((n for n, mean in enumerate(running_mean(rewards), 1) if mean >= GOAL), None),
        cpu_s=cpu_s,
        explained_variance=fmean(explained) if explained else None,
    )


def table_of(results: Mapping[Trial, Result]) -> str:
    """Build a Markdown table: a row for each algorithm and bound, the seeds side by side."""
    rows = []
    for (algorithm, staleness), trials in groupby(sorted(results), lambda trial: (trial.algorithm, trial.staleness)):
        seeds = {trial.seed: results[trial] for trial in trials}
        runs = seeds.values()
        cells = [
            " / ".join(map(str, seeds)),
            " / ".join(f"{run.reward_last:.3f}" for run in runs),
            " / ".join(str(run.steps_to_goal or "never") for run in runs),
            " / ".join(f"{run.cpu_s:.0f}" for run in runs),
            " / ".join(f"{ev:.2f}" for run in runs if (ev := run.explained_variance) is not None) or "no critic",
        ]
        rows.append([algorithm, str(staleness), *cells])
    return markdown([*HEAD, "explained variance"], rows)


if __name__ == "__main__":
    main()
