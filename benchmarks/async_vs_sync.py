"""Benefit and cost of asynchrony: the same samples at several staleness bounds, on real workers.

    python -m benchmarks.async_vs_sync [--quick | --short] [--steps 40] [--bounds 0 1 2 4] [--correction none]

The tiny sorter with tools that take 50 to 500 ms a turn and episodes of 1 to 12 turns (`benchmarks.slow_tools`), on one
replica. Weights change in flight, because an episode lasts longer than a step. `max_staleness` is 0, 1, 2 and 4 in
turn, with three seeds each. `speedup_at_4` is the wall time of the steps at 0 over that at 4, equal seeds, median over
seeds, without the first steps, in which pipelines fill. `reward` is the mean over the last eighth of the steps.
"""

from __future__ import annotations

from statistics import fmean
from typing import TypeAlias

from benchmarks.measure import Size, in_turn, parser_of, print_result, ratios, sorter, spreads, train
from rlsys.monitoring.metric_catalog import STALENESS_BUCKETS

BOUNDS = (0, 1, 2, 4)
SKIPPED_STEPS = 6
"""Steps left out at the start, in which pipelines fill."""


Figures: TypeAlias = dict[str, float]
"""Figures of one training run, by name."""


def main() -> None:
    """Measure every bound for every seed and print the result line."""
    parser = parser_of(__doc__, quick="one seed and 20 steps")
    parser.add_argument("--steps", type=int, default=40, help="of each run; its learning rate decays over all of them")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS, help="max_staleness; 0 is compared against")
    parser.add_argument("--correction", default="none", help="algorithm.correction")
    arguments = parser.parse_args()
    size: Size = arguments.size
    num_seeds = 3 if size == "full" else 1
    steps = {"full": arguments.steps, "quick": 20, "short": 2}[size]
    bounds = (0,) if size == "short" else sorted({0, *arguments.bounds})
    runs = in_turn(num_seeds, bounds, lambda seed, bound: run(size, seed, bound, steps, arguments.correction))
    speedup = {bound: ratios(runs[0], of_bound, "seconds_per_step") for bound, of_bound in runs.items()}
    figures = {bound: spreads(of_bound) for bound, of_bound in runs.items()}
    print_result(
        {
            "speedup_at_4": speedup[4]["median"] if 4 in runs else None,
            "speedup": speedup,
            **{what: {b: figures[b][what] for b in bounds} for what in ("reward", "seconds_per_step")},
            "staleness": {b: {age: fmean(r[age] for r in runs[b]) for age in STALENESS_BUCKETS} for b in bounds},
            "staleness_max": {b: int(figures[b]["staleness_max"]["max"]) for b in bounds},
            "wait_batch_share": {b: figures[b]["wait_batch_share"] for b in bounds},
            "steps": steps,
            "correction": arguments.correction,
        }
    )


def run(size: Size, seed: int, max_staleness: int, steps: int, correction: str) -> Figures:
    """Train the tiny policy for `steps` steps and read its metrics; the first steps count only for the reward.

    Figures named by an age in versions are shares of trained tokens.
    """
    is_short = size == "short"
    rows, _ = train(
        sorter(size, seed),
        f"run.seed={seed}", f"run.steps={steps}", "rollout.workflow=benchmarks.slow_tools:SlowTools",
        "rollout.replicas=1", "rollout.slots=512", "rollout.weight_change=inflight",
        f"algorithm.correction={correction}", f"train.groups_per_step={2 if is_short else 16}",
        f"asynchrony.max_staleness={max_staleness}",
    )  # fmt: skip
    steady = rows[1 if is_short else SKIPPED_STEPS :]
    step_s = fmean(row["time/step"] for row in steady)
    return {
        "seconds_per_step": step_s,
        "reward": fmean(row["reward/mean"] for row in rows[-max(1, steps // 8) :]),
        "staleness_max": max(row["async/staleness_max"] for row in rows),
        "wait_batch_share": fmean(row["time/wait_batch"] for row in steady) / step_s,
        **{age: fmean(row[f"async/staleness/{age}"] for row in steady) for age in STALENESS_BUCKETS},
    }


if __name__ == "__main__":
    main()
