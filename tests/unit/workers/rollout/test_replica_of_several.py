"""Replica of several policies: one engine each, one rollout for all, and separate weight changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

import pytest

from examples.tiny_policy import build_tokenizer
from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import ConfigError, WeightsMismatch, WorkerDied
from rlsys.types import Acknowledged, Assignment, Group, Sampling, VersionSpan
from tests.replicas import Shelf, assignment, hash_of, played, scripted, until
from tests.scripted_engine import ScriptedEngine
from workers.rollout.generator import Generator, WeightChange
from workers.rollout.group_route import PolicyText
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_host import GroupSessions
from workers.text.tokenizer import TextTokenizer


class AskAndAnswer(Workflow):
    """Two agents; the answer is to what was asked."""

    async def run(self, session: Session) -> None:
        asker = session.agent("asker")
        asked = await asker.chat(session.task.prompt)
        answerer = session.agent("answerer", parent=asker)
        await answerer.chat(asked[:3] + ">")


class Trio:
    """Two trained policies and a frozen one at one replica."""

    def __init__(self, when: Literal["between", "inflight"] = "between", agents: dict[str, str] | None = None) -> None:
        self.shelves = {name: Shelf() for name in ("first", "second")}
        self.engines: dict[str, ScriptedEngine] = {}
        speech = PolicyText(
            TextTokenizer(build_tokenizer()), Sampling(max_new_tokens=30), max_prompt_tokens=60, max_context_tokens=90
        )
        generators = {}
        for name in ("first", "second", "frozen"):
            self.engines[name] = scripted("r")
            puller = self.shelves.get(name)
            generators[name] = Generator("r", self.engines[name], speech, puller, WeightChange(when, tolerance=1e-3))
        bindings = agents or {"asker": "first", "answerer": "second"}
        self.worker = RolloutWorker("r", GroupSessions(AskAndAnswer(), bindings), generators)

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
        assert views["first"].episodes == views["second"].episodes

    played([trio.worker], scenario)


def test_frozen_weights_are_never_pulled_and_never_trained():
    trio = Trio(agents={"asker": "first", "answerer": "frozen"})

    async def scenario() -> None:
        views = await trio.run(0, 0)
        assert views["second"].num_trained == 0
        assert {t.policy for _, t in views["first"].everyone()} == {"first", "frozen"}
        assert trio.engines["frozen"].version == -1

    played([trio.worker], scenario)


def test_what_it_holds_and_does_is_told_of_each_policy():
    trio = Trio()
    trio.shelves["first"].put(4)
    trio.shelves["second"].put(1)

    async def scenario() -> None:
        assert trio.worker.held() == {}
        await trio.run(0, 0)
        assert trio.worker.held() == {
            "first": Acknowledged("r", 4, hash_of(4)),
            "second": Acknowledged("r", 1, hash_of(1)),
        }
        assert [trio.worker.load(name).version for name in ("first", "second", "frozen")] == [4, 1, -1]

    played([trio.worker], scenario)


def test_a_replica_that_is_gone_is_forgotten_by_every_policy():
    trio = Trio()

    async def scenario() -> None:
        await trio.worker.forget("other")
        assert all("other" in generator._gone for generator in trio.worker._generators.values())

    played([trio.worker], scenario)


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

    played([trio.worker], scenario)


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

    played([trio.worker], scenario)


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

    played([trio.worker], scenario)


@pytest.mark.parametrize("broken", ["first", "second"])
def test_a_dead_engine_fails_its_group_and_leaves_nothing(broken: str):
    trio = Trio()

    async def scenario() -> None:
        group = asyncio.create_task(trio.run(0, 0))
        await until(lambda: trio.engines[broken].stats().num_tokens > 5)
        await trio.engines[broken].close()
        with pytest.raises(WorkerDied):
            await group
        assert not any(generator._stays for generator in trio.worker._generators.values())

    played([trio.worker], scenario)


def test_weights_of_one_policy_that_come_corrupted_are_refused():
    trio = Trio()
    trio.shelves["second"].corrupted = True

    async def scenario() -> None:
        with pytest.raises(WeightsMismatch, match="verifying version 0: the engine computes with other values"):
            await trio.run(0, 0)

    played([trio.worker], scenario)


def test_an_agent_that_no_policy_speaks_for_is_told():
    trio = Trio(agents={"asker": "first"})

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="'answerer' is bound to no policy; bind it to one of first, second"):
            await trio.run(0, 0)

    played([trio.worker], scenario)
