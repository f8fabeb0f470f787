"""What the learner relies on of the critic and of those who make columns of a step, and what fakes ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan, plan_batch
from rlsys.contracts import Critic, StepAnnotator
from rlsys.errors import PayloadLost
from rlsys.loop.checkpoint import copy_and_write
from rlsys.testing import FakeActor, FakeCritic, FakeReference, FakeWorld, RewardAsAdvantage, run_virtual
from rlsys.types import Group, Ref
from tests.groups import group


@dataclass
class Kit:
    """Workers of one make, a step for them, and what they find once its data is lost."""

    groups: Sequence[Group]
    critic: Critic
    reference: StepAnnotator
    lose: Callable[[], None]

    def plan(self, max_tokens: int = 8, num_updates: int = 2) -> BatchPlan:
        assigned = [tuple(RewardAsAdvantage().advantages(each)) for each in self.groups]
        aggregation = RewardAsAdvantage().aggregation
        return plan_batch(
            self.groups, assigned, aggregation, num_ranks=2, max_tokens=max_tokens, num_updates=num_updates
        )


def no_loss() -> None:
    raise AssertionError("nothing is lost here")


@pytest.fixture
def kit() -> Kit:
    losses: dict[str, set[int]] = {}
    world = FakeWorld(payload_losses=losses)
    every = {"fetch_critic": {0}, "annotate_step": {0}}
    return Kit([group(s) for s in range(4)], FakeCritic(world), FakeReference(world), lambda: losses.update(every))


async def values(kit: Kit, plan: BatchPlan) -> list[Ref]:
    await kit.critic.fetch(kit.groups, plan)
    return await kit.critic.annotate_step(kit.groups, plan, Column.VALUES)


@pytest.mark.parametrize("max_tokens", [1, 8, 1000])
@pytest.mark.parametrize("num_updates", [1, 2, 4])
def test_a_column_has_an_array_per_micro_batch_in_order(kit, max_tokens, num_updates):
    async def main() -> None:
        plan = kit.plan(max_tokens, num_updates)
        expected = [[3 * len(micro_batch.samples) for micro_batch in plan[rank].micro_batches] for rank in range(2)]
        made: list[Sequence[Any]] = [
            await values(kit, plan),
            await kit.reference.annotate_step(kit.groups, plan, Column.REFERENCE_MISMATCHED),
        ]
        for column in made:
            assert [[len(array) for array in of_rank] for of_rank in column] == expected

    run_virtual(main())


def test_data_that_is_gone_is_told_before_anything_is_trained(kit):
    async def main() -> None:
        kit.lose()
        plan = kit.plan()
        with pytest.raises(PayloadLost):
            await kit.critic.fetch(kit.groups, plan)
        with pytest.raises(PayloadLost):
            await kit.reference.annotate_step(kit.groups, plan, Column.REFERENCE_MISMATCHED)

    run_virtual(main())


def test_a_step_changes_values_and_a_load_restores_them(kit, tmp_path: Path):
    async def main() -> None:
        critic, plan = kit.critic, kit.plan()
        before = await values(kit, plan)
        await copy_and_write(critic.save(tmp_path / "critic"))
        stats = await critic.train_step(plan, {Column.VALUES: before})
        assert stats.train_s >= 0
        assert stats.metrics.keys() == {name for name in stats.metrics if name.startswith("critic/")} != set()
        assert await values(kit, plan) != before
        await critic.load(tmp_path / "critic")
        assert await values(kit, plan) == before

    run_virtual(main())


# ------------------------------------------------------------------------------------- what fakes ask of the learner


def drop(columns: Mapping[Column, Sequence[Ref]]) -> dict[Column, Sequence[Ref]]:
    return {}


def cut(columns: Mapping[Column, Sequence[Ref]]) -> dict[Column, Sequence[Ref]]:
    return {kind: column[:1] for kind, column in columns.items()}


def keep(columns: Mapping[Column, Sequence[Ref]]) -> dict[Column, Sequence[Ref]]:
    return dict(columns)


@pytest.mark.parametrize("make", [FakeActor, FakeCritic])
@pytest.mark.parametrize(("fault", "is_refused"), [(drop, True), (cut, True), (keep, False)])
def test_a_fake_refuses_a_step_without_its_columns(make, fault, is_refused):
    async def main() -> None:
        world = FakeWorld()
        model, kit = make(world), Kit([group(s) for s in range(4)], FakeCritic(world), FakeReference(world), no_loss)
        plan = kit.plan()
        await model.fetch(kit.groups, plan)
        columns = fault({Column.VALUES: await values(kit, plan)})
        if is_refused:
            with pytest.raises(AssertionError, match="made for this step"):
                await model.train_step(plan, columns)
        else:
            await model.train_step(plan, columns)

    run_virtual(main())


@pytest.mark.parametrize("make", [FakeActor, FakeCritic])
def test_a_fake_refuses_a_step_not_fetched_for_its_plan(make):
    async def main() -> None:
        world = FakeWorld()
        model, kit = make(world), Kit([group(s) for s in range(4)], FakeCritic(world), FakeReference(world), no_loss)
        plan = kit.plan()
        with pytest.raises(AssertionError, match="fetch comes first"):
            await model.train_step(plan, {})
        await model.fetch(kit.groups, kit.plan(1000))
        with pytest.raises(AssertionError, match="for the same plan"):
            await model.train_step(plan, {})

    run_virtual(main())
