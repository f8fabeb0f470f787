"""The driver's view of replicas and session workers: implements `Rollouts` and `PinnedRollouts`.

The payload of a group is a return value of the rollout call, so the driver owns it and it survives its worker. The
driver keeps only a reference to the payload, and reads only the metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from rlsys.errors import DeadlineExceeded, RlsysError, RunAborted, WorkerError
from rlsys.types import POLICY, Assignment, Group, PolicyVersion, ReplicaLoad
from rlsys.util import deadlines
from rlsys.util.deadlines import now
from rlsys.util.event_loops import all_or_none
from workers.ray.fault_tolerant_pool import Pool, PoolMember, PoolSpec, Recovered
from workers.ray.worker_process import Chunks, Remote
from workers.relay.relay_pool import RayRelays
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_worker import SessionWorker

T = TypeVar("T")
ANSWER_S = 30.0
"""Deadline of a call that does not sample."""
QUESTION_S = 2.0
"""Deadline of a call whose answer only improves a choice."""
LOOK_S = 0.2
"""Pause between two looks at a replica that is about to leave."""
STUCK_S = 5.0
"""Age of an engine's step from which other replicas are preferred, and time after which a blocked event loop is
reported."""


class SessionPool(Pool[SessionWorker]):
    """Session workers in processes of their own."""

    def __init__(self, kind: str, supply: PoolSpec[SessionWorker], blocked_s: float) -> None:
        """A worker whose event loop is blocked for `blocked_s` is replaced."""
        super().__init__(kind, "playing groups", supply)
        self._blocked_s = blocked_s
        self._since_s: dict[str, float] = {}
        """Time since when the event loop of a member does not answer, by its name."""
        self._reported: set[str] = set()
        self.on_join: Callable[[PoolMember[SessionWorker]], None] = lambda member: None
        """Called with each member that is live from now."""
        self.on_end: Callable[[str], None] = lambda name: None
        """Called with the name of each member that is live no more."""

    def _send(self, worker: Remote[SessionWorker], requests: list[Assignment]) -> Chunks:
        return worker.stream(SessionWorker.run_each, requests)

    def _on_join(self, member: PoolMember[SessionWorker]) -> None:
        self.on_join(member)

    def _on_leave(self, member: PoolMember[SessionWorker]) -> None:
        self.on_end(member.name)

    def _on_cut(self, member: PoolMember[SessionWorker]) -> None:
        if not member.is_cut_off:
            self.on_join(member)  # what was told to the others meanwhile

    async def _check(self, member: PoolMember[SessionWorker]) -> None:
        """See `Pool._check`. Reports an event loop that user code blocks, with its file and line; raises
        `DeadlineExceeded` once that lasts too long."""
        await super()._check(member)
        asked_s = now()
        try:
            await member.worker.within(QUESTION_S).call(SessionWorker.ping)
        except DeadlineExceeded:
            blocked_s = now() - self._since_s.setdefault(member.name, asked_s)
        else:
            self._since_s.pop(member.name, None)
            self._reported.discard(member.name)
            return
        if blocked_s < min(STUCK_S, self._blocked_s):
            return
        failure = DeadlineExceeded(
            member.name,
            "playing groups",
            f"the workflow or an environment has blocked its event loop for {blocked_s:.0f} s at "
            f"{await member.worker.where(QUESTION_S)}: await the work, or run it in a thread (asyncio.to_thread); the "
            f"worker is replaced after {self._blocked_s:g} s (limits.group_s)",
        )
        if blocked_s >= self._blocked_s:
            raise failure
        if member.name not in self._reported:
            self._reported.add(member.name)
            self.on_failure(failure)


class RolloutPool(Pool[RolloutWorker]):
    """Implements `Rollouts`: replicas, and the session workers that play groups on them.

    Session workers are members of a pool of their own, or live in the processes of the replicas.
    """

    def __init__(
        self,
        supply: PoolSpec[RolloutWorker],
        kind: str = "rollout",
        *,
        policies: Sequence[str] = (POLICY,),
        sessions: SessionPool | None = None,
    ) -> None:
        """`policies` are those of the replicas' engines, in their order. Without `sessions`, replicas play groups."""
        self._policies, self._sessions = tuple(policies), sessions
        self._is_asleep, self._woken = False, asyncio.Event()
        self._num_setting_up = 0
        """Replicas that load their model now."""
        self._places: dict[int, str] = {}
        """Worker that plays each group, by group id."""
        self._stuck: set[str] = set()
        """Replicas that make no progress, or are cut off."""
        super().__init__(kind, "rolling out groups", supply)
        if sessions is not None:
            sessions.on_join, sessions.on_end = self._meet, self._forget

    async def ready(self) -> None:
        await all_or_none([*(pool.ready() for pool in ([self._sessions] if self._sessions else [])), super().ready()])

    @property
    def pools(self) -> list[Pool[Any]]:
        """This pool, and that of the session workers if there is one."""
        return [self] if self._sessions is None else [self, self._sessions]

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        """See `Rollouts.run`. The group is played by the worker with the fewest groups."""
        players = self._players
        await players._serving()  # nothing is awaited between this and the choice
        player = min(players._live(), key=lambda member: member.num_running)
        group_id = assignment.group_id
        self._places[group_id] = player.name
        try:
            views, payload = await players._do(player, assignment, f"rolling out group {group_id}")
        finally:
            self._places.pop(group_id, None)
        first, *others = (replace(view, payload=payload) for view in cast("tuple[Group, ...]", views))
        return (first, *others)

    async def restart(self, worker: str, on_recovery: Recovered) -> None:
        if self._sessions is not None and self._sessions.has(worker):
            await self._sessions.restart(worker, on_recovery)
        else:
            await super().restart(worker, on_recovery)

    async def loads(self, policy: str = POLICY) -> Sequence[ReplicaLoad]:
        """See `Rollouts.loads`; `policy` selects one of several."""
        asked = [_replica(m).within(QUESTION_S).call(ReplicaWorker.load, policy) for m in self._live()]
        return [answer for answer in await _outcomes(asked) if not isinstance(answer, RlsysError)]

    async def drain(self, source: str, to: str, policy: str = POLICY) -> int:
        """See `Rollouts.drain`; only what one of several policies samples is moved."""
        giver, taker = self._find_member(source), self._find_member(to)
        if giver is None or taker is None or giver is taker or not (taker.is_live and giver.is_live):
            return 0
        players = [member for member in self._players._all if member.is_reachable]
        calls = [_sessions(member).call(SessionWorker.move, policy, source, to) for member in players]
        moved = sum(answer for answer in await _outcomes(calls) if isinstance(answer, int))
        if moved:
            with suppress(WorkerError):  # a replica that is gone is drained
                await _replica(giver).call(ReplicaWorker.drain, policy)
        return moved

    def resize(self, size: int) -> None:
        """See `Pool.resize`. There are as many session workers as replicas."""
        super().resize(size)
        if self._sessions is not None:
            self._sessions.resize(size)

    async def _empty(self, member: PoolMember[RolloutWorker]) -> None:
        """Return once a leaving replica samples nothing, and plays no group. Its requests go on at others that have the
        same weights; those that only it has end here.

        Waits for the last requests, which announce themselves to session workers alone, and for its own groups.
        """
        self._stuck.add(member.name)
        self._meet_all()
        replica = _replica(member)
        try:
            for policy in self._policies:
                others = self._live()
                for other in others:
                    await self.drain(member.name, other.name, policy)
                if others and not (await replica.call(ReplicaWorker.load, policy)).num_groups:
                    await replica.call(ReplicaWorker.drain, policy)  # what holds no weights may go on anywhere
                while member.is_live and (await replica.call(ReplicaWorker.load, policy)).num_present:
                    await deadlines.sleep(LOOK_S)
        except WorkerError as error:
            if member.is_live:
                self.on_failure(error)
        await super()._empty(member)

    def placements(self) -> Mapping[int, str]:
        return dict(self._places)

    async def sleep(self) -> None:
        """See `Tenant.sleep`. Waits for replicas that are being set up; no other is until `wake`."""
        if self._is_asleep:
            return
        self._is_asleep = True
        self._woken.clear()
        self._meet_all()
        while self._num_setting_up:
            await self._changed.wait()
        await self._move(ReplicaWorker.sleep)

    async def wake(self) -> None:
        """See `Tenant.wake`."""
        await self._move(ReplicaWorker.wake)
        self._is_asleep = False
        self._woken.set()
        self._meet_all()

    async def _move(self, method: Callable[[ReplicaWorker], Awaitable[None]]) -> None:
        """Let all live replicas sleep, or wake. Those that fail at it have ended when this returns."""
        moving = [member for member in self._all if member.is_live]
        outcomes = await _outcomes([_replica(member).call(method) for member in moving])
        for member, failure in zip(moving, outcomes, strict=True):
            if isinstance(failure, WorkerError):
                await member.worker.kill_with_stacks()
                if member.is_live:
                    self.on_failure(failure)
                    self._replace(member, self.on_recovery)
                    member.calls.fail(failure)

    async def _set_up(self, member: PoolMember[RolloutWorker]) -> None:
        """See `Pool._set_up`. Waits until the replicas are awake: until then, the device belongs to others."""
        while self._is_asleep:
            await self._woken.wait()
        self._num_setting_up += 1
        try:
            await super()._set_up(member)
        finally:
            self._num_setting_up -= 1
            self._notify()

    async def close(self) -> None:
        await asyncio.gather(super().close(), *([self._sessions.close()] if self._sessions else []))

    @property
    def _players(self) -> Pool[Any]:
        """The pool whose members play groups."""
        return self if self._sessions is None else self._sessions

    # ------------------------------------------------------------------------------------------------- as a pool

    def _send(self, worker: Remote[RolloutWorker], requests: list[Assignment]) -> Chunks:
        return worker.at(SessionWorker, "sessions").stream(SessionWorker.run_each, requests)

    def _on_join(self, member: PoolMember[RolloutWorker]) -> None:
        self._meet_all()

    def _on_leave(self, member: PoolMember[RolloutWorker]) -> None:
        self._stuck.discard(member.name)
        self._meet_all()
        if self._sessions is None:
            self._forget(member.name)

    def _on_give_up(self, failure: RunAborted) -> None:
        for member in self._players.members:
            member.calls.fail(failure)

    def _on_cut(self, member: PoolMember[RolloutWorker]) -> None:
        (self._stuck.add if member.is_cut_off else self._stuck.discard)(member.name)
        self._meet_all()

    async def _trouble(self, member: PoolMember[RolloutWorker]) -> None:
        """Raise the failure of an engine or of a weight change, and the death of the process, as soon as it happens."""
        await _replica(member).call(ReplicaWorker.watch)

    async def _check(self, member: PoolMember[RolloutWorker]) -> None:
        """See `Pool._check`. A replica in a long step, or too busy to answer, is passed over until it goes on."""
        await super()._check(member)
        try:
            stats = await _replica(member).within(QUESTION_S).call(ReplicaWorker.stats)
        except DeadlineExceeded:
            is_stuck = True
        else:
            is_stuck = stats.step_age_s > STUCK_S
        is_stuck |= member in self._leaving
        if member.is_live and is_stuck != (member.name in self._stuck):
            self._stuck ^= {member.name}
            self._meet_all()

    # ---------------------------------------------------------------------------------------------- introductions

    @property
    def _alive(self) -> list[PoolMember[RolloutWorker]]:
        """Replicas that are set up and have not failed, also those that are cut off."""
        return [member for member in self._all if member.is_live]

    def _meet_all(self) -> None:
        """Tell all session workers which replicas there are."""
        for player in self._players._all:
            if player.is_reachable:
                self._meet(player)

    def _meet(self, player: PoolMember[Any]) -> None:
        """Tell a session worker which replicas there are; until then, its groups wait."""
        self._spawn(self._send_handles(player))

    async def _send_handles(self, player: PoolMember[Any]) -> None:
        handles, cut_off = [*map(_replica, self._alive)], [m.name for m in self._alive if m.is_cut_off]
        with suppress(WorkerError):  # one that is gone needs none
            await _sessions(player).call(
                SessionWorker.meet, handles, sorted(self._stuck), cut_off, are_asleep=self._is_asleep
            )

    def _forget(self, owner: str) -> None:
        """End what replicas do for a session worker that is gone."""
        for member in self._alive:
            self._spawn(_forget_owner(member, owner))


class PinnedRolloutPool(RolloutPool):
    """Implements `PinnedRollouts`: its replicas pull exactly the version that is pinned at the relays."""

    def __init__(
        self, supply: PoolSpec[RolloutWorker], relays: RayRelays, *, sessions: SessionPool | None = None
    ) -> None:
        super().__init__(supply, kind="eval", sessions=sessions)
        self._relays = relays

    async def pin(self, version: PolicyVersion) -> None:
        await self._relays.pin(version)


def _replica(member: PoolMember[RolloutWorker]) -> Remote[ReplicaWorker]:
    return member.worker.at(ReplicaWorker, "replica")


def _sessions(member: PoolMember[Any]) -> Remote[SessionWorker]:
    worker = member.worker
    return worker.at(SessionWorker, "sessions") if worker.kind is RolloutWorker else worker


async def _forget_owner(member: PoolMember[RolloutWorker], owner: str) -> None:
    with suppress(WorkerError):  # a replica that is gone has forgotten it
        await _replica(member).call(ReplicaWorker.forget, owner)


async def _outcomes(calls: Sequence[Awaitable[T]]) -> list[T | RlsysError]:
    """Result of each call, or the `RlsysError` that it raises."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RlsysError):
            raise outcome
    return cast("list[T | RlsysError]", outcomes)
