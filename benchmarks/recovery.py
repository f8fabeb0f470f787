"""Seconds from the death or freezing of a worker to normal throughput, by kind of worker.

    python -m benchmarks.recovery [--quick | --short]

The tiny sorter with two rollout replicas, two reward workers, a reference and one actor rank, synchronous, on a local
cluster, with the defaults of `limits`. A worker is struck while steps are done at their normal pace. It has recovered
once a successor is ready, and a step takes at most 1.5 times the median step before the first strike. Frozen workers
are stopped by SIGSTOP, others killed by SIGKILL.

Then, in runs of 2 and 4 ranks with every mesh, a rank is killed inside one collective after the other; the final
weights have to be those of a run in which nothing dies.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.collective_kills import MESHES, Kills
from benchmarks.disturbed_run import DisturbedRun
from benchmarks.measure import parser_of, print_result, progress, sorter, spread, train_command

CASES = {
    "rollout": ("rollout", signal.SIGKILL),
    "reward": ("reward", signal.SIGKILL),
    "relay": ("relay", signal.SIGKILL),
    "reference": ("reference", signal.SIGKILL),
    "actor": ("actor", signal.SIGKILL),
    "frozen rollout": ("rollout", signal.SIGSTOP),
    "frozen reward": ("reward", signal.SIGSTOP),
}
"""By name of the case: kind of worker, and the signal."""
KILLS = {"full": dict.fromkeys(MESHES, 4) | {"shard 2": 20}, "quick": {"shard 2": 2}, "short": {}}
"""By size of the benchmark: deaths inside collectives, by mesh."""
LIMIT_S = 120.0


def main() -> None:
    """Strike each kind in turn, several times; print the result line."""
    arguments = parser_of(__doc__, quick="one strike of each kind instead of five").parse_args()
    repeats = 5 if arguments.size == "full" else 1
    cases = {"rollout": CASES["rollout"]} if arguments.size == "short" else CASES
    recovery_s: dict[str, list[float]] = {name: [] for name in cases}
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="recovery_") as name:
        keys = ("ray=local", "algorithm.kl_coef=0.01", "reward.workers=2", "run.steps=1000000")
        command = train_command(
            sorter(arguments.size), Path(name), *keys, "record.rollouts_every=0", "checkpoint.every=10"
        )
        run = DisturbedRun(command, Path(name) / "run")
        run.start()
        try:
            run.wait_steps(5, LIMIT_S)
            step_s = run.wait_steps(5 if arguments.size == "short" else 40, LIMIT_S)
            progress(f"a step takes {step_s:.3f} s")
            for _ in range(repeats):
                for case, (kind, how) in cases.items():
                    struck_s = time.time()
                    chance.choice(run.workers(kind)).send_signal(how)
                    recovery_s[case].append(run.wait_recovered(kind, struck_s, step_s, LIMIT_S))
                    progress(f"{case}: {recovery_s[case][-1]:.1f} s")
            code, ended_s = run.end(signal.SIGINT, LIMIT_S)
        finally:
            run.kill()
    assert code == 128 + signal.SIGINT, f"Ctrl-C ended the run with {code}"
    with tempfile.TemporaryDirectory(prefix="recovery_") as name:
        kills = Kills(sorter(arguments.size), Path(name))
        for mesh, most in KILLS[arguments.size].items():
            kills.strike(mesh, most)
    figures = {case: spread(seconds) for case, seconds in recovery_s.items()}
    collective = kills.figures() if kills.tried else None
    print_result({"recovery_s": figures, "step_s": step_s, "interrupt_s": ended_s, "collective": collective})
    raise SystemExit(bool(kills.broken))


if __name__ == "__main__":
    main()
