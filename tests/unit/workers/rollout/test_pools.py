"""Pool with dying members: work continues elsewhere at once, and irreplaceable members are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from rlsys.errors import DeadlineExceeded, ModelError, RlsysError, RunAborted, TaskTooLong, WorkerDied, WorkerError
from rlsys.simulate.virtual_clock import run_virtual
from rlsys.types import (
    POLICY,
    Acknowledged,
    Assignment,
    Busy,
    EngineStats,
    Group,
    GroupKey,
    ReplicaLoad,
    RolloutReport,
    Task,
)
from tests.groups import group as group_of
from tests.groups import report_of, rolled_out
from workers.ray.call_stream import CallStream, PayloadRef
from workers.ray.pool import PoolMember, PoolSpec
from workers.ray.remote_proxy import Remote
from workers.rollout.partial_responses import Partials
from workers.rollout.rollout_pool import ANSWER_S, RolloutPool
from workers.rollout.rollout_worker import RolloutWorker


@dataclass
class Call:
    """What `actor.method.remote(...)` gives: something to await."""

    answer: object

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        if isinstance(self.answer, asyncio.Event):
            yield from self.answer.wait().__await__()
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

    def remote(self, path: str, *arguments: object) -> Call:
        vars(self).setdefault("paths", []).append(path)
        return getattr(self, path.rpartition(".")[2]).remote(*arguments)


@dataclass
class Actor(Process):
    """Hosts a rollout worker."""

    name: str
    held: Method = field(default_factory=lambda: Method({}))
    load: Method = field(default_factory=Method)
    give_away: Method = field(default_factory=lambda: Method(()))
    forget: Method = field(default_factory=Method)
    meet: Method = field(default_factory=Method)
    age_s: Method = field(default_factory=Method)
    stats: Method = field(default_factory=lambda: Method(EngineStats(0, 0, 0.0, 0)))
    beat: Method = field(default_factory=Method)
    dump_stacks: Method = field(default_factory=Method)


class Scripted(RolloutPool):
    """A pool whose members set up as the test says, and work until the test says how that ends."""

    def __init__(self, size: int = 2, **partials: Remote[Partials]) -> None:
        self.set_ups: Mapping[str, Exception | asyncio.Event] = {}
        self.set_up_ends: Mapping[str, Exception] = {}
        """What those that wait for an event end with."""
        self.ends: dict[str, asyncio.Future[None]] = {}
        self.asked: list[tuple[str, int, bool]] = []
        self.killed: list[str] = []
        self.failures: list[WorkerError] = []
        self.started: list[str] = []
        self.recovered: list[str] = []
        supply = PoolSpec(size, self._start, lease_s=10.0, silence_s=6.0, max_attempts=2)
        super().__init__(supply, partials=partials, policies=tuple(partials) or (POLICY,))
        self.on_failure = self.failures.append
        self.on_recovery = lambda name, seconds: self.recovered.append(name)

    def _start(self, name: str) -> Remote[RolloutWorker]:
        self.started.append(name)
        return Scripted.Worker(name, RolloutWorker, Actor(name), ANSWER_S, pool=self)

    async def replaced(self, worker: str) -> None:
        await self.restart(worker, lambda name, seconds: self.recovered.append(name))

    @dataclass(frozen=True, eq=False, kw_only=True)
    class Worker(Remote[RolloutWorker]):
        pool: Scripted

        async def setup(self, *args: object, **watch: Any) -> None:
            match self.pool.set_ups.get(self.name):
                case Exception() as error:
                    raise error
                case asyncio.Event() as done:
                    await done.wait()
                    if isinstance(error := self.pool.set_up_ends.get(self.name), Exception):
                        raise error

        def kill(self, *, restart: bool = False) -> None:
            self.pool.killed.append(self.name)

    async def _sent(self, member: PoolMember, request: object, phase: str) -> tuple[object, PayloadRef]:
        assert isinstance(request, tuple)
        assignment, is_again = request
        self.asked.append((member.name, assignment.group_id, is_again))
        end = self.ends.setdefault(member.name, asyncio.get_running_loop().create_future())
        await asyncio.shield(end)
        stats = EngineStats(0, 0, 0.0, 0)
        return (rolled_out(group_of(assignment.group_id), RolloutReport(Busy(member.name, 0, 1), stats)),), PayloadRef(
            ray.ObjectRef.nil(), 0
        )

    def end(self, name: str, error: Exception | None = None) -> None:
        future = self.ends.pop(name)
        if error:
            future.set_exception(error)
        else:
            future.set_result(None)


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
        await pool.replaced("rollout-0")
        assert pool.recovered == []
        again = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.asked == [("rollout-0", 0, False), ("rollout-1", 0, True)]
        assert pool.placements() == {0: "rollout-1"}
        pool.end("rollout-1")
        await again
        setting_up.set()
        await settle()
        assert (pool.recovered, pool.killed) == (["rollout-0"], ["rollout-0"])
        asyncio.create_task(pool.run(assignment(1)))  # noqa: RUF006
        await settle()
        assert pool.asked[-1] == ("rollout-0.1", 1, False), "it is in the pool again"

    asyncio.run(scenario())


def test_with_nobody_alive_work_waits_for_the_first_successor():
    async def scenario() -> None:
        pool = Scripted(1)
        await pool.ready()
        setting_up = asyncio.Event()
        pool.set_ups = {"rollout-0.1": setting_up}
        restarts = [asyncio.create_task(pool.replaced("rollout-0")) for _ in range(3)]
        fresh = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert (pool.asked, [r.done() for r in restarts]) == ([], [False] * 3)
        setting_up.set()
        await asyncio.gather(*restarts)
        await settle()
        assert pool.asked == [("rollout-0.1", 0, False)]
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
        await pool.replaced("rollout-0")
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
        await pool.replaced("rollout-0")
        await asyncio.sleep(1 + 2 + 4 + 8 + 16 + 32 + 3.5 * 60)
        assert pool.recovered == []
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.asked == [("rollout-1", 0, False)], "others go on"
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
        assert str(failure) == "rollout-1 while giving way: the cluster has no other room for reward-0.1"
        assert (pool.killed, [worker.name for worker in pool.processes]) == (["rollout-1"], ["rollout-0"])
        pool.give_way("reward-0.1")
        assert pool.killed == ["rollout-1"], "the only replica stays"
        await pool.replaced("rollout-1")  # the group that failed with it asks for that
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
        await pool.replaced("rollout-0")
        await settle()
        assert [failure.worker for failure in pool.failures] == ["rollout-0.1", "rollout-0.2"]
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert pool.asked == [("rollout-1", 0, False)]
        pool.end("rollout-1", died("rollout-1"))
        with pytest.raises(WorkerDied):
            await group
        waiting = asyncio.create_task(pool.run(assignment(1)))
        with pytest.raises(
            RunAborted, match=r"no rollout worker is left; the last failure: rollout-1\.2 .* out of disk"
        ):
            await pool.replaced("rollout-1")
        with pytest.raises(RunAborted):
            await waiting

    asyncio.run(scenario())


def test_a_worker_of_no_pool_cannot_be_replaced():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        with pytest.raises(RunAborted, match="actor-0 failed, and cannot be replaced in a run"):
            await pool.replaced("actor-0")
        await pool.replaced("rollout-999")

    asyncio.run(scenario())


def test_a_dead_host_gets_no_groups_and_the_source_continues():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        pool.end("rollout-0", died("rollout-1"))  # it had moved there
        with pytest.raises(WorkerDied):
            await group
        for group_id in range(1, 3):
            asyncio.create_task(pool.run(assignment(group_id)))  # noqa: RUF006
            await settle()
        assert [name for name, _, _ in pool.asked] == ["rollout-0"] * 3

    asyncio.run(scenario())


def test_the_others_are_told_to_forget_a_dead_replica():
    async def scenario() -> None:
        pool = Scripted(3)
        await pool.ready()
        pool.members[2].worker.actor.forget.answer = died("rollout-2")
        await pool.replaced("rollout-0")
        await settle()
        assert pool.members[1].worker.actor.forget.asked[0] == ("rollout-0",)
        assert [failure.worker for failure in pool.failures] == ["rollout-2"]
        assert pool.recovered == ["rollout-0", "rollout-2"], "it is replaced too"

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------------------ moving


def test_router_weights_follow_moved_groups_and_are_released_there():
    async def scenario() -> None:
        pool = Scripted(3)
        await pool.ready()
        groups = [asyncio.create_task(pool.run(assignment(group_id))) for group_id in range(4)]
        await settle()
        assert [load.weight for load in pool._router.loads] == [4, 2, 2]
        first, _, third = pool.members
        first.worker.actor.give_away.answer = (0, 3)
        assert await pool.move("rollout-0", "rollout-2") == 2
        ((source, peer),) = first.worker.actor.give_away.asked
        assert (source, peer.name) == ("rollout-0", "rollout-2")
        assert [load.weight for load in pool._router.loads] == [0, 2, 6]
        assert pool.placements() == {0: "rollout-0", 1: "rollout-1", 2: "rollout-2", 3: "rollout-0"}
        first.worker.actor.give_away.answer, third.worker.actor.give_away.answer = (0,), (2,)
        assert await pool.move("rollout-2", "rollout-1") == 2, "its guests are moved by their owner"
        assert [load.weight for load in pool._router.loads] == [0, 6, 2]
        for name in ("rollout-0", "rollout-1", "rollout-2"):
            pool.end(name)
        await asyncio.gather(*groups)
        assert [load.weight for load in pool._router.loads] == [0, 0, 0]

    asyncio.run(scenario())


def test_what_one_of_several_policies_samples_is_moved_alone():
    async def scenario() -> None:
        pool = Scripted(3, first=stored(None), second=stored(None))
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment(0)))
        await settle()
        owner = pool.members[0].worker.actor
        owner.give_away.answer = (0,)
        assert await pool.move("rollout-0", "rollout-2", "second") == 1
        assert vars(owner)["paths"][-1] == "places.1.give_away"
        assert await pool.move("rollout-0", "rollout-1", "second") == 0, "nothing of it is there any more"
        assert [load.weight for load in pool._router.loads] == [2, 0, 0], "the first policy is where it was"
        assert await pool.move("rollout-0", "rollout-1", "first") == 1
        assert await pool.move("rollout-2", "rollout-1", "second") == 1
        pool.end("rollout-0")
        await group

    asyncio.run(scenario())


def test_moves_without_groups_or_a_live_target_do_nothing():
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        for source, to in [("rollout-0", "rollout-1"), ("rollout-9", "rollout-1"), ("rollout-0", "rollout-0")]:
            assert await pool.move(source, to) == 0
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        pool._leave("rollout-1")
        assert await pool.move("rollout-0", "rollout-1") == 0
        pool.end("rollout-0")
        await group

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [died("rollout-0"), DeadlineExceeded("rollout-0", "giving", "no answer")])
def test_a_failed_move_leaves_errors_to_the_waiting_groups(error: WorkerError):
    async def scenario() -> None:
        pool = Scripted()
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        pool.members[0].worker.actor.give_away.answer = error
        assert await pool.move("rollout-0", "rollout-1") == 0
        pool.end("rollout-0")
        await group

    asyncio.run(scenario())


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


def test_a_reissued_group_goes_to_a_replica_with_its_version():
    async def asked(version: object) -> list[tuple[str, int, bool]]:
        pool = Scripted(3, policy=stored(version))
        await pool.ready()
        for member, held in zip(pool.members, (4, 5, 6), strict=True):
            member.worker.actor.held.answer = {POLICY: Acknowledged(member.name, held, "h")}
        pool._failed.add(0)
        asyncio.create_task(pool.run(assignment()))  # noqa: RUF006
        await settle()
        return pool.asked

    assert asyncio.run(asked(6)) == [("rollout-2", 0, True)]
    assert asyncio.run(asked(9)) == [("rollout-0", 0, True)]
    assert asyncio.run(asked(None)) == [("rollout-0", 0, True)]
    assert asyncio.run(asked(died("partials"))) == [("rollout-0", 0, True)]


def test_a_reissued_group_of_several_policies_goes_where_all_of_their_versions_are():
    async def asked(first: int | None, second: int | None) -> str:
        pool = Scripted(3, first=stored(first), second=stored(second))
        await pool.ready()
        for member, versions in zip(pool.members, ((4, 1), (4, 2), (5, 2)), strict=True):
            held = zip(("first", "second"), versions, strict=True)
            member.worker.actor.held.answer = {name: Acknowledged(member.name, version, "h") for name, version in held}
        pool._failed.add(0)
        asyncio.create_task(pool.run(assignment()))  # noqa: RUF006
        await settle()
        return pool.asked[0][0]

    assert asyncio.run(asked(4, 2)) == "rollout-1"
    assert asyncio.run(asked(None, 2)) == "rollout-1"
    assert asyncio.run(asked(5, None)) == "rollout-2"
    assert asyncio.run(asked(5, 1)) == asyncio.run(asked(None, None)) == "rollout-0"


@dataclass
class Store(Process):
    """Hosts the partial response pool."""

    version: Method


def stored(version: object) -> Remote[Partials]:
    return Remote("partials", Partials, Store(Method(version)), ANSWER_S)


def test_a_retry_waits_when_the_last_live_replica_dies_meanwhile():
    async def scenario() -> None:
        answer = asyncio.Event()
        pool = Scripted(2, policy=stored(answer))
        await pool.ready()
        groups = [asyncio.create_task(pool.run(assignment(group_id))) for group_id in range(2)]
        await settle()
        pool.set_ups = set_ups = {name: asyncio.Event() for name in ("rollout-0.1", "rollout-1.1")}
        pool.end("rollout-0", died("rollout-0"))
        await asyncio.gather(groups[0], return_exceptions=True)
        await pool.replaced("rollout-0")
        again = asyncio.create_task(pool.run(assignment(0)))
        await settle()
        pool.end("rollout-1", died("rollout-1"))
        await asyncio.gather(groups[1], return_exceptions=True)
        answer.set()
        await settle()
        assert [name for name, _, _ in pool.asked] == ["rollout-0", "rollout-1"], "nobody is live"
        set_ups["rollout-0.1"].set()
        await settle()
        assert pool.asked[-1] == ("rollout-0.1", 0, True)
        pool.end("rollout-0.1")
        await again

    asyncio.run(scenario())


def test_a_replica_that_dies_during_setup_has_one_successor():
    async def scenario() -> None:
        pool = Scripted(1)
        await pool.ready()
        setting_up = asyncio.Event()
        pool.set_ups, pool.set_up_ends = {"rollout-0.1": setting_up}, {"rollout-0.1": died("rollout-0.1")}
        restarts = [asyncio.create_task(pool.replaced(name)) for name in ("rollout-0", "rollout-0.1")]
        await settle()
        assert pool.started == ["rollout-0", "rollout-0.1"], "it is being replaced already"
        setting_up.set()
        await asyncio.gather(*restarts)
        assert pool.started == ["rollout-0", "rollout-0.1", "rollout-0.2"]
        assert pool.killed == ["rollout-0", "rollout-0.1"]
        await pool.replaced("rollout-0.2")
        await settle()
        assert [member.name for member in pool.members] == ["rollout-0.3"]

    asyncio.run(scenario())


def test_replicas_that_die_at_once_cost_a_group_one_attempt():
    async def scenario() -> None:
        pool = Scripted(4)
        await pool.ready()
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        setting_up = asyncio.Event()
        pool.set_ups = {f"rollout-{i}.1": setting_up for i in range(4)}
        for member in pool.members:
            member.worker.actor.held.answer = died(member.name)
        pool.end("rollout-0", died("rollout-0"))
        await asyncio.gather(group, return_exceptions=True)
        await pool.replaced("rollout-0")
        again = asyncio.create_task(pool.run(assignment()))
        await settle()
        assert [failure.worker for failure in pool.failures] == ["rollout-1", "rollout-2", "rollout-3"]
        setting_up.set()
        await settle()
        assert pool.asked == [("rollout-0", 0, False), ("rollout-0.1", 0, True)]
        assert pool.recovered == [f"rollout-{i}" for i in range(4)], "idle ones are replaced too"
        pool.end("rollout-0.1")
        await again

    asyncio.run(scenario())


def test_a_replica_that_does_not_answer_is_skipped_without_delay():
    async def scenario() -> float:
        pool = Scripted(3)
        await pool.ready()
        pool.members[0].worker.actor.held.answer = pool.members[0].worker.actor.load.answer = asyncio.Event()
        pool._failed.add(0)
        began = asyncio.get_running_loop().time()
        asyncio.create_task(pool.run(assignment()))  # noqa: RUF006
        assert len(await pool.loads()) == 2
        took_s = asyncio.get_running_loop().time() - began
        await settle()
        assert pool.asked == [("rollout-1", 0, True)]
        assert pool.failures == []
        return took_s

    assert run_virtual(scenario()) == pytest.approx(2.0)


def test_a_retried_group_leaves_no_record_of_its_failure():
    async def scenario() -> None:
        pool = Scripted(1)
        await pool.ready()
        pool._failed.add(0)
        group = asyncio.create_task(pool.run(assignment()))
        await settle()
        pool.end("rollout-0", TaskTooLong("rollout-0", "encoding a prompt", "61 tokens"))
        with pytest.raises(TaskTooLong):
            await group
        assert pool._failed == set()

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
def test_a_stuck_replica_is_passed_over_until_it_goes_on(answer: object):
    async def scenario() -> None:
        pool = Scripted(2)
        await pool.ready()
        stats = pool.members[0].worker.actor.stats
        went_on, stats.answer = stats.answer, answer
        await asyncio.sleep(5.0)
        groups = [asyncio.create_task(pool.run(assignment(0)))]
        await settle()
        stats.answer = went_on
        await asyncio.sleep(5.0)
        groups.append(asyncio.create_task(pool.run(assignment(1))))
        await settle()
        assert [name for name, _, _ in pool.asked] == ["rollout-1", "rollout-0"]
        assert pool.failures == [], "it keeps its place"
        for name in ("rollout-1", "rollout-0"):
            pool.end(name)
        await asyncio.gather(*groups)

    run_virtual(scenario())


def test_a_hung_replica_writes_its_stacks_before_it_is_killed():
    async def scenario() -> None:
        pool = Scripted(2)
        await pool.ready()
        hung = pool.members[0].worker.actor.dump_stacks
        hung.answer = asyncio.Event()
        await pool.replaced("rollout-0")
        await settle()
        assert (len(hung.asked), pool.killed) == (1, [])
        hung.answer.set()
        await settle()
        assert pool.killed == ["rollout-0"]

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------------------- leases


class Silent:
    """A stream without an answer."""

    def _get_next_ref_n(self, n: int) -> list[Call]:
        return [Call(asyncio.Event())] * n


class Leased(Scripted):
    """Its members answer when the test says so, within the lease of 10 s."""

    _sent = RolloutPool._sent

    @dataclass
    class Calls:
        answer: asyncio.Future[tuple[object, PayloadRef]]

        async def call(self, request: object) -> tuple[object, PayloadRef]:
            return await self.answer

    async def sent(self) -> asyncio.Task[tuple[Group, ...]]:
        """A group on replica 0 that is never answered."""
        await self.ready()
        self.members[0].calls = CallStream("rollout-0", "rolling out", lambda requests: Silent())
        group = asyncio.create_task(self.run(assignment()))
        await settle()
        return group

    async def running(self, began_s: float | None) -> tuple[asyncio.Future, asyncio.Task[tuple[Group, ...]]]:
        """A group on a replica that waits until `began_s` to begin it; for ever if None."""
        loop = asyncio.get_running_loop()
        await self.ready()
        (member,) = self.members
        answer = loop.create_future()
        member.calls = Leased.Calls(answer)  # pyrefly: ignore[bad-assignment]
        sent_s = loop.time()

        class Age:
            def remote(self, group_id: int) -> Call:
                age_s = loop.time() - sent_s - (began_s or 0.0)
                return Call(None if began_s is None else max(0.0, age_s))

        member.worker.actor.age_s = Age()
        return answer, asyncio.create_task(self.run(assignment()))


def test_a_lease_begins_with_the_group_and_not_while_draining():
    async def scenario() -> None:
        pool = Leased(1)
        answer, group = await pool.running(began_s=25.0)
        await asyncio.sleep(34.0)
        assert not group.done()
        stats = EngineStats(0, 0, 0.0, 0)
        done = (rolled_out(group_of(0), RolloutReport(Busy("rollout-0", 25, 34), stats)),)
        answer.set_result((done, PayloadRef(ray.ObjectRef.nil(), 0)))
        assert report_of(await group).busy.end_s == 34

    run_virtual(scenario())


@pytest.mark.parametrize(("began_s", "ends_s"), [(0.0, 10.0), (25.0, 35.0), (None, 10.0)])
def test_an_expired_lease_raises_and_marks_the_replica_dead(began_s, ends_s):
    async def scenario() -> None:
        pool = Leased(1)
        loop = asyncio.get_running_loop()
        start = loop.time()
        _, group = await pool.running(began_s)
        with pytest.raises(DeadlineExceeded, match=r"no answer within 10 s of its start"):
            await group
        assert loop.time() - start == pytest.approx(ends_s)
        assert not pool.members[0].is_live

    run_virtual(scenario())
