"""Train with a reward for progress, for the outcome, and with early ends; print accuracy by tokens and by steps.

    python -m examples.segments.study --seeds 0,1,2

Each run is `rlsys train examples/segments/run.yaml` with the seed, its model and its data, at a constant learning rate.
Tokens are all that the policy sampled in training, those of probes too, except in episodes that were ended early. A
figure is the mean reward of ten steps: the last ones before so many tokens were sampled, or the last ones of the run.
Finished runs are lines of the file `--out` and not run again; all figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from examples.segments.prepare import prepare
from examples.study import Comparison, Row
from examples.tiny_policy import Figures, WarmStart

CASES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("the outcome (GRPO)",): ("algorithm={type: grpo}", "rollout.workflow.probes=0", "train.final_lr_fraction=1"),
    ("progress (MRT)",): ("train.final_lr_fraction=1",),
    ("the outcome, with early ends",): (
        "algorithm={type: grpo}",
        "rollout.workflow.probes=0",
        "rollout.early_ends=true",
        "train.final_lr_fraction=1",
    ),
}
"""Overrides, by what is rewarded."""
EPISODES = 16 * 8
"""Episodes of a step."""
ENDED, LENGTH = "group/ended_early_frac", "completions/length_mean"
BUDGETS = (100_000, 200_000)
"""Sampled tokens."""
WINDOW = 10
"""Steps of a mean."""


def prepare_seed(seed: int) -> tuple[Path, Figures]:
    """Fill the folder of a seed; return it with the figures of the warm start."""
    folder = Path(".cache/segments") / f"seed{seed}"
    return folder, prepare(folder, WarmStart(seed=seed, steps=600))


def figures_of(rows: Sequence[Mapping[str, float]]) -> Row:
    """Extract the figures of a run from its metrics."""
    steps = [row for row in rows if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in steps]
    sampled = [EPISODES * (1 - row.get(ENDED, 0.0)) * row["agents/per_episode"] * row[LENGTH] for row in steps]
    found: Row = {"before": fmean(rewards[:3]), "last": fmean(rewards[-WINDOW:]), "tokens": sum(sampled)}
    for budget in BUDGETS:
        num = sum(total <= budget for total in accumulate(sampled))
        found[f"at_{budget}"] = fmean(rewards[max(0, num - WINDOW) : num]) if num < len(steps) else None
    return found


COMPARISON = Comparison(
    example="segments",
    prepare_seed=prepare_seed,
    figures_of=figures_of,
    head=("rewarded",),
    columns={
        "first steps": ("before", ".3f", ""),
        **{f"after {budget:,} tokens": (f"at_{budget}", ".3f", "not reached") for budget in BUDGETS},
        "last steps": ("last", ".3f", ""),
        "tokens in all": ("tokens", ",.0f", ""),
    },
)


if __name__ == "__main__":
    COMPARISON.show(CASES, COMPARISON.parser(__doc__, steps=100).parse_args())
