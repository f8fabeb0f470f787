"""Repacker: it measures, plans and moves; the death of a replica does not end it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlsys.errors import WorkerDied
from rlsys.loop.repack import Repacker
from rlsys.monitoring.events import Event, Events, TrajectoriesMoved
from rlsys.testing import EventRecorder, run_virtual
from rlsys.types import Assignment, EngineStats, Group, ReplicaLoad


class Looks:
    """Implements `Rollouts`: each look finds the next of these uses of the cache, by replica."""

    def __init__(self, *uses: Mapping[str, float], version: int = 3, moved: int = 2) -> None:
        self.uses, self.version, self.moved = list(uses), version, moved
        self.times: list[float] = []
        self.moves: list[tuple[str, str]] = []
        self.failing: set[int] = set()
        """Looks, counted from 0, in which a replica is found dead."""

    async def loads(self) -> Sequence[ReplicaLoad]:
        number = len(self.times)
        self.times.append(asyncio.get_running_loop().time())
        if number in self.failing:
            raise WorkerDied("b", "telling its load", "the process is gone")
        uses = self.uses[min(number, len(self.uses) - 1)]
        return [ReplicaLoad(name, self.version, EngineStats(2, 0, used, 0)) for name, used in uses.items()]

    async def drain(self, source: str, to: str) -> int:
        self.moves.append((source, to))
        return self.moved

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        raise NotImplementedError

    async def restart(self, worker: str, on_recovery: object) -> None:
        raise NotImplementedError

    def placements(self) -> Mapping[int, str]:
        return {}


def looked(rollouts: Looks, published: Sequence[tuple[float, int]], lasts_s: float) -> tuple[Repacker, list[Event]]:
    """Run a repacker for so long; weights are published at the given seconds."""
    kept = EventRecorder()
    repacker = Repacker(rollouts, every_s=5.0, num_slots=8, events=Events([kept]))

    async def main() -> None:
        loop = asyncio.create_task(repacker.run())
        for at_s, version in published:
            await asyncio.sleep(at_s - asyncio.get_running_loop().time())
            repacker.on_publish(version)
        await asyncio.sleep(lasts_s - asyncio.get_running_loop().time())
        loop.cancel()

    run_virtual(main())
    return repacker, kept.events


def test_repacking_checks_periodically_and_right_after_a_publish():
    rollouts = Looks({})
    looked(rollouts, [(7.0, 4)], lasts_s=13.0)
    assert [round(t, 3) for t in rollouts.times] == [0, 5, 7, 12]


def test_groups_past_their_peak_on_old_weights_move():
    rollouts = Looks({"a": 0.8, "b": 0.6}, {"a": 0.1, "b": 0.2}, {"a": 0.0, "b": 0.3})
    repacker, events = looked(rollouts, [(1.0, 4)], lasts_s=3.0)
    assert rollouts.moves == [("a", "b")]
    assert events == [TrajectoriesMoved("a", "b", 2, 3)]
    assert repacker.num_moved == 2


def test_the_peak_counts_and_not_the_last_look():
    rollouts = Looks({"a": 0.8, "b": 0.6}, {"a": 0.1, "b": 0.7}, {"a": 0.2, "b": 0.3})
    looked(rollouts, [(1.0, 4)], lasts_s=7.0)
    assert rollouts.moves == [("a", "b")], "what is left grows at the third look, and is far below its peak"


def test_nothing_moves_on_the_newest_version():
    rollouts = Looks({"a": 0.8, "b": 0.6}, {"a": 0.1, "b": 0.2})
    looked(rollouts, [(0.0, 3)], lasts_s=11.0)
    assert rollouts.moves == []


def test_a_move_that_comes_to_nothing_is_not_told():
    rollouts = Looks({"a": 0.8, "b": 0.6}, {"a": 0.1, "b": 0.2}, moved=0)
    repacker, events = looked(rollouts, [(0.0, 4)], lasts_s=6.0)
    assert rollouts.moves
    assert (repacker.num_moved, events) == (0, [])


def test_a_replica_that_dies_does_not_end_it():
    rollouts = Looks({"a": 0.8, "b": 0.6}, {}, {"a": 0.1, "b": 0.2})
    rollouts.failing = {1}
    looked(rollouts, [(1.0, 4)], lasts_s=7.0)
    assert rollouts.moves == [("a", "b")]
