"""Sessions of several policies: one group for all, separate weight changes, all holds or none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf
from typing import Literal

import pytest

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import ConfigError, WeightsMismatch, WorkerDied
from rlsys.routing.request_router import RequestRouter
from rlsys.types import Acknowledged, Assignment, Group, VersionSpan
from tests.groups import report_of
from tests.replicas import Shelf, assignment, hash_of, played, replica_of, scripted, text_of, until
from tests.scripted_engine import ScriptedEngine
from workers.rollout.replica import EngineReplica
from workers.rollout.session_worker import GroupSessions, PolicyRoad, SessionWorker


class AskAndAnswer(Workflow):
    """Two agents; the answer is to what was asked."""

    async def run(self, session: Session) -> None:
        asker = session.agent("asker")
        asked = await asker.chat(session.task.prompt)
        answerer = session.agent("answerer", parent=asker)
        await answerer.chat(asked[:3] + ">")


class Trio:
    """Two trained policies and a frozen one, each with a replica."""

    def __init__(self, when: Literal["between", "inflight"] = "between", agents: dict[str, str] | None = None) -> None:
        self.shelves = {name: Shelf() for name in ("first", "second")}
        self.engines: dict[str, ScriptedEngine] = {}
        self.replicas: dict[str, EngineReplica] = {}
        for name in ("first", "second", "frozen"):
            self.engines[name] = scripted("r")
            self.replicas[name] = replica_of(self.shelves.get(name), self.engines[name], name="r", when=when)
        bindings = agents or {"asker": "first", "answerer": "second"}
        roads = {name: PolicyRoad(text_of(30), RequestRouter([each], 1)) for name, each in self.replicas.items()}
        self.worker = SessionWorker("s", GroupSessions(AskAndAnswer(), bindings), roads, group_s=inf)

    @property
    def all(self) -> list[EngineReplica | SessionWorker]:
        return [self.worker, *self.replicas.values()]

    def task(self, first: int, second: int, *, group_id: int = 3) -> Assignment:
        return replace(assignment(group_id=group_id), versions={"first": first, "second": second})

    async def run(self, first: int, second: int, *, group_id: int = 3) -> dict[str, Group]:
        views, _ = await self.worker.run(self.task(first, second, group_id=group_id))
        return {view.policy: view for view in views}


def test_each_trained_policy_gets_its_own_view_of_the_group():
    trio = Trio()
    trio.shelves["first"].put(4)
    trio.shelves["second"].put(1)

    async def scenario() -> None:
        views = await trio.run(3, 1)
        assert list(views) == ["first", "second"]
        for name, version, asked, place in (("first", 4, 3, 0), ("second", 1, 1, 1)):
            view = views[name]
            assert view.permit_version == asked
            assert view.versions == (VersionSpan(version, view.num_trained),)
            assert view.weights == (Acknowledged("r", version, hash_of(version)),)
            assert [at for at, _ in view.trajectories()] == [(0, place), (1, place)]
            assert [t.policy for _, t in view.everyone()] == ["first", "second"] * 2
        pulls = report_of((views["first"], views["second"])).pulls
        assert [(pull.policy, pull.version) for pull in pulls] == [("first", 4), ("second", 1)]
        assert views["first"].episodes == views["second"].episodes

    played(trio.all, scenario)


def test_frozen_weights_are_never_pulled_and_never_trained():
    trio = Trio(agents={"asker": "first", "answerer": "frozen"})

    async def scenario() -> None:
        views = await trio.run(0, 0)
        assert views["second"].num_trained == 0
        assert {t.policy for _, t in views["first"].everyone()} == {"first", "frozen"}
        assert trio.engines["frozen"].version == -1

    played(trio.all, scenario)


def test_a_weight_change_waits_for_groups_of_another_policy():
    trio = Trio()

    async def scenario() -> None:
        before = asyncio.create_task(trio.run(0, 0, group_id=1))
        await until(lambda: trio.engines["second"].stats().num_running > 0)
        trio.shelves["first"].put(1)
        after = asyncio.create_task(trio.run(1, 0, group_id=2))
        views = await before
        assert not after.done()
        assert [span.version for span in views["first"].versions] == [0]
        views = await after
        assert [(view.versions[0].version) for view in views.values()] == [1, 0]

    played(trio.all, scenario)


def test_groups_that_need_different_new_weights_do_not_deadlock():
    trio = Trio()

    async def scenario() -> None:
        running = [asyncio.create_task(trio.run(0, 0, group_id=group_id)) for group_id in range(2)]
        await until(lambda: trio.engines["first"].stats().num_running > 0)
        for shelf in trio.shelves.values():
            shelf.put(1)
        crossing = [trio.run(1, 0, group_id=2), trio.run(0, 1, group_id=3), trio.run(1, 1, group_id=4)]
        for views in [*await asyncio.gather(*crossing), *await asyncio.gather(*running)]:
            assert all(view.oldest_version >= view.permit_version for view in views.values())

    played(trio.all, scenario)


def test_a_group_that_waits_for_one_policy_holds_no_other():
    trio = Trio()

    async def scenario() -> None:
        await trio.run(0, 0, group_id=1)
        waiting = asyncio.create_task(trio.run(0, 1, group_id=2))
        for _ in range(50):
            await asyncio.sleep(0)
        assert [replica.load().num_present for replica in trio.replicas.values()] == [0, 0, 0]
        trio.shelves["first"].put(1)
        later = asyncio.create_task(trio.run(1, 1, group_id=3))
        await until(lambda: trio.engines["first"].version == 1)
        trio.shelves["second"].put(1)
        for views in (await waiting, await later):
            assert [view.oldest_version for view in views.values()] == [1, 1]

    played(trio.all, scenario)


def test_in_flight_each_policy_mixes_its_own_versions_only():
    trio = Trio(when="inflight")

    async def scenario() -> None:
        running = asyncio.create_task(trio.run(0, 0, group_id=1))
        await until(lambda: trio.engines["first"].stats().num_tokens > 10)
        trio.shelves["first"].put(1)
        await trio.run(1, 0, group_id=2)
        views = await running
        assert [span.version for span in views["first"].versions] == [0, 1]
        assert [span.version for span in views["second"].versions] == [0]

    played(trio.all, scenario)


@pytest.mark.parametrize("broken", ["first", "second"])
def test_a_dead_engine_fails_its_group_and_leaves_nothing(broken: str):
    trio = Trio()

    async def scenario() -> None:
        group = asyncio.create_task(trio.run(0, 0))
        await until(lambda: trio.engines[broken].stats().num_tokens > 5)
        await trio.engines[broken].close()
        with pytest.raises(WorkerDied):
            await group
        await asyncio.sleep(0)
        loads = [trio.replicas[name].load() for name in trio.replicas if name != broken]
        assert [(load.stats.num_running, load.num_present) for load in loads] == [(0, 0)] * 2

    played(trio.all, scenario)


def test_weights_of_one_policy_that_come_corrupted_are_refused():
    trio = Trio()
    trio.shelves["second"].corrupted = True

    async def scenario() -> None:
        with pytest.raises(WeightsMismatch, match="verifying version 0: the engine computes with other values"):
            await trio.run(0, 0)

    played(trio.all, scenario)


def test_an_agent_that_no_policy_speaks_for_is_told():
    trio = Trio(agents={"asker": "first"})

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="'answerer' is bound to no policy; bind it to one of first, second"):
            await trio.run(0, 0)

    played(trio.all, scenario)
