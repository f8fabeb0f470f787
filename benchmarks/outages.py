"""Steps of a run while something happens to one of its hosts, which are network namespaces of this machine.

    python -m benchmarks.outages [--quick | --short] [--only NAME ...]

Hosts with a shared disk and Ray's tokens, and a tiny random model, synchronous. Cables are pulled for a while or for
ever, hosts lose their power, join, or are drained, and Ray's GCS is killed. For each case: the median and longest step
before, the longest from then until ten steps after it, steps that ended meanwhile, what is told of it, groups that were
lost or trained twice, and how a run ended that did. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path

from benchmarks.measure import parser_of, print_result, progress
from tests.cluster.lab import Lab, why_not
from tests.cluster.lab_runs import LabRun, give
from tests.cluster.outages import Outage, cut_off, suffer
from tests.jobs import write_model, write_tasks
from tests.ray.commands import wait_until

TWO = ("rollout.replicas=2",)
APART = (*TWO, "resources.rollout.cpus=2")
KEPT = (*TWO, "checkpoint.every=5")
SAVED = (*KEPT, "resources.actor.cpus=3")
NOTICE_S = 20.0
"""From the notice that a host will be taken away until it is."""


def lose_replica(lab: Lab) -> Outage:
    """The power of a replica's host is cut, and another host joins."""

    def fall(run: LabRun) -> None:
        lab.host(2).kill()
        lab.join(lab.add(4))
        wait_until(lambda: len(run.events("worker_restarted")) > 0)

    return suffer(lab, APART, fall)


def lose_actor(lab: Lab) -> Outage:
    """The power of the actor's host is cut, and another host joins."""

    def fall(run: LabRun) -> None:
        lab.find("ray::ActorRank").kill()
        lab.join(lab.add(9), num_cpus=3)
        wait_until(lambda: len(run.events("rolled_back")) > 0)

    return suffer(lab, SAVED, fall)


def lose_head(lab: Lab) -> Outage:
    """The power of the head's host is cut, where only a relay is."""
    return suffer(lab, KEPT, lambda _: lab.host(1).kill(), driver=2)


def lose_gcs(lab: Lab) -> Outage:
    """Ray's GCS is killed."""
    return suffer(lab, KEPT, lambda _: lab.host(1).run("pkill", "-9", "gcs_server"), driver=2)


def drain(lab: Lab) -> Outage:
    """A replica's host is drained, then its power is cut; another has joined."""
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")

    def take_away(run: LabRun) -> None:
        lab.join(lab.add(4))
        ended = lab.host(2).run("ray", "drain-node", *reason, "--deadline-remaining-seconds", f"{NOTICE_S:.0f}")
        assert ended.code == 0, ended.err
        at = len(run.steps_at)
        wait_until(lambda: len(run.steps_at) >= at + 10)
        lab.host(2).kill()

    return suffer(lab, APART, take_away)


PACKED, WIDE, HEADLESS = (4, 2, 0), (2, 3, 3), (0, 4, 4)
"""CPUs of the hosts."""
CASES: dict[str, tuple[Sequence[int], Callable[[Lab], Outage]]] = {
    "relay alone cut, 10 s": (PACKED, partial(cut_off, number=3, seconds=10.0, overrides=TWO)),
    "one of two replicas cut, 10 s": (PACKED, partial(cut_off, number=2, seconds=10.0, overrides=APART)),
    "driver cut, 10 s": (PACKED, partial(cut_off, number=2, seconds=10.0, overrides=TWO, driver=2)),
    "replica's host off": (PACKED, lose_replica),
    "actor's host off": (WIDE, lose_actor),
    "head's host off": (HEADLESS, lose_head),
    "GCS killed": (HEADLESS, lose_gcs),
    "replica's host drained": (PACKED, drain),
    "relay alone cut, 60 s": (PACKED, partial(cut_off, number=3, seconds=60.0, overrides=TWO)),
    "one of two replicas cut, 60 s": (PACKED, partial(cut_off, number=2, seconds=60.0, overrides=APART)),
    "driver cut, 70 s": (PACKED, partial(cut_off, number=2, seconds=70.0, overrides=TWO, driver=2)),
    "relay alone cut for ever": (PACKED, partial(cut_off, number=3, seconds=inf, overrides=TWO)),
    "one of two replicas cut for ever": (PACKED, partial(cut_off, number=2, seconds=inf, overrides=APART)),
    "driver cut for ever": (PACKED, partial(cut_off, number=2, seconds=inf, overrides=TWO, driver=2)),
}
"""By name of the case: the hosts' CPUs, and what happens."""
NUM_CASES = {"full": len(CASES), "quick": 8, "short": 1}


def main() -> None:
    """Cause one outage after another, each in a lab of its own; print the result line."""
    parser = parser_of(__doc__, quick="only what takes seconds")
    parser.add_argument("--only", action="append", help="name of a case; may be given again")
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    found = {}
    for name in arguments.only or list(CASES)[: NUM_CASES[arguments.size]]:
        num_cpus, happens = CASES[name]
        with (
            tempfile.TemporaryDirectory(prefix="outages_") as folder,
            Lab.open(Path(folder), len(num_cpus), has_shared_disk=True) as lab,
        ):
            give(lab, write_model(Path(folder, "model")), write_tasks(Path(folder, "tasks.jsonl")))
            lab.start_ray(num_cpus=num_cpus)
            found[name] = asdict(happens(lab))
        progress(f"{name}: {found[name]}")
    print_result(found)


if __name__ == "__main__":
    main()
