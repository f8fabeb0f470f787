"""A long run: whether memory, descriptors, threads, shared memory or semaphores grow, and what is left behind.

    python -m benchmarks.soak [--groups 20000 | --quick | --short]

The tiny sorter with a KL reference, two rollout replicas, checkpoints, evaluations and rollout files, on a local
cluster, with `max_staleness` 2. Forty samples are taken. `growth` compares the median of the last quarter with that of
the second; the first is left out, because allocators and caches fill in it. Memory is what is private to the processes
(USS), in MB. `broken` names each figure that grew by more than 5 %, and by more than two. `left_behind` names processes
of the run that live after it, and its files in /dev/shm, which is shared: run nothing else on the machine.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.disturbed_run import DisturbedRun, is_step
from benchmarks.measure import adopt_orphans, parser_of, print_result, progress, sorter, train_command

GROUPS = {"full": 20_000, "quick": 4_000, "short": 256}
GROUPS_PER_STEP = 32
SAMPLES = 40
LIMIT_S = 120.0
ENDED_S = 10.0
GROWTH = 1.05
SLACK = 2
"""Growth that is none: counts differ between two moments."""
SHM = Path("/dev/shm")

Sample = Mapping[str, float]


def main() -> None:
    """Train, take samples, and print the result line."""
    parser = parser_of(__doc__, quick="4,000 groups")
    parser.add_argument("--groups", type=int)
    arguments = parser.parse_args()
    steps = -(-(arguments.groups or GROUPS[arguments.size]) // GROUPS_PER_STEP)
    adopt_orphans()
    before = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="soak_") as name:
        keys = ("ray=local", "algorithm.kl_coef=0.01", "asynchrony.max_staleness=2", "eval.every=50")
        command = train_command(
            sorter(arguments.size),
            Path(name),
            *keys,
            "checkpoint.every=25",
            f"run.steps={steps}",
            f"train.groups_per_step={GROUPS_PER_STEP}",
        )
        run = DisturbedRun(command, Path(name) / "run")
        began = time.monotonic()
        run.start()
        try:
            samples = _samples(run, steps)
            assert run.process is not None
            code = run.process.wait(LIMIT_S)
        finally:
            run.kill()
    assert code == 0, f"the run ended with {code}"
    growth = growth_of(samples)
    print_result(
        {
            "broken": broken_of(growth, samples),
            "left_behind": _left_behind(before),
            "growth": growth,
            "last": samples[-1],
            "groups": steps * GROUPS_PER_STEP,
            "samples": len(samples),
            "seconds": time.monotonic() - began,
        }
    )


def growth_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Divide the median of the last quarter of the samples by that of the second quarter, for each figure."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return {name: _median(late, name) / max(_median(early, name), 1.0) for name in samples[0]}


def broken_of(growth: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
    """Name the figures that grew."""
    quarter = len(samples) // 4
    return [
        f"{name} grew to {ratio:.2f} times"
        for name, ratio in growth.items()
        if ratio > GROWTH and _median(samples[-quarter:], name) - _median(samples[quarter : 2 * quarter], name) > SLACK
    ]


def _median(samples: Sequence[Sample], name: str) -> float:
    return median(sample[name] for sample in samples)


def _samples(run: DisturbedRun, steps: int) -> list[Sample]:
    """Take a sample at the end of every 40th part of the run, but not after its last step."""
    every, samples = max(1, steps // SAMPLES), []
    while True:
        step = int(run.wait(is_step, LIMIT_S)["step"])
        if step >= steps:
            return samples
        if step % every == 0:
            samples.append(_sample(run))
            progress(step, {name: round(value) for name, value in samples[-1].items()})


def _sample(run: DisturbedRun) -> Sample:
    assert run.process is not None
    figures: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = " ".join(process.cmdline())
            kind = "driver" if process.pid == run.process.pid else "workers" if title.startswith("ray::") else "ray"
            figures[f"{kind}_mb"] += process.memory_full_info().uss / 2**20
            figures["processes"] += 1
            figures["descriptors"] += process.num_fds()
            figures["threads"] += process.num_threads()
    entries = _shared_memory()
    figures["shm_entries"] = len(entries)
    figures["semaphores"] = sum(name.startswith("sem.") for name in entries)
    figures["shm_mb"] = shutil.disk_usage(SHM).used / 2**20  # Ray's object store is a file without a name
    return dict(figures)


def _shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return {path.name for path in SHM.iterdir()}


def _left_behind(before: Set[str]) -> list[str]:
    """Name processes and files that are left, once the processes had time to end; end the processes."""
    processes = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(processes, ENDED_S)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            left.append(" ".join(process.cmdline())[:100])
            process.send_signal(signal.SIGKILL)
    return left + [str(SHM / name) for name in sorted(_shared_memory() - before)]


if __name__ == "__main__":
    main()
