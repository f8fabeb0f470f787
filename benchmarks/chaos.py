"""Run with randomly killed workers, compared with an undisturbed run: equal work, and recovery times.

    python -m benchmarks.chaos [--quick | --short]

Three raylets on this machine, the tiny sorter with slow tools (`benchmarks.slow_tools`), three rollout replicas, two
reward workers, a relay on each node, `max_staleness` 2; `--short` has one of each. Every few seconds SIGKILL ends one
process of one of these kinds, at any point of its work. `is_same` is true if both runs consumed the same multiset of
tasks.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.measure import (
    ENV,
    parser_of,
    print_result,
    progress,
    raylets,
    rows_of,
    sorter,
    spread,
    train_command,
)

KINDS = {"rollout": "ray::RolloutWorker", "reward": "ray::RewardWorker", "relay": "ray::Relay"}
CPUS = 9
"""CPUs of all nodes together."""
STORE_BYTES = 256 << 20


@dataclass
class Killer:
    """Killer of random processes, one every `every_s` on average."""

    every_s: float
    chance: random.Random
    killed: Counter[str] = field(default_factory=Counter)

    def strike(self) -> None:
        """Kill one process of a random kind, if there is one; Ray sets the command of a worker to its title."""
        kind = self.chance.choice(sorted(KINDS))
        below = {process.pid for process in psutil.Process().children(recursive=True)}  # those of this cluster
        running = (process for process in psutil.process_iter(["cmdline"]) if process.pid in below)
        if targets := [p for p in running if " ".join(p.info["cmdline"] or ()).startswith(KINDS[kind])]:
            with suppress(psutil.NoSuchProcess):
                self.chance.choice(targets).kill()
                self.killed[kind] += 1


def main() -> None:
    """Run both and print the result line."""
    parser = parser_of(__doc__, quick="40 steps instead of 5 minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args()
    steps, nodes, every_s = {"full": (200, 3, 6.0), "quick": (40, 3, 6.0), "short": (2, 1, 4.0)}[arguments.size]
    prepared = sorter(arguments.size)
    killer = Killer(every_s, chance=random.Random(arguments.seed))
    with raylets(nodes, CPUS // nodes, STORE_BYTES) as address:
        calm, calm_s, _ = run(prepared, steps, nodes, address, None)
        progress(f"undisturbed: {steps} steps in {calm_s:.0f} s")
        consumed, disturbed_s, failures = run(prepared, steps, nodes, address, killer)
    print_result(
        {
            "is_same": consumed == calm,
            "groups": consumed.total(),
            "killed": dict(killer.killed),
            "seconds": {"undisturbed": calm_s, "disturbed": disturbed_s},
            **failures,
            "steps": steps,
        }
    )


def run(
    prepared: Path, steps: int, nodes: int, address: str, killer: Killer | None
) -> tuple[Counter[str], float, dict[str, object]]:
    """Run one training; return the number of times each task was trained, the seconds, and figures of failures."""
    with tempfile.TemporaryDirectory(prefix="chaos_") as name:
        folder = Path(name)
        command = train_command(
            prepared, folder, f"ray.address={address}", f"run.steps={steps}", "record.rollouts_every=1",
            "checkpoint.every=0", "rollout.workflow=benchmarks.slow_tools:SlowTools", f"rollout.replicas={nodes}",
            "rollout.num_cpus=1", f"reward.workers={min(2, nodes)}", "train.groups_per_step=8",
            "asynchrony.max_staleness=2", "limits.max_attempts=50", "limits.lease_s=60", "limits.transfer_s=60",
        )  # fmt: skip
        began = time.monotonic()
        with (folder / "log").open("w") as output:
            training = subprocess.Popen(command, env=ENV, stdout=output, stderr=output)
            _disturb(training, killer, folder / "run" / "metrics.jsonl")
        seconds = time.monotonic() - began
        if training.returncode:
            tail = (folder / "log").read_text()[-4000:]
            raise RuntimeError(f"{' '.join(command)}: exit code {training.returncode}\n{tail}")
        rollouts = (folder / "run" / "rollouts").glob("step_*.jsonl")
        consumed = Counter(row["task"]["id"] for path in rollouts for row in rows_of(path))
        return consumed, seconds, _failures(folder / "run")


def _disturb(training: subprocess.Popen, killer: Killer | None, metrics: Path) -> None:
    """Wait for the run to end; once it trains, strike at random intervals."""
    while training.poll() is None:
        wait_s = 0.5 if killer is None else killer.chance.expovariate(1 / killer.every_s)
        with suppress(subprocess.TimeoutExpired):
            training.wait(wait_s)
            return
        if killer is not None and metrics.exists() and metrics.stat().st_size:
            killer.strike()


def _failures(folder: Path) -> dict[str, object]:
    """Return figures of a run; `recovery_s` is from the discovery of each failure until a successor was ready, by kind
    of worker."""
    events = rows_of(folder / "events.jsonl")
    recovery_s: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "worker_restarted":
            recovery_s[event["worker"].partition("-")[0]].append(event["seconds"])
    return {
        "recovery_s": {kind: spread(seconds) for kind, seconds in recovery_s.items()},
        "dropped": rows_of(folder / "metrics.jsonl")[-1]["async/dropped"],
        "reissued": sum(event["kind"] in ("worker_failed", "group_reissued") for event in events),
    }


if __name__ == "__main__":
    main()
