"""CPU time of a step by process: where the time goes that a run takes beside generating and training.

    python -m benchmarks.cpu_split [--quick | --short]

The two jobs of `examples/` on one replica: the tiny sorter (32 x 8) and SmolLM2 (8 x 8, engine `local`). Figures are
CPU-milliseconds per step, of each process between two steps; medians of the repeats. `ray` are Ray's own daemons: GCS,
raylet, its agents and log monitor. Forked workers count from their fork.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measure import ENV, POLL_S, Size, in_turn, num_rows, parser_of, print_result, smollm, sorter, spread
from benchmarks.measure import train_command as command_of

TITLES = {
    "ray::RolloutWorker": "rollout",
    "ray::SessionWorker": "session",
    "ray::ActorRank": "actor",
    "ray::RewardWorker": "reward",
    "ray::Relay": "relay",
    "ray::Recorder": "recorder",
    "workers.ray.fork_server": "fork server",
    "multiprocessing.spawn": "reward functions",
    "rlsys.cli": "driver",
    "ray": "ray",
}
"""Part of a command line -> name of the process; the first that fits."""


@dataclass(frozen=True)
class Job:
    """A run to look at, from the end of one step to that of another."""

    name: str
    steps: tuple[int, int]
    overrides: tuple[str, ...] = ()


SORTER, SMOLLM = Job("sort", (20, 80), ("rollout.slots=256",)), Job("smollm", (2, 6), ("rollout.engine=local",))
JOBS: Mapping[Size, Sequence[Job]] = {
    "full": (SORTER, SMOLLM),
    "quick": (Job("sort", (10, 40), SORTER.overrides), Job("smollm", (1, 3), SMOLLM.overrides)),
    "short": (Job("sort", (1, 2), SORTER.overrides),),
}


def main() -> None:
    """Measure the jobs in turn, and print the result line."""
    size: Size = parser_of(__doc__, quick="fewer steps and repeats; a few minutes").parse_args().size
    repeats = {"full": 5, "quick": 2, "short": 1}[size]
    runs = in_turn(repeats, JOBS[size], lambda _, job: measure(size, job))
    print_result({job.name: summary(rows) for job, rows in runs.items()})


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Summarise the repeats of a job by process; one that did not run in a repeat had no time there."""
    return {name: spread([row.get(name, 0.0) for row in rows]) for name in sorted({n for row in rows for n in row})}


def measure(size: Size, job: Job) -> Mapping[str, float]:
    """Run a job; return CPU-milliseconds per step by process, and its wall milliseconds as `wall`."""
    prepared = sorter(size) if job.name == "sort" else smollm()
    first, last = job.steps
    fixed = (f"run.steps={last + 2}", "rollout.replicas=1", "checkpoint.every=0", "record.rollouts_every=0")
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        command = command_of(prepared, Path(folder), *fixed, *job.overrides, example=job.name)
        metrics, log = Path(folder, "run", "metrics.jsonl"), Path(folder, "log")
        with log.open("w") as out:
            process = subprocess.Popen(command, env=ENV, stdout=out, stderr=out)
            seen = [_seen_after(process, metrics, step) for step in (first, last)]
            process.wait()
        if process.returncode or None in seen:
            raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text()[-4000:]}")
    (began_s, before), (ended_s, after) = (each for each in seen if each is not None)
    spent: dict[str, float] = defaultdict(float)
    for (pid, name), cpu_s in after.items():
        spent[name] += cpu_s - before.get((pid, name), 0.0)
    spent["wall"] = ended_s - began_s
    return {name: 1000 * seconds / (last - first) for name, seconds in spent.items()}


def _seen_after(
    process: subprocess.Popen[bytes], metrics: Path, step: int
) -> tuple[float, dict[tuple[int, str], float]] | None:
    """Return the time, and CPU seconds so far by process, once the run has done a step; None if it ended before.

    Waits by polling: a run notifies nobody.
    """
    while num_rows(metrics) < step:
        if process.poll() is not None:
            return None
        time.sleep(POLL_S)
    found: dict[tuple[int, str], float] = {}
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        try:
            times = each.cpu_times()
            found[each.pid, _name_of(" ".join(each.cmdline()))] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return time.perf_counter(), found


def _name_of(title: str) -> str:
    return next((name for part, name in TITLES.items() if part in title), "others")


if __name__ == "__main__":
    main()
