"""Requests move between engines: same tokens, logprobs and versions; and the source loads new weights meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import pytest
from torch import Tensor

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import WorkerDied
from rlsys.routing.request_router import RequestRouter
from rlsys.types import Acknowledged, Episode, Group, VersionSpan
from tests.models import tiny_sorter
from tests.replicas import Shelf, assignment, hash_of, played, replica_of, scripted, sessions_of, until
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.rollout.replica import EngineReplica
from workers.rollout.session_worker import SessionWorker

NUM_TOKENS = 30
Done = tuple[tuple[Group, ...], tuple[Episode, ...]]


class Tools(Workflow):
    """Two turns; the tool between them answers when the test says so."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.answer = asyncio.Event()

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        self.num_waiting += 1
        await self.answer.wait()
        await agent.chat("34>")


class Team:
    """Replicas on one shelf; a session worker begins its groups at the first, and knows the others later."""

    def __init__(
        self, names: str, workflow: Workflow | None = None, when: Literal["between", "inflight"] = "between"
    ) -> None:
        self.shelf = Shelf()
        self.engines = [scripted(name) for name in names]
        self.replicas = [
            replica_of(self.shelf, engine, name=name, when=when)
            for name, engine in zip(names, self.engines, strict=True)
        ]
        self.worker = sessions_of(self.replicas[0], workflow=workflow, num_tokens=NUM_TOKENS)

    @property
    def all(self) -> list[EngineReplica | SessionWorker]:
        return [self.worker, *self.replicas]

    @property
    def router(self) -> RequestRouter:
        return self.worker._roads["policy"].router

    async def ready(self) -> None:
        """Every replica holds the shelf's version."""
        for replica in self.replicas:
            await replica.weights.ensure(self.shelf.version)

    async def begun(self, num_tokens: int = 10) -> asyncio.Task[Done]:
        """A group on the first replica that has sampled so many tokens; the worker then meets the others."""
        engine = self.engines[0]
        task = asyncio.create_task(self.worker.run(assignment(self.shelf.version)))
        await until(lambda: engine.stats().num_tokens >= num_tokens)
        self.router.meet(self.replicas)
        return task

    async def drained(self, source: int = 0, to: int = 1) -> int:
        """What `RolloutPool.drain` does."""
        moved = await self.worker.move("policy", self.replicas[source].name, self.replicas[to].name)
        if moved:
            await self.replicas[source].drain()
        return moved


def unmoved(workflow: Workflow | None = None) -> tuple[Episode, ...]:
    team = Team("a", workflow)
    if isinstance(workflow, Tools):
        workflow.answer.set()
    return played(team.all, lambda: team.worker.run(assignment()))[1]


def test_a_moved_group_has_the_tokens_of_an_unmoved_one():
    team = Team("ab")

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        assert await team.drained() == 1
        (view,), payload = await group
        assert payload == unmoved_payload
        assert view.versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        assert set(view.weights) == {Acknowledged(name, 0, hash_of(0)) for name in "ab"}
        assert sum(engine.stats().num_tokens for engine in team.engines) == 2 * NUM_TOKENS, "nothing is sampled twice"
        assert [replica.load().num_present for replica in team.replicas] == [0, 0]

    unmoved_payload = unmoved()
    played(team.all, scenario)


def test_a_group_moves_between_local_engines_with_the_same_tokens():
    def engine(name: str) -> LocalEngine:
        spec = EngineSpec(model_path="", slots=4, max_context=64)
        return LocalEngine(tiny_sorter(), spec, stop_token_ids=frozenset({1}), name=name)

    def payload_of(*, is_drained: bool) -> tuple[Episode, ...]:
        engines = [engine("a"), engine("b")]
        tools = Tools()
        a, b = (replica_of(None, each, name=name) for name, each in zip("ab", engines, strict=True))
        worker = sessions_of(a, num_tokens=NUM_TOKENS, workflow=tools)

        async def scenario() -> tuple[Episode, ...]:
            tools.answer.set()
            task = asyncio.create_task(worker.run(assignment(size=4)))
            await until(lambda: engines[0].stats().num_tokens >= 12)
            if is_drained:
                worker._roads["policy"].router.meet([a, b])
                await a.drain()
            payload = (await task)[1]
            assert (engines[1].stats().num_tokens > 0) == is_drained
            return payload

        return played([worker, a, b], scenario)

    assert payload_of(is_drained=True) == payload_of(is_drained=False)


def test_a_source_takes_new_weights_while_its_moved_group_continues():
    team = Team("ab")

    async def scenario() -> None:
        await team.ready()
        old = await team.begun()
        team.shelf.put(1)
        team.router.meet(team.replicas[:1])  # so that the next group begins at the source
        new = asyncio.create_task(team.worker.run(assignment(1, group_id=4)))
        await until(lambda: 1 in team.shelf.pulls)
        team.router.meet(team.replicas)
        assert team.replicas[0].load().version == 0, "running groups hold the change back"
        await team.engines[1].pause()  # so that the moved group does not end
        assert await team.drained() == 1
        assert (await new)[0][0].versions == (VersionSpan(1, 2 * NUM_TOKENS),)
        assert not old.done()
        assert team.replicas[1].load().version == 0
        await team.engines[1].resume()
        assert (await old)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)

    played(team.all, scenario)


def test_a_replica_keeps_its_weights_until_the_groups_that_moved_there_end():
    team = Team("ab")

    async def scenario() -> None:
        await team.ready()
        old = await team.begun()
        await team.engines[1].pause()
        assert await team.drained() == 1
        team.shelf.put(1)
        change = asyncio.create_task(team.replicas[1].weights.ensure(1))
        await until(lambda: 1 in team.shelf.pulls)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (team.replicas[1].load().version, team.replicas[1].load().is_loading) == (0, False)
        await team.engines[1].resume()
        assert (await old)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        await change

    played(team.all, scenario)


def test_a_group_waiting_on_a_tool_moves_and_continues_there():
    tools = Tools()
    team = Team("ab", tools)
    a, b = team.replicas

    async def scenario() -> tuple[Episode, ...]:
        await team.ready()
        group = await team.begun()
        await until(lambda: tools.num_waiting == 2)
        assert a.load().num_present == 1, "it has work, though its engine has none"
        assert await team.drained() == 1
        await until(lambda: a.load().num_present == 0)
        assert b.load().num_present == 1
        team.shelf.put(1)
        await a.weights.ensure(1)  # the source changes its weights meanwhile
        before = team.engines[1].stats().num_tokens
        tools.answer.set()
        (view,), payload = await group
        assert view.versions == (VersionSpan(0, 4 * NUM_TOKENS),)
        assert team.engines[1].stats().num_tokens == before + 2 * NUM_TOKENS
        assert b.load().num_present == 0
        return payload

    assert played(team.all, scenario) == unmoved(Tools())


@pytest.mark.parametrize("why", ["another version", "other bytes", "nothing held", "a change waits"])
def test_a_replica_refuses_groups_it_cannot_serve_and_they_stay(why: str):
    team = Team("ab")
    a, b = team.replicas

    async def scenario() -> None:
        await a.weights.ensure(0)
        if why != "nothing held":
            await b.weights.ensure(0)
        if why == "another version":
            team.shelf.put(1)
            await b.weights.ensure(1)
            team.shelf.version = 0
        if why == "other bytes":
            b.weights._acknowledged[0] = replace(b.weights._acknowledged[0], hash="others")
        change = asyncio.create_task(b.weights.ensure(1)) if why == "a change waits" else None
        group = await team.begun()
        assert await team.drained() == 0
        assert b.load().num_present == 0
        assert (await group)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        if change is not None:
            change.cancel()

    played(team.all, scenario)


def test_a_replica_that_is_loading_weights_refuses_groups():
    loading, go_on = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedEngine):
        async def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
            if version == 1:
                loading.set()
                await go_on.wait()
            await super().load(version, weights)

    team = Team("ab")
    slow = Slow(lambda request: [], shapes={"w": (2,)}, version=-1, name="b")
    team.replicas[1] = replica_of(team.shelf, slow, name="b")

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        team.shelf.put(1)
        change = asyncio.create_task(team.replicas[1].weights.ensure(1))
        await loading.wait()
        assert team.replicas[1].load().is_loading
        assert await team.drained() == 0
        go_on.set()
        await asyncio.gather(group, change)
        assert not team.replicas[1].load().is_loading

    played(team.all, scenario)


def test_a_request_that_ends_while_it_is_aborted_is_whole():
    late: list[str] = []

    class Late(ScriptedEngine):
        """Aborts only what a test says later."""

        def abort(self, request_id: str) -> None:
            late.append(request_id)

    team = Team("ab")
    engine = team.engines[0] = Late(team.engines[0]._reply, shapes={"w": (2,)}, version=-1, name="a")
    team.replicas[0] = replica_of(team.shelf, engine, name="a")
    team.worker = sessions_of(team.replicas[0], num_tokens=NUM_TOKENS)

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        assert await team.drained() == 1  # returns once both requests ended by themselves
        for request_id in late:
            ScriptedEngine.abort(engine, request_id)
        (view,), payload = await group
        assert (len(late), view.num_trained, payload) == (2, 2 * NUM_TOKENS, unmoved_payload)

    unmoved_payload = unmoved()
    played(team.all, scenario)


def test_a_replica_that_dies_after_the_move_costs_a_group_only_its_last_tokens():
    team = Team("abc")

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        await team.engines[1].pause()
        assert await team.drained() == 1
        await until(lambda: team.engines[1].stats().num_waiting + team.engines[1].stats().num_running == 2)
        await team.engines[1].close()
        (view,), payload = await group
        assert payload == unmoved_payload
        assert {a.hash for a in view.weights} == {hash_of(0)}

    unmoved_payload = unmoved()
    played(team.all, scenario)


def test_a_group_whose_version_died_with_its_replica_is_given_up():
    team = Team("ab")

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        team.shelf.put(1)
        await team.replicas[1].weights.ensure(1)
        await team.engines[0].close()
        with pytest.raises(WorkerDied, match="no other replica has version 0"):
            await group

    played(team.all, scenario)


def test_a_group_moves_on_once_more():
    team = Team("abc")

    async def scenario() -> tuple[Episode, ...]:
        await team.ready()
        group = await team.begun()
        assert await team.drained() == 1
        await until(lambda: team.engines[1].stats().num_tokens >= 10)
        assert await team.drained(1, 2) == 1
        assert await team.drained(0, 2) == 0, "nothing is left there"
        await until(lambda: [replica.load().num_present for replica in team.replicas] == [0, 0, 1])
        (view,), payload = await group
        assert view.versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        return payload

    assert played(team.all, scenario) == unmoved()
