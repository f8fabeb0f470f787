"""Cost of the orchestration: a step's wall time without generating, scoring and training.

    python -m benchmarks.overhead [--quick | --short]

The tiny sorter at `max_staleness: 0`, where nothing overlaps, with one replica, 8 and 32 groups a step. The overhead of
a step, `overhead_ms`, is its wall time minus the time in which the replica generated and scored and the ranks computed,
each by the worker's clock. A line through the medians of both sizes gives `ms_per_step` (the fixed cost
of a step) and `ms_per_group` (the cost of each group). They contain Ray's calls, the queue, planning, metrics,
transferring 1.7 MB of weights, verifying them, and waking up. `driver_cpu_share` is the driver's CPU time over the wall
time, at 32 groups, and a second of it suffices for `driver_groups_per_s`. `start_up_s` is the time from the command to
the end of the first step, `start_up_breakdown_s` the same by phase. The figures of `benchmarks.payloads` are part of
the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from benchmarks import payloads
from benchmarks.measure import Size, in_turn, parser_of, print_result, sorter, spreads, train

SIZES = (8, 32)
STEPS: Mapping[Size, tuple[int, int]] = {"full": (10, 80), "quick": (10, 40), "short": (1, 2)}
"""Steps at the start that do not count (first calls, first allocations), and all steps."""
WORK = ("time/rollout", "time/reward", "time/train")
PHASES = ("load_data", "start_ray", "start_workers")


def main() -> None:
    """Measure both sizes in turn, or the small one in a short benchmark, and print the result line."""
    size: Size = parser_of(__doc__, quick="fewer steps and repeats; under 5 minutes").parse_args().size
    repeats = {"full": 5, "quick": 2, "short": 1}[size]
    sizes = SIZES[:1] if size == "short" else SIZES
    runs = in_turn(repeats, sizes, lambda _, groups: run(size, groups))
    figures = {groups: spreads(rows) for groups, rows in runs.items()}
    small, large = figures[sizes[0]], figures[sizes[-1]]
    per_group = (large["overhead_ms"]["median"] - small["overhead_ms"]["median"]) / (SIZES[1] - SIZES[0])
    print_result(
        {
            "ms_per_step": small["overhead_ms"]["median"] - SIZES[0] * per_group,
            "ms_per_group": per_group,
            "overhead_ms": {str(groups): each["overhead_ms"] for groups, each in figures.items()},
            "driver_cpu_share": large["driver_cpu_share"],
            "driver_groups_per_s": large["driver_groups_per_s"],
            "start_up_s": large["start_up_s"],
            "start_up_breakdown_s": {
                phase: runs[sizes[-1]][-1][phase] for phase in (*PHASES, "rest_of_start_up", "first_step")
            },
            **payloads.figures(size),
        }
    )


def run(size: Size, groups_per_step: int) -> Mapping[str, float]:
    """Train the tiny policy; return medians over its steps, and its start-up by phase."""
    num_skipped, steps = STEPS[size]
    rows, result = train(
        sorter(size), f"run.steps={steps}", f"train.groups_per_step={groups_per_step}", "rollout.replicas=1",
        "rollout.slots=256",
    )  # fmt: skip
    seconds, steady = result["seconds"], rows[num_skipped:]
    phases = {phase: seconds[phase] for phase in PHASES}
    return {
        "overhead_ms": 1000 * median(row["time/step"] - sum(row[worked] for worked in WORK) for row in steady),
        "driver_cpu_share": median(row["driver/cpu_share"] for row in steady),
        "driver_groups_per_s": groups_per_step / median(row["driver/cpu_share"] * row["time/step"] for row in steady),
        "start_up_s": seconds["first_step"],
        **phases,
        "rest_of_start_up": seconds["start_up"] - sum(phases.values()),
        "first_step": seconds["first_step"] - seconds["start_up"],
    }


if __name__ == "__main__":
    main()
