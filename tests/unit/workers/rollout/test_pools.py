"""Pool with dying members: work continues elsewhere at once, and irreplaceable members are reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from rlsys.errors import DeadlineExceeded, ModelError, RlsysError, RunAborted, WorkerDied, WorkerError
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import Assignment, Busy, EngineStats, Group, GroupKey, ReplicaLoad, RolloutReport, Task
from tests.groups import group as group_of
from tests.groups import rolled_out
from workers.ray.call_stream import CallStream, PayloadRef
from workers.ray.fault_tolerant_pool import PoolMember, PoolSpec
from workers.ray.worker_process import Raylet, Remote
from workers.rollout.rollout_pool import ANSWER_S, QUESTION_S, STUCK_S, RolloutPool, SessionPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_worker import SessionWorker


@dataclass
class Call:
    """What `actor.method.remote(...)` gives: something to await."""

    answer: object

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.answer, asyncio.Event):
            yield from self.answer.wait().__await__()
        if isinstance(self.answer, asyncio.Future):
            return (yield from self.answer.__await__())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Method:
    """A method of a worker, which answers what the test says and keeps what it was asked."""

    answer: object = None
    asked: list[tuple] = field(default_factory=list)

    def remote(self, *arguments: object) -> Call:
        self.asked.append(arguments)
        return Call(self.answer)


class Process:
    """Has the methods of a worker's process that are not streams."""

    @property
    def call(self) -> Process:
        return self

    def remote(self, path: str, *arguments: object, **_: object) -> Call:
        vars(self).setdefault("paths", []).append(path)
        return getattr(self, path.rpartition(".")[2]).remote(*arguments)


@dataclass
class Actor(Process):
    """Has a rollout worker, or a session worker."""

    name: str
    load: Method = field(default_factory=Method)
    drain: Method = field(default_factory=Method)
    move: Method = field(default_factory=lambda: Method(0))
    forget: Method = field(default_factory=Method)
    meet: Method = field(default_factory=Method)
    ping: Method = field(default_factory=Method)
    watch: Method = field(default_factory=lambda: Method(asyncio.Event()))
    where: Method = field(default_factory=lambda: Method("game.py:12 in step"))
    stats: Method = field(default_factory=lambda: Method(EngineStats(0, 0, 0.0, 0)))
    beat: Method = field(default_factory=Method)
    dump_stacks: Method = field(default_factory=Method)


class Answering:
    """What the members of a pool answer to groups: nothing, until the test says how a group ends."""

    def __init__(self) -> None:
        self.set_ups: Mapping[str, Exception | asyncio.Event] = {}
        self.set_up_ends: Mapping[str, Exception] = {}
        """What those that wait for an event end with."""
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.asked: list[tuple[str, int]] = []
        self.killed: list[str] = []
        self.cut_off: set[str] = set()
        self.started: list[str] = []

    async def answered(self, member: PoolMember, assignment: Assignment) -> tuple[object, PayloadRef]:
        self.asked.append((member.name, assignment.group_id))
        end = self.ends.setdefault(member.name, asyncio.get_running_loop().create_future())
        await asyncio.shield(end)
        stats = EngineStats(0, 0, 0.0, 0)
        report = RolloutReport(Busy(member.name, 0, 1), stats)
        return (rolled_out(group_of(assignment.group_id), report),), PayloadRef(ray.ObjectRef.nil(), 0)

    def end(self, name: str, error: Exception | None = None) -> None:
        future = self.ends.pop(name)
        if error:
            future.set_exception(error)
        else:
            future.set_result(None)


@dataclass(frozen=True, eq=False, kw_only=True)
class FakeWorker(Remote[Any]):
    """A process that is set up as the test says."""

    of: Answering

    async def setup(self, *args: object, **watch: Any) -> None:
        match self.of.set_ups.get(self.name):
            case Exception() as error:
                raise error
            case asyncio.Event() as done:
                await done.wait()
                if isinstance(error := self.of.set_up_ends.get(self.name), Exception):
                    raise error

    async def raylet(self) -> Raylet:
        return "", 0

    async def is_cut_off(self, raylet: Raylet) -> bool:
        return self.name in self.of.cut_off

    def kill(self, *, restart: bool = False) -> None:
        self.of.killed.append(self.name)


class Players(SessionPool, Answering):
    """Session workers whose groups end when the test says so."""

    def __init__(self, size: int = 2, blocked_s: float = 60.0) -> None:
        Answering.__init__(self)
        SessionPool.__init__(self, "session", PoolSpec(size, self._start, 1e9, 6.0, 2), blocked_s)
        self.failures: list[WorkerError] = []
        self.recovered: list[str] = []
        self.on_failure = self.failures.append
        self.on_recovery = lambda name, seconds: self.recovered.append(name)

    def _start(self, name: str) -> Remote[SessionWorker]:
        self.started.append(name)
        return FakeWorker(name, SessionWorker, Actor(name), ANSWER_S, of=self)

    async def _send_call(self, member: PoolMember, request: Any, phase: str) -> tuple[object, PayloadRef]:
        return await self.answered(member, request)


class Scripted(RolloutPool, Answering):
    """A pool whose members set up as the test says, and play groups until the test says how that ends."""

    def __init__(self, size: int = 2, sessions: SessionPool | None = None) -> None:
        Answering.__init__(self)
        self.failures: list[WorkerError] = []
        self.recovered: list[str] = []
        supply = PoolSpec(size, self._start, deadline_s=10.0, silence_s=6.0, max_attempts=2)
        RolloutPool.__init__(self, supply, sessions=sessions)
        self.on_failure = self.failures.append
        self.on_recovery = lambda name, seconds: self.recovered.append(name)

    def _start(self, name: str) -> Remote[RolloutWorker]:
        self.started.append(name)
        return FakeWorker(name, RolloutWorker, Actor(name), ANSWER_S, of=self)

    async def replace_episode(self, worker: str) -> None:
        await self.restart(worker, lambda name, seconds: self.recovered.append(name))

    async def _send_call(self, member: PoolMember, request: Any, phase: str) -> tuple[object, PayloadRef]:
        return await self.answered(member, request)


def actor_of(pool: RolloutPool | SessionPool, index: int) -> Actor:
    return pool.members[index].worker.actor


def met(actor: Actor) -> list[tuple[list[str], list[str]]]:
    """Replicas that a session worker was told of, and those that are stuck, in order."""
    return [([each.name for each in replicas], stuck) for replicas, stuck, _ in actor.meet.asked]


def assignment(group_id: int = 0) -> Assignment:
    return Assignment(GroupKey(group_id, 1), Task(id=str(group_id), prompt=f"{group_id}>"), 2, 0, 0)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def died(worker: str) -> WorkerDied:
    return WorkerDied(worker, "rolling out", "the process is gone")


def test_a_retry_runs_elsewhere_while_the_dead_replica_is_replaced():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        pool.end("rollout-0", died("rollout-0"))
        with pytest.raises(WorkerDied):
            await group
        setting_up = asyncio.Event()
        pool.set_ups = {"rollout-0.1": setting_up}
        await pool.replace_episode("rollout-0")
        assert pool.recovered == []
        again = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.asked == [("rollout-0", 0), ("rollout-1", 0)]
        assert pool.placements() == {0: "rollout-1"}
        pool.end("rollout-1")
        await again
        setting_up.set()
        await settle()
        assert (pool.recovered, pool.killed) == (["rollout-0"], ["rollout-0"])
        asyncio.create_task(pool.run(assignment(1)))  # noqa: RUF006
        await settle()
        assert pool.asked[-1] == ("rollout-0.1", 1), "it is in the pool again"

    asyncio.run(scenario())


def test_with_nobody_alive_work_waits_for_the_first_successor():
    async def scenario() -> None:
        pool = Scripted(1)
        await pool.ready()
        setting_up = asyncio.Event()
        pool.set_ups = {"rollout-0.1": setting_up}
        restarts = [asyncio.create_task(pool.replace_episode("rollout-0")) for _ in range(3)]
        fresh = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert (pool.asked, [r.done() for r in restarts]) == ([], [False] * 3)
        setting_up.set()
        await asyncio.gather(*restarts)
        await settle()
        assert pool.asked == [("rollout-0.1", 0)]
        assert pool.recovered == ["rollout-0"], "told once, however many ask"
        pool.end("rollout-0.1")
        await fresh

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [died("rollout-0.1"), ModelError("no such model")])
def test_a_failed_successor_is_reported_and_replaced(error: RlsysError):
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        pool.set_ups = {"rollout-0.1": error}
        await pool.replace_episode("rollout-0")
        await settle()
        assert [failure.worker for failure in pool.failures] == ["rollout-0.1"]
        assert str(error) in str(pool.failures[0])
        assert pool.recovered == ["rollout-0"]
        assert [member.name for member in pool.members] == ["rollout-0.2", "rollout-1"]

    asyncio.run(scenario())


def test_a_lost_place_is_tried_again_with_pauses_until_it_returns():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        pool.set_ups = {f"rollout-0.{n}": ModelError("no node has a GPU") for n in range(1, 12)}
        await pool.replace_episode("rollout-0")
        await asyncio.sleep(1 + 2 + 4 + 8 + 16 + 32 + 3.5 * 60)
        assert pool.recovered == []
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.asked == [("rollout-1", 0)], "others go on"
        pool.end("rollout-1")
        await group
        await asyncio.sleep(60.0)
        assert [failure.worker for failure in pool.failures] == [f"rollout-0.{n}" for n in range(1, 12)]
        assert pool.recovered == ["rollout-0"]
        assert [member.name for member in pool.members] == ["rollout-0.12", "rollout-1"]

    run_virtual(scenario())


def test_a_replica_gives_way_to_a_scarcer_worker_and_returns():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        pool.give_way("reward-0.1")
        (failure,) = pool.failures
        assert str(failure) == "rollout-1 while yielding its resources: the cluster has no other room for reward-0.1"
        assert (pool.killed, [worker.name for worker in pool.processes]) == (["rollout-1"], ["rollout-0"])
        pool.give_way("reward-0.1")
        assert pool.killed == ["rollout-1"], "the only replica stays"
        await pool.replace_episode("rollout-1")  # the group that failed with it asks for that
        await asyncio.sleep(59.0)
        assert pool.started == ["rollout-0", "rollout-1"]
        await asyncio.sleep(2.0)
        assert pool.started == ["rollout-0", "rollout-1", "rollout-1.1"]
        assert pool.recovered == ["rollout-1"]

    run_virtual(scenario())


def test_a_pool_that_lost_all_places_aborts_the_run():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        pool.set_ups = {f"rollout-{i}.{n}": ModelError("out of disk") for i in range(2) for n in range(1, 9)}
        await pool.replace_episode("rollout-0")
        await settle()
        assert [failure.worker for failure in pool.failures] == ["rollout-0.1", "rollout-0.2"]
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.asked == [("rollout-1", 0)]
        pool.end("rollout-1", died("rollout-1"))
        with pytest.raises(WorkerDied):
            await group
        waiting = asyncio.create_task(pool.run(assignment(1)))
        with pytest.raises(
            RunAborted, match=r"no rollout worker is left; the last failure: rollout-1\.2 .* out of disk"
        ):
            await pool.replace_episode("rollout-1")
        with pytest.raises(RunAborted):
            await waiting

    asyncio.run(scenario())


def test_a_worker_of_no_pool_cannot_be_replaced():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        with pytest.raises(RunAborted, match="actor-0 failed, and cannot be replaced in a run"):
            await pool.replace_episode("actor-0")
        await pool.replace_episode("rollout-999")

    asyncio.run(scenario())


def test_a_worker_named_in_an_error_gets_no_groups_and_its_source_goes_on():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        pool.end("rollout-0", died("rollout-1"))  # a request was there
        with pytest.raises(WorkerDied):
            await group
        for group_id in range(1, 3):
            asyncio.create_task(pool.run(assignment(group_id)))  # noqa: RUF006
            await settle()
        assert [name for name, _ in pool.asked] == ["rollout-0"] * 3

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------------ introductions


def test_session_workers_meet_every_replica_that_comes_or_goes():
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(1))
        await pool.ready()
        await settle()
        player = actor_of(sessions, 0)
        assert met(player)[-1] == (["rollout-0", "rollout-1"], [])
        setting_up = asyncio.Event()
        pool.set_ups = {"rollout-0.1": setting_up}
        await pool.replace_episode("rollout-0")
        await settle()
        assert met(player)[-1] == (["rollout-1"], [])
        setting_up.set()
        await settle()
        assert met(player)[-1] == (["rollout-0.1", "rollout-1"], [])

    asyncio.run(scenario())


def test_replicas_that_play_groups_meet_each_other():
    async def scenario() -> None:
        pool = Scripted(2)
        await pool.ready()
        await settle()
        assert met(actor_of(pool, 0))[-1] == met(actor_of(pool, 1))[-1] == (["rollout-0", "rollout-1"], [])
        await pool.replace_episode("rollout-0")
        await settle()
        assert met(actor_of(pool, 0))[-1] == met(actor_of(pool, 1))[-1] == (["rollout-0.1", "rollout-1"], [])
        assert actor_of(pool, 1).forget.asked == [("rollout-0",)]

    asyncio.run(scenario())


def test_a_session_worker_that_dies_is_replaced_and_forgotten():
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(2))
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.placements() == {0: "session-0"}
        actor_of(pool, 1).forget.answer = died("rollout-1")
        sessions.end("session-0", died("session-0"))
        with pytest.raises(WorkerDied):
            await group
        await pool.replace_episode("session-0")
        await settle()
        assert pool.recovered == ["session-0"]
        assert actor_of(pool, 0).forget.asked == actor_of(pool, 1).forget.asked == [("session-0",)]
        assert met(actor_of(sessions, 0)) == [(["rollout-0", "rollout-1"], [])], "the successor knows all replicas"
        assert (pool.killed, sessions.killed, pool.placements()) == ([], ["session-0"], {})
        groups = [asyncio.create_task(pool.run(assignment(group_id))) for group_id in range(1, 3)]
        await settle()
        assert [name for name, _ in sessions.asked] == ["session-0", "session-0.1", "session-1"]
        for name in ("session-0.1", "session-1"):
            sessions.end(name)
        await asyncio.gather(*groups)

    asyncio.run(scenario())


def test_a_replica_that_fails_ends_no_group_of_the_session_workers():
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(1))
        failing = actor_of(pool, 0).watch.answer = asyncio.get_running_loop().create_future()
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        failing.set_exception(died("rollout-0"))
        await settle()
        assert pool.recovered == ["rollout-0"]
        assert [str(failure) for failure in pool.failures] == [str(died("rollout-0"))]
        sessions.end("session-0")
        await group

    asyncio.run(scenario())


def test_without_replicas_the_groups_of_session_workers_end_the_run():
    async def scenario() -> None:
        pool = Scripted(1, sessions := Players(1))
        await pool.ready()
        pool.set_ups = {f"rollout-0.{n}": ModelError("out of disk") for n in range(1, 9)}
        waiting = asyncio.get_running_loop().create_future()
        sessions.members[0].calls._waiting.add(waiting)
        with pytest.raises(RunAborted, match="no rollout worker is left"):
            await pool.replace_episode("rollout-0")
        assert isinstance(waiting.exception(), RunAborted)

    asyncio.run(scenario())


def test_groups_go_to_the_session_worker_with_the_fewest():
    async def scenario() -> None:
        pool = Scripted(1, sessions := Players(3))
        await pool.ready()
        groups = [asyncio.create_task(pool.run(assignment(group_id))) for group_id in range(7)]
        await settle()
        assert sorted(Counter(name for name, _ in sessions.asked).values()) == [2, 2, 3]
        for name in ("session-0", "session-1", "session-2"):
            sessions.end(name)
        await asyncio.gather(*groups)

    asyncio.run(scenario())


def test_user_code_that_blocks_a_session_worker_is_named_then_ended():
    async def scenario() -> None:
        pool = Scripted(1, sessions := Players(1, blocked_s=60.0))
        await pool.ready()
        actor_of(sessions, 0).ping.answer = asyncio.Event()
        await asyncio.sleep(STUCK_S + 2 * QUESTION_S + 2.0)
        (failure,) = sessions.failures
        assert "has blocked its event loop for" in str(failure) and "game.py:12 in step: await the work" in str(failure)
        assert sessions.killed == []
        await asyncio.sleep(70.0)
        assert len(sessions.failures) == 2
        assert (sessions.killed, sessions.recovered) == (["session-0"], ["session-0"])

    run_virtual(scenario())


def test_a_session_worker_that_answers_again_keeps_its_place():
    async def scenario() -> None:
        pool = Scripted(1, sessions := Players(1, blocked_s=60.0))
        await pool.ready()
        actor_of(sessions, 0).ping.answer = asyncio.Event()
        await asyncio.sleep(30.0)
        actor_of(sessions, 0).ping.answer = None
        await asyncio.sleep(100.0)
        assert (len(sessions.failures), sessions.killed) == (1, [])

    run_virtual(scenario())


# ------------------------------------------------------------------------------------------------------------ draining


@pytest.mark.parametrize("size", [0, 2])
def test_a_drain_moves_the_groups_of_every_session_worker(size: int):
    async def scenario() -> None:
        sessions = Players(size) if size else None
        pool = Scripted(3, sessions)
        await pool.ready()
        players = [member.worker.actor for member in (sessions or pool).members]
        for player, answer in zip(players, (2, 1, died("rollout-2")), strict=False):
            player.move.answer = answer
        assert await pool.drain("rollout-0", "rollout-2") == 3
        assert {player.move.asked[0] for player in players} == {("policy", "rollout-0", "rollout-2")}
        assert actor_of(pool, 0).drain.asked == [("policy",)]
        assert actor_of(pool, 1).drain.asked == []

    asyncio.run(scenario())


def test_a_drain_of_one_of_several_policies_moves_that_alone():
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(1))
        await pool.ready()
        actor_of(sessions, 0).move.answer = 1
        assert await pool.drain("rollout-0", "rollout-1", "second") == 1
        assert actor_of(sessions, 0).move.asked == [("second", "rollout-0", "rollout-1")]
        assert actor_of(pool, 0).drain.asked == [("second",)]

    asyncio.run(scenario())


def test_a_drain_that_moves_nothing_aborts_nothing():
    async def scenario() -> None:
        pool = Scripted(2, Players(1))
        await pool.ready()
        assert await pool.drain("rollout-0", "rollout-1") == 0
        assert actor_of(pool, 0).drain.asked == []

    asyncio.run(scenario())


def test_drains_without_a_live_source_or_target_do_nothing():
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(1))
        await pool.ready()
        actor_of(sessions, 0).move.answer = 1
        pool._leave("rollout-1")
        places = [("rollout-0", "rollout-1"), ("rollout-1", "rollout-0"), ("rollout-9", "rollout-0")]
        for source, to in [*places, ("rollout-0", "rollout-0")]:
            assert await pool.drain(source, to) == 0
        assert actor_of(sessions, 0).move.asked == []

    asyncio.run(scenario())


def test_a_source_that_is_gone_counts_as_drained():
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(1))
        await pool.ready()
        actor_of(sessions, 0).move.answer = 1
        actor_of(pool, 0).drain.answer = died("rollout-0")
        assert await pool.drain("rollout-0", "rollout-1") == 1

    asyncio.run(scenario())


# --------------------------------------------------------------------------------------------------------------- loads


def test_loads_are_those_of_the_replicas_that_answer():
    async def scenario() -> None:
        pool = Scripted(3)
        await pool.ready()
        load = ReplicaLoad("rollout-0", 3, EngineStats(1, 0, 0.1, 0))
        pool.members[0].worker.actor.load.answer = load
        pool.members[1].worker.actor.load.answer = died("rollout-1")
        pool._leave("rollout-2")
        assert await pool.loads() == [load]
        assert pool.members[0].worker.actor.load.asked == [("policy",)]
        await settle()
        assert (pool.killed, pool.failures) == ([], []), "to ask changes nothing"

    asyncio.run(scenario())


def test_one_replica_that_cannot_tell_its_load_hides_no_other():
    async def scenario() -> None:
        pool = Scripted(2)
        await pool.ready()
        load = ReplicaLoad("rollout-1", 3, EngineStats(1, 0, 0.1, 0))
        pool.members[0].worker.actor.load.answer = WorkerError("rollout-0", "telling its load", "KeyError")
        pool.members[1].worker.actor.load.answer = load
        assert await pool.loads() == [load]

    asyncio.run(scenario())


def test_a_replica_that_dies_during_setup_has_one_successor():
    async def scenario() -> None:
        pool = Scripted(1)
        await pool.ready()
        setting_up = asyncio.Event()
        pool.set_ups, pool.set_up_ends = {"rollout-0.1": setting_up}, {"rollout-0.1": died("rollout-0.1")}
        restarts = [asyncio.create_task(pool.replace_episode(name)) for name in ("rollout-0", "rollout-0.1")]
        await settle()
        assert pool.started == ["rollout-0", "rollout-0.1"], "it is being replaced already"
        setting_up.set()
        await asyncio.gather(*restarts)
        assert pool.started == ["rollout-0", "rollout-0.1", "rollout-0.2"]
        assert pool.killed == ["rollout-0", "rollout-0.1"]
        await pool.replace_episode("rollout-0.2")
        await settle()
        assert [member.name for member in pool.members] == ["rollout-0.3"]

    asyncio.run(scenario())


# --------------------------------------------------------------------------------------------------------- heartbeats


def test_a_frozen_replica_loses_its_groups_and_place_within_seconds():
    async def scenario() -> None:
        pool = Leased(2)
        group = await pool.sent()
        pool.members[0].worker.actor.beat.answer = pool.members[0].worker.actor.dump_stacks.answer = asyncio.Event()
        frozen_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match=r"rollout-0 while answering a heartbeat: none within 6 s"):
            await group
        assert asyncio.get_running_loop().time() - frozen_s <= 8.0
        await asyncio.sleep(2.0)
        assert [member.name for member in pool.members] == ["rollout-0.1", "rollout-1"]
        assert (pool.killed, pool.recovered) == (["rollout-0"], ["rollout-0"])
        assert pool.failures == [], "the group reports it"

    run_virtual(scenario())


@pytest.mark.parametrize("answer", [died("rollout-0"), asyncio.Event()])
def test_an_idle_lost_replica_is_reported_and_replaced(answer: object):
    async def scenario() -> None:
        pool = Scripted(1)
        await pool.ready()
        pool.members[0].worker.actor.beat.answer = answer
        await asyncio.sleep(10.0)
        assert ([failure.worker for failure in pool.failures], pool.recovered) == (["rollout-0"], ["rollout-0"])
        assert pool.started == ["rollout-0", "rollout-0.1"]

    run_virtual(scenario())


@pytest.mark.parametrize("answer", [EngineStats(1, 0, 0.1, 0, step_age_s=7.0), asyncio.Event()])
def test_a_stuck_replica_is_named_to_session_workers_until_it_goes_on(answer: object):
    async def scenario() -> None:
        pool = Scripted(2, sessions := Players(1))
        await pool.ready()
        stats = actor_of(pool, 0).stats
        went_on, stats.answer = stats.answer, answer
        await asyncio.sleep(5.0)
        assert met(actor_of(sessions, 0))[-1] == (["rollout-0", "rollout-1"], ["rollout-0"])
        stats.answer = went_on
        await asyncio.sleep(5.0)
        assert met(actor_of(sessions, 0))[-1] == (["rollout-0", "rollout-1"], [])
        assert pool.failures == [], "it keeps its place"

    run_virtual(scenario())


def test_a_hung_replica_writes_its_stacks_before_it_is_killed():
    async def scenario() -> None:
        pool = Scripted(2)
        await pool.ready()
        hung = pool.members[0].worker.actor.dump_stacks
        hung.answer = asyncio.Event()
        await pool.replace_episode("rollout-0")
        await settle()
        assert (len(hung.asked), pool.killed) == (1, [])
        hung.answer.set()
        await settle()
        assert pool.killed == ["rollout-0"]

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------------- deadlines


class Silent:
    """A stream without an answer."""

    def _get_next_ref_n(self, n: int) -> list[Call]:
        return [Call(asyncio.Event())] * n


class Leased(Scripted):
    """The first member never answers a group."""

    _send_call = RolloutPool._send_call

    async def sent(self) -> asyncio.Task[tuple[Group, ...]]:
        """A group on the first member."""
        await self.ready()
        self.members[0].calls = CallStream("rollout-0", "rolling out", lambda requests: Silent())
        group = asyncio.create_task(self.run(assignment()))
        await settle()
        return group


def test_work_past_its_deadline_raises_and_marks_the_worker_dead():
    async def scenario() -> None:
        pool = Leased(1)
        start_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="no answer within 10 s"):
            await (await pool.sent())
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(10.0)
        assert not pool.members[0].is_live

    run_virtual(scenario())


def silent_until(pool: Scripted, index: int) -> asyncio.Event:
    """Let a replica answer no heartbeat until the event is set."""
    answer = asyncio.Event()
    actor_of(pool, index).beat.answer = answer
    return answer


def test_a_replica_behind_a_cut_link_keeps_its_place_while_others_do_its_work():
    async def scenario() -> None:
        pool = Scripted(size=2)
        await pool.ready()
        pool.cut_off.add("rollout-0")
        link = silent_until(pool, 0)
        await asyncio.sleep(20)
        assert [error.detail.partition(":")[0] for error in pool.failures] == ["its node is cut off"]
        await pool.replace_episode("rollout-0")
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(2)]
        await settle()
        assert pool.asked == [("rollout-1", 0), ("rollout-1", 1)]
        link.set()
        pool.cut_off.clear()
        await asyncio.sleep(10)
        assert (pool.started, pool.killed, pool.recovered) == (["rollout-0", "rollout-1"], [], ["rollout-0"])
        groups.append(asyncio.create_task(pool.run(assignment(2))))
        await settle()
        assert pool.asked[-1] == ("rollout-0", 2)
        for group in groups:
            group.cancel()
        await settle()

    run_virtual(scenario())


def test_a_session_worker_behind_a_cut_learns_afterwards_what_has_changed():
    async def scenario() -> None:
        players = Players(size=2)
        pool = Scripted(size=1, sessions=players)
        await pool.ready()
        players.cut_off.add("session-0")
        link = asyncio.Event()
        actor_of(players, 0).beat.answer = link
        await asyncio.sleep(20)
        await pool.replace_episode("rollout-0")
        await asyncio.sleep(1)
        assert met(actor_of(players, 0))[-1][0] == ["rollout-0"]
        link.set()
        players.cut_off.clear()
        await asyncio.sleep(10)
        assert met(actor_of(players, 0))[-1][0] == met(actor_of(players, 1))[-1][0] == ["rollout-0.1"]

    run_virtual(scenario())


def test_every_cut_of_a_replica_is_reported():
    async def scenario() -> None:
        pool = Scripted(size=2)
        await pool.ready()
        for number in range(1, 3):
            group = asyncio.create_task(pool.run(assignment(number)))
            await settle()
            pool.cut_off.add("rollout-0")
            link = silent_until(pool, 0)
            await asyncio.sleep(20)
            assert [error.worker for error in pool.failures] == ["rollout-0"] * number
            assert all(error.is_reported for error in pool.failures)
            link.set()
            pool.cut_off.clear()
            await asyncio.sleep(10)
            group.cancel()
            await settle()

    run_virtual(scenario())


def test_the_only_replica_goes_on_with_its_groups_once_its_link_is_back():
    async def scenario() -> None:
        pool = Scripted(size=1)
        await pool.ready()
        pool.cut_off.add("rollout-0")
        link = silent_until(pool, 0)
        before = asyncio.create_task(pool.run(assignment(0)))
        await asyncio.sleep(20)
        during = asyncio.create_task(pool.run(assignment(1)))
        await settle()
        assert not before.done() and pool.asked == [("rollout-0", 0)]
        link.set()
        pool.cut_off.clear()
        await asyncio.sleep(10)
        assert pool.asked == [("rollout-0", 0), ("rollout-0", 1)]
        pool.end("rollout-0")
        assert [(await group)[0].group_id for group in (before, during)] == [0, 1]
        assert pool.killed == [] and [error.worker for error in pool.failures] == ["rollout-0"]

    run_virtual(scenario())


def test_a_replica_that_is_silent_on_a_node_that_answers_is_replaced():
    async def scenario() -> None:
        pool = Scripted(size=2)
        await pool.ready()
        silent_until(pool, 0)
        await asyncio.sleep(20)
        assert pool.started[2:] == ["rollout-0.1"]

    run_virtual(scenario())
