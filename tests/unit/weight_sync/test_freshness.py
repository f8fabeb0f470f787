"""Freshness counts to the last replica, and only replicas that are at work."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rlsys.testing import FakeWorld, run_virtual
from rlsys.types import Busy, Pull, RolloutReport
from rlsys.weight_sync.freshness import RECENT, Freshness
from rlsys.weight_sync.sync import WeightSync
from tests.groups import group, rolled_out


def changes(freshness: Freshness, version: int, **ends_s: float) -> None:
    """Note when each replica had the version, 100 s behind on its own clock."""
    pulls = [Pull(replica, end_s - 101.0, end_s - 100.0, version) for replica, end_s in ends_s.items()]
    freshness.note_pulls(pulls, 100.0)


def test_a_version_is_fresh_when_the_last_replica_has_it() -> None:
    freshness = Freshness(lag=0)
    assert freshness.note_publish(0, 10.0) is None
    changes(freshness, 0, a=10.5, b=12.0)
    assert freshness.note_publish(1, 20.0) == 2.0
    changes(freshness, 1, a=23.0, b=21.0)
    assert freshness.note_publish(2, 30.0) == 3.0


def test_a_newer_version_counts_for_one_that_was_skipped() -> None:
    freshness = Freshness(lag=1)
    freshness.note_publish(0, 10.0)
    changes(freshness, 0, a=10.5)
    freshness.note_publish(1, 11.0)
    changes(freshness, 1, b=13.0)
    assert freshness.note_publish(2, 20.0) == 3.0


def test_a_replica_without_the_version_leaves_it_unknown_and_one_that_is_gone_counts_no_more() -> None:
    freshness = Freshness(lag=0)
    freshness.note_publish(0, 0.0)
    changes(freshness, 0, a=1.0, b=1.0)
    found = []
    for version in range(1, RECENT + 4):
        found.append(freshness.note_publish(version, 10.0 * version))
        changes(freshness, version, a=10.0 * version + 1)
    assert found == [1.0, *[None] * RECENT, 1.0, 1.0]


def test_an_older_change_that_is_reported_late_counts_in_its_place() -> None:
    freshness = Freshness(lag=1)
    freshness.note_publish(0, 10.0)
    changes(freshness, 0, a=10.5)
    freshness.note_publish(1, 20.0)
    changes(freshness, 2, a=35.0)
    changes(freshness, 1, a=22.0)
    assert freshness.note_publish(2, 30.0) == 0.5
    assert freshness.note_publish(3, 40.0) == 2.0
    assert freshness.note_publish(4, 50.0) == 5.0


def test_only_changes_of_the_policy_count_and_an_unknown_value_is_left_out() -> None:
    workers = FakeWorld().workers()
    weights = WeightSync(workers.actor, workers.relays, transfer_s=1.0, max_age=0)

    async def main() -> None:
        await weights.publish(0)
        now_s = asyncio.get_running_loop().time()
        pulls = tuple(Pull("r", now_s, now_s + s, 0, policy) for policy, s in (("first", 2.0), ("second", 50.0)))
        report = RolloutReport(Busy("r", now_s, now_s), pulls=pulls)
        weights.note_pulls(rolled_out(replace(group(0), policy="first"), report))
        await weights.publish(1)
        assert weights.metrics["weights/freshness_s"] == 2.0
        await weights.publish(2)
        assert "weights/freshness_s" not in weights.metrics

    run_virtual(main())
