"""Train with and without a bonus for parallel work; print accuracy against critical path as a table.

    python -m examples.countdown_parallel.study --seeds 0,1,2

Each run is `rlsys train examples/countdown_parallel/run.yaml` with the seed, its model and its data, with or
without the reward function `parallel`. Figures are means of the first and of the last ten steps of training: the
share of games solved, the tokens of the longest chain of an episode, and the agents of an episode. Finished runs
are lines of the file `--out` and not run again; all figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from examples.countdown_parallel.prepare import prepare
from examples.study import Comparison, Row
from examples.tiny_policy import Figures, WarmStart

SOLVED = "examples.countdown_parallel.countdown:solved"
CASES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("answers",): (f"reward.fn={SOLVED}",),
    ("answers and parallel work",): (f"reward.fn=[{{fn: {SOLVED}}}, {{fn: parallel, given: solved}}]",),
}
"""Overrides, by what is rewarded."""
WINDOW = 10
"""Steps of a mean."""


def prepare_seed(seed: int) -> tuple[Path, Figures]:
    """Fill the folder of a seed; return it with the figures of the warm start."""
    folder = Path(".cache/countdown_parallel") / f"seed{seed}"
    return folder, prepare(folder, WarmStart(seed=seed))


def figures_of(rows: Sequence[Mapping[str, float]]) -> Row:
    """Extract the figures of a run from its metrics."""
    steps = [row for row in rows if "agents/sequential_tokens" in row]

    def mean(name: str, part: slice) -> float:
        return fmean(row[name] for row in steps[part])

    first, last = slice(WINDOW), slice(-WINDOW, None)
    return {
        "solved_before": mean("reward/by/solved", first),
        "solved": mean("reward/by/solved", last),
        "longest_before": mean("agents/sequential_tokens", first),
        "longest": mean("agents/sequential_tokens", last),
        "agents_before": mean("agents/per_episode", first),
        "agents": mean("agents/per_episode", last),
    }


COMPARISON = Comparison(
    example="countdown_parallel",
    prepare_seed=prepare_seed,
    figures_of=figures_of,
    head=("rewarded",),
    columns={
        "solved, first steps": ("solved_before", ".3f", ""),
        "solved, last steps": ("solved", ".3f", ""),
        "longest chain, first": ("longest_before", ".1f", ""),
        "longest chain, last": ("longest", ".1f", ""),
        "agents, first": ("agents_before", ".2f", ""),
        "agents, last": ("agents", ".2f", ""),
    },
)


if __name__ == "__main__":
    COMPARISON.show(CASES, COMPARISON.parser(__doc__, steps=60).parse_args())
