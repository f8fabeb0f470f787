"""Train the tiny policy with several algorithms, seeds and staleness bounds, one after the other; print a table.

    python -m examples.sort.algorithms --algorithms grpo,ppo,kto --seeds 0,1,2 --staleness 0,4
    python -m examples.sort.algorithms --algorithms grpo --seeds 0,1 --staleness 2,4,8 algorithm.correction=tis

Each run is `rlsys train examples/sort/run.yaml algorithm.type=NAME`, with the seed, its model and its data,
`asynchrony.max_staleness`, and the overrides that are given; nothing else is changed. A run takes a few minutes. Every
finished run is a line of the file `--out`. Runs already in that file are skipped, so that an interrupted study can
continue.

A Markdown table goes to stdout, and all figures as JSON to its last line. CPU-seconds are those of every process, from
the command to the end of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil
from statistics import fmean

from examples.sort.prepare import prepare_seed
from examples.study import Comparison, Row, running_mean

GOAL = 0.9
"""Reward goal of the mean of ten steps; the first step that reaches it is reported."""
LAST = 0.1
"""Share of the steps, at the end, over which figures are averaged."""


def figures_of(rows: Sequence[Mapping[str, float]]) -> Row:
    """Extract the figures of a run from its metrics: `reward_last` is the mean over the last tenth of the steps,
    `explained_variance` that of the critic if there is one, and `steps_to_goal` the first step at which the mean of ten
    steps reaches `GOAL`, if there is one."""
    steps = [row for row in rows if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in steps]
    last = ceil(LAST * len(steps))
    explained = [row["critic/explained_variance"] for row in steps[-last:] if "critic/explained_variance" in row]
    return {
        "reward_last": fmean(rewards[-last:]),
        "steps_to_goal": next((n for n, mean in enumerate(running_mean(rewards), 1) if mean >= GOAL), None),
        "explained_variance": fmean(explained) if explained else None,
    }


COMPARISON = Comparison(
    example="sort",
    prepare_seed=prepare_seed,
    figures_of=figures_of,
    head=("algorithm", "max_staleness"),
    columns={
        "reward, last tenth": ("reward_last", ".3f", ""),
        f"steps to {GOAL:.2f}": ("steps_to_goal", "d", "never"),
        "CPU-s": ("cpu_s", ".0f", ""),
        "explained variance": ("explained_variance", ".2f", "no critic"),
    },
)


if __name__ == "__main__":
    parser = COMPARISON.parser(__doc__, steps=150)
    parser.add_argument("--algorithms", default="grpo,ppo,kto", help="names of installed algorithms")
    parser.add_argument("--staleness", default="0,4", help="values of asynchrony.max_staleness")
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    cases = product(options.algorithms.split(","), options.staleness.split(","))
    own = options.overrides
    COMPARISON.show({(a, s): (f"algorithm.type={a}", f"asynchrony.max_staleness={s}", *own) for a, s in cases}, options)
