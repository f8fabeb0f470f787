"""A resumed run goes on in order, whatever was finished and whatever was not, and under other limits too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan
from rlsys.contracts import TrainStats, Workers
from rlsys.loop.driver import Driver
from rlsys.testing import FakeActor, FakeRelays, FakeRewards, FakeRollouts, FakeWorld, run_virtual
from rlsys.types import Ref
from tests.simulate.world import StopAfter, driver_on, go_on

SLOW = 4
"""The group that is still being rolled out when the run is cut, while younger ones are finished."""


class OrderedActor(FakeActor):
    """Remembers in which order groups are trained."""

    def __init__(self, world: FakeWorld, order: list[int]) -> None:
        super().__init__(world)
        self.order = order

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        self.order += [group.group_id for group in self.fetched]
        return await super().train_step(plan, columns)


class OrderedWorld(FakeWorld):
    def __init__(self, order: list[int]) -> None:
        super().__init__(rollout_s=lambda group_id: 50.0 if group_id == SLOW else 1.0, train_s=lambda version: 10.0)
        self.order = order

    def workers(self) -> Workers:
        return Workers(FakeRollouts(self), FakeRewards(self), OrderedActor(self, self.order), FakeRelays(self))


def cut_and_resumed(folder: Path, *, max_staleness: int, steps: int = 6) -> tuple[list[int], Driver]:
    """Serials in the order they were trained: one step of a run of 12 permits, the rest under other limits."""
    order: list[int] = []
    cut = driver_on(OrderedWorld(order), folder, max_staleness=3)
    cut.events.attach(StopAfter(cut, 1))
    assert run_virtual(cut.run(0)) == 1
    assert {row.group_id > SLOW for row in cut.queue.finished_groups} == {True, False}
    resumed = driver_on(OrderedWorld(order), folder, max_staleness=max_staleness, steps=steps)
    assert run_virtual(go_on(resumed)) == steps
    return order, resumed


@pytest.mark.parametrize(
    ("max_staleness", "steps"), [(3, 6), (8, 6), (3, 2)], ids=["the same limits", "more permits", "fewer steps"]
)
def test_groups_are_trained_once_each_in_their_order(tmp_path: Path, max_staleness: int, steps: int):
    order, resumed = cut_and_resumed(tmp_path, max_staleness=max_staleness, steps=steps)
    assert order == list(range(3 * steps))
    assert not resumed.queue.dropped


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_tighter_bound_on_resume_rolls_stale_groups_out_again(tmp_path: Path, max_staleness: int):
    order, resumed = cut_and_resumed(tmp_path, max_staleness=max_staleness)
    assert order == list(range(18))
    assert (resumed.queue.dropped, resumed.queue.ledger.open) == ({}, {})
    actor = resumed.workers.actor
    assert isinstance(actor, FakeActor)
    assert max(actor.world.staleness) <= max_staleness
