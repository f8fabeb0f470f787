"""What asynchrony buys, and what it costs: the same samples at several bounds of staleness, on real workers.

    python -m benchmarks.async_vs_sync [--quick] [--steps 40] [--bounds 0 1 2 4] [--correction none]

The tiny sorter with tools that take 50 to 500 ms a turn and episodes of 1 to 12 turns (`benchmarks.slow_tools`), one
replica, weights changed in flight, because an episode lasts longer than a step; `max_staleness` 0, 1, 2 and 4 in
turns, three seeds each. `speedup_at_4` is the wall time of the steps at 0 over that at 4, equal seeds, median over
seeds; the first steps are left out of it, because pipelines begin empty. `reward` is the mean over the last eighth of
the steps.

Progress goes to stderr, and one JSON object to the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.measure import print_result, spread
from examples.sort.prepare import Recipe, prepare
from rlsys.metrics import STALENESS_BUCKETS

BOUNDS = (0, 1, 2, 4)
SKIPPED_STEPS = 6
ENV = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, its first steps left out of all but the reward."""

    wall_s: float
    reward: float
    staleness: Mapping[str, float]
    """Share of trained tokens by age in versions."""
    staleness_max: int
    wait_batch_share: float
    """Share of the time in which the trainer waited for groups."""


def main() -> None:
    """Measure every bound for every seed and print the closing line."""
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous training, equal samples.")
    parser.add_argument("--quick", action="store_true", help="one seed and 20 steps")
    parser.add_argument("--steps", type=int, default=40, help="of each run; its learning rate decays over all of them")
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS, help="max_staleness; 0 is compared against")
    parser.add_argument("--correction", default="none", help="algorithm.correction")
    arguments = parser.parse_args()
    seeds, steps = (range(1), 20) if arguments.quick else (range(3), arguments.steps)
    bounds = sorted({0, *arguments.bounds})
    runs: dict[int, list[Run]] = {bound: [] for bound in bounds}
    for seed in seeds:
        prepare(Path(f".cache/sort/seed{seed}"), Recipe(seed=seed))
        for bound in bounds:
            runs[bound].append(run(seed, bound, steps, arguments.correction))
            print(f"seed {seed}, max_staleness {bound}: {runs[bound][-1]}", file=sys.stderr, flush=True)
    print_result(
        {
            "speedup_at_4": speedups(runs, 4)["median"] if 4 in runs else None,
            "speedup": {str(bound): speedups(runs, bound) for bound in bounds},
            "reward": {str(bound): spread([r.reward for r in of_bound]) for bound, of_bound in runs.items()},
            "seconds_per_step": {
                str(bound): spread([r.wall_s / (steps - SKIPPED_STEPS) for r in of_bound])
                for bound, of_bound in runs.items()
            },
            "staleness": {str(bound): averaged([r.staleness for r in of_bound]) for bound, of_bound in runs.items()},
            "staleness_max": {str(bound): max(r.staleness_max for r in of_bound) for bound, of_bound in runs.items()},
            "wait_batch_share": {
                str(bound): spread([r.wait_batch_share for r in of_bound]) for bound, of_bound in runs.items()
            },
            "steps": steps,
            "correction": arguments.correction,
        }
    )


def speedups(runs: Mapping[int, Sequence[Run]], bound: int) -> dict[str, float | int]:
    """Wall time at 0 over that at `bound`, seed by seed."""
    return spread([sync.wall_s / other.wall_s for sync, other in zip(runs[0], runs[bound], strict=True)])


def averaged(histograms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean share of each bucket."""
    return {bucket: fmean(h[bucket] for h in histograms) for bucket in histograms[0]}


def run(seed: int, max_staleness: int, steps: int, correction: str) -> Run:
    """Train the tiny policy for `steps` steps and read its metrics."""
    prepared = Path(f".cache/sort/seed{seed}")
    with tempfile.TemporaryDirectory(prefix="async_vs_sync_") as folder:
        command = [sys.executable, "-m", "rlsys.cli", "train", "examples/sort/run.yaml"]
        command += [f"run.folder={folder}", "run.name=run", f"run.seed={seed}", f"run.steps={steps}"]
        command += [f"model.path={prepared / 'model'}", f"data.path={prepared / 'train.jsonl'}"]
        command += [f"eval.data.held_out={prepared / 'eval.jsonl'}", "checkpoint.every=0", "record.rollouts_every=0"]
        command += ["rollout.workflow=benchmarks.slow_tools:SlowTools", "rollout.replicas=1", "rollout.slots=512"]
        command += ["rollout.weight_change=inflight", f"algorithm.correction={correction}"]
        command += ["train.groups_per_step=16", f"asynchrony.max_staleness={max_staleness}"]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    steady = rows[SKIPPED_STEPS:]
    wall_s = sum(row["time/step"] for row in steady)
    return Run(
        wall_s=wall_s,
        reward=fmean(row["reward/mean"] for row in rows[-max(1, steps // 8) :]),
        staleness={b: fmean(row[f"async/staleness/{b}"] for row in steady) for b in STALENESS_BUCKETS},
        staleness_max=int(max(row["async/staleness_max"] for row in rows)),
        wait_batch_share=sum(row["time/wait_batch"] for row in steady) / wall_s,
    )


if __name__ == "__main__":
    main()
