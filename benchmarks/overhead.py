"""What the orchestration itself costs: a step's wall time without generating, judging and training.

    python -m benchmarks.overhead [--quick]

The tiny sorter at `max_staleness: 0`, where nothing overlaps and so nothing hides, with one replica, 8 and 32 groups
a step.
The overhead of a step is its wall time minus the time in which the replica generated, the reward worker judged and the
ranks computed, each by the worker's own clock. A line through the medians of both sizes gives `ms_per_step` (what a
step
costs whatever its size) and `ms_per_group` (what each group adds): it holds Ray's calls, the queue, planning, metrics,
handing over 1.7 MB of weights, verifying them, and waking up. `driver_cpu_share` is the driver's CPU time over the wall
time, at 32 groups. `start_up_s` is the time from the command to the end of the first step.

Progress goes to stderr, and one JSON object to the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.measure import print_result, spread
from examples.sort.prepare import Recipe, prepare

SIZES = (8, 32)
SKIPPED_STEPS = 10
"""Steps at the start that are not counted: first calls, first allocations."""
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: medians over its steps."""

    overhead_ms: float
    driver_cpu_share: float
    start_up_s: dict[str, float]


def main() -> None:
    """Measure both sizes in turn and print the closing line."""
    parser = argparse.ArgumentParser(description="The cost of orchestration.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats; under 5 minutes")
    quick = parser.parse_args().quick
    prepare(Path(".cache/sort/seed0"), Recipe(seed=0))
    runs: dict[int, list[Run]] = {size: [] for size in SIZES}
    for repeat in range(2 if quick else 5):
        for size in SIZES:
            runs[size].append(run(size, steps=40 if quick else 80))
            print(f"{repeat + 1}: {size} groups: {runs[size][-1]}", file=sys.stderr)
    small, large = (median(r.overhead_ms for r in runs[size]) for size in SIZES)
    per_group = (large - small) / (SIZES[1] - SIZES[0])
    print_result(
        {
            "ms_per_step": small - SIZES[0] * per_group,
            "ms_per_group": per_group,
            "overhead_ms": {str(size): spread([r.overhead_ms for r in runs[size]]) for size in SIZES},
            "driver_cpu_share": spread([r.driver_cpu_share for r in runs[SIZES[1]]]),
            "start_up_s": spread([sum(r.start_up_s.values()) for r in runs[SIZES[1]]]),
            "start_up_breakdown_s": runs[SIZES[1]][-1].start_up_s,
        }
    )


def run(groups_per_step: int, steps: int) -> Run:
    """Train the tiny policy for `steps` steps and read its metrics."""
    with tempfile.TemporaryDirectory(prefix="overhead_") as folder:
        command = [sys.executable, "-m", "rlsys.cli", "train", "examples/sort/run.yaml", "--json"]
        command += [f"run.folder={folder}", "run.name=run", f"run.steps={steps}", "checkpoint.every=0"]
        command += [f"train.groups_per_step={groups_per_step}", "rollout.replicas=1", "rollout.slots=256"]
        command += ["record.rollouts_every=0"]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    start_up = {phase: seconds[phase] for phase in ("load_data", "start_ray", "start_workers")}
    steady = rows[SKIPPED_STEPS:]
    return Run(
        overhead_ms=1000 * median(overhead_s(row) for row in steady),
        driver_cpu_share=median(row["driver/cpu_share"] for row in steady),
        start_up_s={
            **start_up,
            "rest_of_start_up": seconds["start_up"] - sum(start_up.values()),
            "first_step": seconds["first_step"] - seconds["start_up"],
        },
    )


def overhead_s(row: dict[str, float]) -> float:
    """A step's wall time that was neither generation, nor reward, nor training."""
    return row["time/step"] - row["time/rollout"] - row["time/reward"] - row["time/train"]


if __name__ == "__main__":
    main()
