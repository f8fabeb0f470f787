"""Transfer of groups from rollouts to the learner: rlsys against `ray.util.queue` and TransferQueue.

    python -m benchmarks.group_queue [--quick | --short]

Two producer processes send groups of 8 episodes to one consumer process, with 1 k and with 32 k tokens in a group: ids
and logprobs in numpy arrays, the same for all three. The first stretch is at full speed, 64 groups in flight where the
system bounds them, 8 to a take: groups per second. The second is paced, 50 groups per second in all, one to a take:
median and 99th percentile of the seconds from submit to take. Rounds alternate; figures are medians over rounds.

rlsys: producers answer as rollouts do, the driver's GroupQueue has metadata and references, the consumer fetches.
ray.util.queue: payloads through its actor. TransferQueue: its SimpleStorage, two storage units, in a separate
environment, `.cache/queue/venv`, made on first use (some minutes, not measured). Its threads are set to the machine's
cores, as it requires. Its consumer polls, since the wait of its controller lasts five seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.group_queue_work import Load, Taken
from benchmarks.measure import answer_of, fresh_command, in_turn, own_python, parser_of, print_result, spread

REQUIREMENTS = ("torch==2.13.0+cpu", "TransferQueue==0.1.11", "ray==2.60.0", "tensordict==0.15.3")
TOKENS = {"1k": 1024, "32k": 32768}
PACED_S = 0.04
"""Seconds between two groups of one of the two producers."""
WARM_UP = Load(1024, 64, 0.0)


def main() -> None:
    """Compare and print the result line."""
    size = parser_of(__doc__, quick="fewer groups and rounds; about a minute once set up").parse_args().size
    num_rounds, *num_groups = {"full": (5, 1600, 500), "quick": (2, 400, 200), "short": (1, 16, 4)}[size]
    peer_python = own_python(Path(".cache/queue/venv"), REQUIREMENTS, size)
    jobs = {
        "rlsys": ("benchmarks.group_queue_rlsys:play", sys.executable),
        "ray_queue": ("benchmarks.group_queue_work:play_ray_queue", sys.executable),
        "transferqueue": ("benchmarks.group_queue_work:play_transfer_queue", peer_python),
    }
    fast, paced = num_groups
    loads = [load for n in TOKENS.values() for load in (Load(n, fast, 0.0), Load(n, paced, PACED_S))]
    rounds = in_turn(num_rounds, jobs, lambda _, name: run(*jobs[name], loads))
    print_result({size: figures(rounds, place) for place, size in enumerate(TOKENS)})


def run(play: str, python: str, loads: Sequence[Load]) -> list[Taken]:
    """Run all loads of one system in fresh processes; the warm-up does not count."""
    command = fresh_command(play, [asdict(load) for load in (WARM_UP, *loads)], python=python)
    return [Taken(**row) for row in answer_of(command, TQ_NUM_THREADS=str(os.cpu_count() or 1))][1:]


def figures(rounds: dict[str, list[list[Taken]]], place: int) -> dict[str, object]:
    """Summarise one size, by system, with the lead of rlsys over the better of the others."""
    told = {
        name: {
            "groups_per_s": spread([taken[2 * place].groups_per_s for taken in each]),
            "p50_s": spread([taken[2 * place + 1].p50_s for taken in each]),
            "p99_s": spread([taken[2 * place + 1].p99_s for taken in each]),
        }
        for name, each in rounds.items()
    }
    own, *peers = [{what: row["median"] for what, row in rows.items()} for rows in told.values()]
    ahead = {what: min(peer[what] for peer in peers) / own[what] for what in ("p50_s", "p99_s")}
    ahead["groups_per_s"] = own["groups_per_s"] / max(peer["groups_per_s"] for peer in peers)
    return {**told, "times_better_than_the_best_peer": ahead}


if __name__ == "__main__":
    main()
