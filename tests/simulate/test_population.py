"""Runs of a population: the worst take the state of one of the best inside their drivers, and go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import ConfigError, RunAborted
from rlsys.loop.driver import Driver
from rlsys.loop.population import Population, Range, Switch
from rlsys.monitoring.events import CheckpointSaved, RolledBack, StepDone
from rlsys.testing import EventRecorder, FakeWorld, run_virtual
from rlsys.testing.fake_run import go_on
from rlsys.types import PolicyVersion
from tests.simulate.world import driver_on

LR = "train.lr"


@dataclass
class FakeMember:
    """Meetings of a driver on fake workers; its score is given."""

    number: int
    population: Population
    score: Callable[[int], float]

    def is_due(self, step: int) -> bool:
        return self.population.is_due(self.number, step)

    async def meet(self, step: int, version: PolicyVersion, checkpoint: Path) -> Switch | None:
        meeting = await self.population.meet(self.number, step, self.score(step), checkpoint)
        if meeting.end or meeting.parent is None:
            return Switch(end=meeting.end) if meeting.end else None
        return Switch(parent=f"member{meeting.parent}", checkpoint=Path(meeting.checkpoint), values=meeting.values)


@dataclass
class FakePopulation:
    population: Population
    drivers: list[Driver]
    worlds: list[FakeWorld]
    recorders: list[EventRecorder]

    def run(self) -> list[PolicyVersion | BaseException]:
        return run_virtual(self._run())

    async def _run(self) -> list[PolicyVersion | BaseException]:
        async def one(number: int, driver: Driver) -> PolicyVersion:
            try:
                return await go_on(driver)
            finally:
                self.population.leave(number)

        return await asyncio.gather(*(one(*each) for each in enumerate(self.drivers)), return_exceptions=True)


def population_of(folder: Path, num_members: int = 4, **settings: Any) -> Population:
    chosen: dict[str, Any] = {"search": "pbt", "every": 2, "share": 0.25, "is_highest_best": True, "seed": 0}
    return Population(num_members=num_members, ranges={LR: Range(1e-5, 1e-3)}, folder=folder, **{**chosen, **settings})


def populated(
    folder: Path,
    scores: Sequence[Callable[[int], float]],
    worlds: Sequence[FakeWorld] | None = None,
    *,
    driver: dict[str, Any] | None = None,
    **settings: Any,
) -> FakePopulation:
    worlds = list(worlds or [FakeWorld() for _ in scores])
    recorders = [EventRecorder() for _ in scores]
    population = population_of(folder, len(scores), **settings)
    population.recall()
    drivers = []
    for number, (score, world, recorder) in enumerate(zip(scores, worlds, recorders, strict=True)):
        made = driver_on(world, folder / f"member{number}", recorder=recorder, **(driver or {}))
        made.meetings = FakeMember(number, population, score)
        drivers.append(made)
    return FakePopulation(population, drivers, worlds, recorders)


BY_MEMBER = [lambda step, number=number: float(number) for number in range(4)]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_worst_go_on_from_the_best_inside_the_run(max_staleness, tmp_path):
    made = populated(tmp_path, BY_MEMBER, driver={"max_staleness": max_staleness})
    reached = made.run()
    assert reached == [8, 6, 6, 6]  # each copy is one more version, and no step less
    backs = made.recorders[0].of(RolledBack)
    assert [(back.parent, back.restored, back.version) for back in backs] == [("member3", 2, 3), ("member3", 4, 6)]
    assert not any(recorder.of(RolledBack) for recorder in made.recorders[1:])
    assert len(made.recorders[0].of(StepDone)) == 6


def test_a_copy_has_weights_and_place_in_the_data(tmp_path):
    worlds = [FakeWorld(rollout_s=lambda group_id, number=number: 1.0 + number) for number in range(4)]
    made = populated(tmp_path, BY_MEMBER, worlds)
    made.run()
    calm = FakeWorld(rollout_s=worlds[3].rollout_s)
    run_virtual(go_on(driver_on(calm, tmp_path / "calm")))
    assert made.worlds[0].consumed == made.worlds[3].consumed == calm.consumed
    assert made.worlds[3].weights == calm.weights  # nothing of the others enters the best


def test_a_copied_value_stays_in_its_range_and_near_its_parent(tmp_path):
    made = populated(tmp_path, BY_MEMBER)
    before = made.population.values(3)[LR]
    made.run()
    first, second = (meeting for meeting in made.population.held if meeting.member == 0)
    assert first.values[LR] in (pytest.approx(0.8 * before), pytest.approx(1.2 * before))
    assert (first.parent, second.parent) == (3, 3)
    assert made.population.values(3)[LR] == before
    assert made.population.lineage(0) == [3, 0]


def test_a_death_after_a_copy_does_not_bring_the_old_weights_back(tmp_path):
    worlds = [FakeWorld(training_deaths={"actor-0 train_step": {3}}), *(FakeWorld() for _ in range(3))]
    made = populated(tmp_path, BY_MEMBER, worlds)
    made.run()
    copied, died, _ = made.recorders[0].of(RolledBack)
    assert copied.parent == "member3" and not died.parent
    assert died.restored == copied.version  # the checkpoint that was saved right after the copy


def test_a_member_that_fails_delays_nobody(tmp_path):
    deaths = {"actor-0 train_step": set(range(3, 30))}
    made = populated(tmp_path, BY_MEMBER, [*(FakeWorld() for _ in range(3)), FakeWorld(training_deaths=deaths)])
    reached = made.run()
    assert isinstance(reached[3], RunAborted)
    assert all(isinstance(version, int) for version in reached[:3])


def test_a_stopped_population_goes_on_as_one_that_was_not(tmp_path):
    whole = populated(tmp_path / "whole", BY_MEMBER)
    whole.run()
    cut = populated(tmp_path / "cut", BY_MEMBER)

    class Stopper:
        def handle(self, event, time_s):
            if isinstance(event, CheckpointSaved) and event.step == 4:
                for driver in cut.drivers:
                    driver.stop()

        def close(self): ...

    cut.drivers[1].events.attach(Stopper())
    cut.run()
    again = populated(tmp_path / "cut", BY_MEMBER)
    again.run()
    assert again.population.held == [
        replace(meeting, checkpoint=meeting.checkpoint.replace("whole", "cut")) for meeting in whole.population.held
    ]
    assert [world.consumed for world in again.worlds] == [world.consumed for world in whole.worlds]


def test_runs_below_the_best_end_early(tmp_path):
    worlds = [FakeWorld(rollout_s=lambda group_id, number=number: 1.0 + number) for number in range(4)]
    made = populated(tmp_path, list(reversed(BY_MEMBER)), worlds, search="asha", share=0.5, every=1)
    reached = made.run()
    assert reached[0] == 6
    ends = [driver.early_stop for driver in made.drivers]
    assert ends[0] == "" and all("is not among the best" in end for end in ends[1:])
    assert all(isinstance(version, int) and 1 <= version < 6 for version in reached[1:])


def test_early_ends_come_at_growing_steps(tmp_path):
    population = population_of(tmp_path, search="asha", share=0.5, every=3)
    assert [step for step in range(30) if population.is_due(0, step)] == [3, 6, 12, 24]


def test_a_random_search_meets_nobody(tmp_path):
    made = populated(tmp_path, BY_MEMBER, search="random")
    assert made.run() == [6] * 4
    assert made.population.held == []


def test_the_lowest_score_can_be_the_best(tmp_path):
    made = populated(tmp_path, BY_MEMBER, is_highest_best=False)
    made.run()
    assert [meeting.member for meeting in made.population.held if meeting.parent is not None] == [3, 3]


def test_equal_scores_copy_nothing(tmp_path):
    made = populated(tmp_path, [lambda step: 0.0] * 4)
    assert made.run() == [6] * 4


def test_damaged_turns_are_named(tmp_path):
    (tmp_path / "population.json").write_text("{")
    with pytest.raises(ConfigError, match=r"population\.json cannot be read"):
        population_of(tmp_path).recall()
