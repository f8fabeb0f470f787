"""Train with rewards discounted by round and without; print answers and rounds as a table.

    python -m examples.research.study --seeds 0,1,2

Each run is `rlsys train examples/research/run.yaml` with the seed, its model and its data. Without a discount, `eapo`
is GSPO on rounds. Figures are means of the first and of the last ten steps of training: the share of right answers,
and the tokens of an episode, five to six a round. Finished runs are lines of the file `--out` and not run again; all
figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from examples.research.prepare import prepare
from examples.study import Comparison, Row
from examples.tiny_policy import Figures, WarmStart

CASES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("none (GSPO on rounds)",): ("algorithm.gamma=1",),
    ("0.9 per round (EAPO)",): (),
}
"""Overrides, by discount."""
WINDOW = 10
"""Steps of a mean."""


def prepare_seed(seed: int) -> tuple[Path, Figures]:
    """Fill the folder of a seed; return it with the figures of the warm start."""
    folder = Path(".cache/research") / f"seed{seed}"
    return folder, prepare(folder, WarmStart(seed=seed))


def figures_of(rows: Sequence[Mapping[str, float]]) -> Row:
    """Extract the figures of a run from its metrics."""
    steps = [row for row in rows if "reward/mean" in row]
    first, last = steps[:WINDOW], steps[-WINDOW:]
    return {
        "right_before": fmean(row["reward/mean"] for row in first),
        "right": fmean(row["reward/mean"] for row in last),
        "tokens_before": fmean(row["agents/sequential_tokens"] for row in first),
        "tokens": fmean(row["agents/sequential_tokens"] for row in last),
    }


COMPARISON = Comparison(
    example="research",
    prepare_seed=prepare_seed,
    figures_of=figures_of,
    head=("discount",),
    columns={
        "right, first steps": ("right_before", ".3f", ""),
        "right, last steps": ("right", ".3f", ""),
        "tokens of an episode, first": ("tokens_before", ".1f", ""),
        "tokens, last": ("tokens", ".1f", ""),
    },
)


if __name__ == "__main__":
    COMPARISON.show(CASES, COMPARISON.parser(__doc__, steps=60).parse_args())
