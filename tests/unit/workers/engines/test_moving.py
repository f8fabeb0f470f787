"""Moves of trajectories between replicas: same tokens, one version; and the source replica loads new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from torch import Tensor

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import ConfigError, DeadlineExceeded, WorkerDied
from rlsys.types import Acknowledged, Episode, Group, VersionSpan
from tests.models import tiny_sorter
from tests.replicas import Shelf, assignment, hash_of, played, replica_of, scripted, until
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import Completion, EngineSpec, Request
from workers.engines.local import LocalEngine
from workers.rollout.generator import Generator
from workers.rollout.group_route import Ticket
from workers.rollout.rollout_worker import RolloutWorker

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
    """Replicas on one shelf."""

    def __init__(self, names: str, workflow: Workflow | None = None) -> None:
        self.shelf = Shelf()
        self.engines = [scripted(name) for name in names]
        self.workers = [
            replica_of(self.shelf, engine, name=name, workflow=workflow, num_tokens=NUM_TOKENS)
            for name, engine in zip(names, self.engines, strict=True)
        ]

    async def ready(self) -> None:
        """Every replica holds the shelf's version."""
        for worker in self.workers:
            await worker.run(assignment(self.shelf.version, group_id=999, size=1))

    async def begun(self, num_tokens: int = 10) -> asyncio.Task[Done]:
        """A group on the first replica that has sampled so many tokens."""
        engine, worker = self.engines[0], self.workers[0]
        before = engine.stats().num_tokens
        task = asyncio.create_task(worker.run(assignment(self.shelf.version)))
        await until(lambda: engine.stats().num_tokens >= before + num_tokens)
        return task


def unmoved(workflow: Workflow | None = None) -> tuple[Episode, ...]:
    team = Team("a", workflow)
    if isinstance(workflow, Tools):
        workflow.answer.set()
    return played(team.workers, lambda: team.workers[0].run(assignment()))[1]


def num_taken(engine: ScriptedEngine) -> int:
    """Requests it has, begun or not."""
    return engine.stats().num_running + engine.stats().num_waiting


def held(version: int, replica: str = "a") -> Acknowledged:
    return Acknowledged(replica, version, hash_of(version))


def test_a_moved_group_has_the_tokens_of_an_unmoved_one():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        sampled = team.engines[1].stats().num_tokens
        group = await team.begun()
        assert await a.generator.give_away("a", b.generator) == (3,)
        num_left = 2 * NUM_TOKENS - team.engines[0].stats().num_tokens + NUM_TOKENS
        done, payload = await group
        assert payload == unmoved_payload
        assert done[0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        assert [(w.replica, w.hash) for w in done[0].weights] == [("a", hash_of(0))]
        assert team.engines[1].stats().num_tokens - sampled == num_left, "nothing is sampled twice"

    unmoved_payload = unmoved()
    played(team.workers, scenario)


def test_a_group_moves_between_local_engines_with_the_same_tokens():
    def engine(name: str) -> LocalEngine:
        model = tiny_sorter()
        spec = EngineSpec(model_path="", slots=4, max_context=64)
        return LocalEngine(model, spec, stop_token_ids=frozenset({1}), name=name)

    def payload_of(move: bool) -> tuple[Episode, ...]:
        engines = [engine("a"), engine("b")]
        tools = Tools()
        a, b = (
            replica_of(None, each, name=name, num_tokens=NUM_TOKENS, workflow=tools)
            for name, each in zip("ab", engines, strict=True)
        )

        async def scenario() -> tuple[Episode, ...]:
            tools.answer.set()
            for worker in (a, b):  # what they were built with counts as published
                worker.generator._acknowledged[0] = Acknowledged(worker.name, 0, "same")
            task = asyncio.create_task(a.run(assignment(size=4)))
            await until(lambda: engines[0].stats().num_tokens >= 12)
            if move:
                assert await a.generator.give_away("a", b.generator) == (3,)
                assert engines[1].stats().num_tokens < 8 * NUM_TOKENS
            return (await task)[1]

        return played([a, b], scenario)

    assert payload_of(move=True) == payload_of(move=False)


def test_a_source_takes_new_weights_while_its_moved_group_continues():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        old = await team.begun()
        team.shelf.put(1)
        new = asyncio.create_task(a.run(assignment(1, group_id=4)))
        await until(lambda: 1 in team.shelf.pulls)
        assert a.generator.load().version == 0, "running groups hold the change back"
        await team.engines[1].pause()  # so that the moved group does not end
        assert await a.generator.give_away("a", b.generator) == (3,)
        assert (await new)[0][0].versions == (VersionSpan(1, 2 * NUM_TOKENS),)
        assert not old.done()
        assert b.generator.load().version == 0
        await team.engines[1].resume()
        assert (await old)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)

    played(team.workers, scenario)


def test_a_host_keeps_its_weights_until_guests_are_done():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        old = await team.begun()
        await team.engines[1].pause()
        await a.generator.give_away("a", b.generator)
        team.shelf.put(1)
        new = asyncio.create_task(b.run(assignment(1, group_id=4)))
        await until(lambda: 1 in team.shelf.pulls)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (b.generator.load().version, b.generator.load().is_loading) == (0, False)
        await team.engines[1].resume()
        assert (await old)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        assert (await new)[0][0].versions == (VersionSpan(1, 2 * NUM_TOKENS),)

    played(team.workers, scenario)


def test_a_group_waiting_on_a_tool_moves_and_continues_there():
    tools = Tools()
    team = Team("ab", tools)
    a, b = team.workers

    async def scenario() -> tuple[Episode, ...]:
        tools.answer.set()
        await team.ready()
        tools.answer.clear()
        tools.num_waiting = 0
        group = await team.begun()
        await until(lambda: tools.num_waiting == 2)
        assert a.generator.load().num_present == 1, "it has work, though its engine has none"
        sampled = [engine.stats().num_tokens for engine in team.engines]
        assert await a.generator.give_away("a", b.generator) == (3,)
        assert (a.generator.load().num_present, b.generator.load().num_present) == (0, 1)
        team.shelf.put(1)
        await a.run(assignment(1, group_id=4, size=0))  # the source changes its weights meanwhile
        assert a.generator.load().version == 1
        tools.answer.set()
        done, payload = await group
        assert done[0].versions == (VersionSpan(0, 4 * NUM_TOKENS),)
        assert [engine.stats().num_tokens for engine in team.engines] == [sampled[0], sampled[1] + 2 * NUM_TOKENS]
        assert b.generator.load().num_present == 0
        return payload

    assert played(team.workers, scenario) == unmoved(Tools())


@pytest.mark.parametrize(
    "why", ["another version", "other bytes", "nothing held", "weights change in flight", "an owner that is gone"]
)
def test_a_replica_refuses_guests_it_cannot_serve_and_they_stay(why: str):
    team = Team("ab")
    a, b = team.workers
    if why == "weights change in flight":
        b = replica_of(team.shelf, team.engines[1], name="b", when="inflight", num_tokens=NUM_TOKENS)

    async def scenario() -> None:
        if why == "nothing held":
            await a.run(assignment())
        else:
            await team.ready()
            await b.run(assignment())
        if why == "another version":
            team.shelf.put(1)
            await b.run(assignment(1))
            team.shelf.version = 0
        if why == "other bytes":
            b.generator._acknowledged[0] = Acknowledged("b", 0, "others")
        if why == "an owner that is gone":
            await b.generator.forget("a")
        group = await team.begun()
        assert await a.generator.give_away("a", b.generator) == ()
        assert b.generator.load().num_present == 0
        assert (await group)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)

    played(team.workers, scenario)


def test_a_replica_that_is_taking_in_weights_refuses_guests():
    team = Team("ab")
    a, b = team.workers
    loading, go_on = asyncio.Event(), asyncio.Event()
    load = team.engines[1].load

    async def slow(version: int, weights: Mapping[str, Tensor]) -> None:
        loading.set()
        await go_on.wait()
        await load(version, weights)

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        team.engines[1].load = slow
        team.shelf.put(1)
        change = asyncio.create_task(b.run(assignment(1, group_id=4)))
        await loading.wait()
        assert b.generator.load().is_loading
        assert await a.generator.give_away("a", b.generator) == ()
        go_on.set()
        await asyncio.gather(group, change)
        assert not b.generator.load().is_loading

    played(team.workers, scenario)


class Slow(Generator):
    """A replica that thinks about a question until the test lets it."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.name, self.worker = worker.name, worker
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def host(self, tickets: Sequence[Ticket], held: Acknowledged) -> bool:
        self.asked.set()
        await self.may_answer.wait()
        return await self.worker.generator.host(tickets, held)

    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        return await self.worker.generator.serve(ticket, request)

    async def evict(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        await self.worker.generator.evict(ticket, keep_cache=keep_cache)


def test_a_group_that_ends_during_its_move_leaves_the_host():
    team = Team("ab")
    a, b = team.workers
    slow = Slow(b)

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        moving = asyncio.create_task(a.generator.give_away("a", slow))
        await slow.asked.wait()
        await group
        team.shelf.put(1)
        await a.run(assignment(1, group_id=4))  # nor does the source wait for the answer
        slow.may_answer.set()
        assert await moving == ()
        assert b.generator.load().num_present == 0

    played(team.workers, scenario)


def test_a_group_that_begins_while_the_host_thinks_stays():
    team = Team("ab")
    a, b = team.workers
    slow = Slow(b)

    async def scenario() -> None:
        await team.ready()
        old = await team.begun()
        moving = asyncio.create_task(a.generator.give_away("a", slow))
        await slow.asked.wait()
        new = asyncio.create_task(a.run(assignment(group_id=4)))
        await asyncio.sleep(0)
        slow.may_answer.set()
        assert await moving == (3,)
        assert (a.generator.load().num_present, b.generator.load().num_present) == (2, 2)
        await asyncio.gather(old, new)

    played(team.workers, scenario)


def test_a_host_whose_answer_is_lost_keeps_nobody():
    team = Team("ab")
    a, b = team.workers

    class Mute(Slow):
        async def host(self, tickets: Sequence[Ticket], held: Acknowledged) -> bool:
            await b.generator.host(tickets, held)
            raise DeadlineExceeded("b", "taking guests", "no answer")

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        with pytest.raises(DeadlineExceeded):
            await a.generator.give_away("a", Mute(b))
        assert (a.generator.load().num_present, b.generator.load().num_present) == (2, 0)
        await group

    played(team.workers, scenario)


def test_a_request_that_ends_while_it_is_aborted_is_whole():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        engine = team.engines[0]
        group = await team.begun()
        abort = engine.abort
        late = []
        engine.abort = lambda request_id, **_: late.append(request_id)
        moving = asyncio.create_task(a.generator.give_away("a", b.generator))
        await until(lambda: engine.stats().num_running == 0)  # both requests ended by themselves
        for request_id in late:
            abort(request_id)
        assert await moving == (3,)
        done, payload = await group
        assert (done[0].num_trained, payload) == (2 * NUM_TOKENS, unmoved_payload)

    unmoved_payload = unmoved()
    played(team.workers, scenario)


def test_guests_of_a_dead_replica_are_released_and_refused_later():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        await team.engines[1].pause()
        await a.generator.give_away("a", b.generator)
        group.cancel()
        await b.generator.forget("a")
        assert b.generator.load().num_present == 0
        await team.engines[1].resume()
        team.shelf.put(1)
        await b.run(assignment(1, group_id=4))
        assert not await b.generator.host([Ticket("a", 5, 9)], held(1))

    played(team.workers, scenario)


def test_a_dead_host_is_named_to_the_waiting_group():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        await team.engines[1].pause()
        await a.generator.give_away("a", b.generator)
        await until(lambda: num_taken(team.engines[1]) == 2)
        await b.close()
        with pytest.raises(WorkerDied) as raised:
            await group
        assert raised.value.worker == "b"
        assert a.generator.load().num_present == 0
        await a.run(assignment(group_id=4))

    played(team.workers, scenario)


class Forgiving(Tools):
    """Takes whatever its second turn raises for a failure of the policy."""

    async def run(self, session: Session) -> None:
        try:
            await super().run(session)
        except Exception:  # noqa: BLE001  (that is what is tested)
            session.reward(0.0)
            if session.episode_index == 1:
                raise ValueError("no second turn") from None


@pytest.mark.parametrize("size", [1, 2])
def test_a_dead_host_fails_the_group_despite_the_workflow(size: int):
    tools = Forgiving()
    team = Team("ab", tools)
    a, b = team.workers

    async def scenario() -> None:
        tools.answer.set()
        await team.ready()
        tools.answer.clear()
        tools.num_waiting = 0
        group = asyncio.create_task(a.run(assignment(size=size)))
        await until(lambda: tools.num_waiting == size)
        assert await a.generator.give_away("a", b.generator) == (3,)
        await b.close()
        tools.answer.set()
        with pytest.raises(WorkerDied) as raised:
            await group
        assert raised.value.worker == "b"

    played(team.workers, scenario)


def test_guests_move_on_only_through_their_owner():
    team = Team("abc")
    a, b, c = team.workers

    async def scenario() -> tuple[Episode, ...]:
        await team.ready()
        group = await team.begun()
        before = team.engines[1].stats().num_tokens
        await a.generator.give_away("a", b.generator)
        await until(lambda: team.engines[1].stats().num_tokens >= before + 10)
        assert await b.generator.give_away("b", c.generator) == (), "it has no groups of its own"
        assert await a.generator.give_away("b", c.generator) == (3,)
        assert [w.generator.load().num_present for w in team.workers] == [0, 0, 2]
        done, payload = await group
        assert done[0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        return payload

    assert played(team.workers, scenario) == unmoved()


def test_guests_move_on_though_their_owner_has_newer_weights():
    team = Team("abc")
    a, b, c = team.workers

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        await team.engines[1].pause()
        await a.generator.give_away("a", b.generator)
        team.shelf.put(1)
        await a.run(assignment(1, group_id=4))
        assert await a.generator.give_away("b", c.generator) == (3,)
        assert (await group)[0][0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)

    played(team.workers, scenario)


class Fails(Workflow):
    """The second session raises once its first turn is over; the first goes on."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        if session.episode_index == 1:
            raise ConfigError("no")
        await agent.chat("1>")


def test_a_failed_guest_leaves_its_host():
    team = Team("ab", Fails())
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        await a.generator.give_away("a", b.generator)
        with pytest.raises(ConfigError):
            await group
        assert b.generator.load().num_present == 0

    played(team.workers, scenario)


def test_a_host_that_drops_a_guest_counts_as_dead():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        group = await team.begun()
        await a.generator.give_away("a", b.generator)
        await until(lambda: num_taken(team.engines[1]) == 2)
        await b.generator.forget("a")
        with pytest.raises(WorkerDied, match="b while sampling for group 3: it let the group go"):
            await group

    played(team.workers, scenario)


def test_what_nobody_plays_cannot_be_given_away():
    team = Team("ab")
    a, b = team.workers

    async def scenario() -> None:
        await team.ready()
        assert await a.generator.give_away("a", b.generator) == ()

    played(team.workers, scenario)


def test_a_replica_tells_its_version_and_what_it_does():
    team = Team("a")
    (a,) = team.workers
    assert isinstance(team.engines[0], ScriptedEngine)

    async def scenario() -> None:
        assert (a.generator.load().replica, a.generator.load().version) == ("a", -1)
        await team.ready()
        group = await team.begun()
        assert (a.generator.load().version, a.generator.load().num_present, a.generator.load().is_loading) == (
            0,
            2,
            False,
        )
        await group
        assert a.generator.load().num_present == 0

    played(team.workers, scenario)
