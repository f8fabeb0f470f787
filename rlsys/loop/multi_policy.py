"""Several policies in one run: a driver for each that is trained, and one rollout for all of them.

Every driver has versions, a queue, a staleness bound, an optimizer and checkpoints of its own. All draw the same tasks
in the same order, so that a group_id is the same task with the same seed for each. Whoever speaks in an episode, it is
rolled out once and scored once, and each driver gets the group as its policy sees it.

    call     consumes              produces                   waits for                      unblocked by
    run      an assignment of      one rollout, and a view    every other policy that will   its asking, giving the
             each trained policy   of it for each policy      still ask for this group_id      group up, or ending
    score    a view                one judgement for all      a judgement under way          the reward workers

No deadlock: take the smallest group_id that anybody waits for. Whoever is waited for issues group_ids in order, so it
holds permits for smaller group_ids only, and nobody waits for those: they are rolled out and scored, its learner takes
them, and their permits come back for this one. What is lost gives its permit back and is issued before anything new.
Drops do the same. Nothing depends on policies having equally large steps, or dropping the same groups.

A policy that is done with a group_id, because it trained or dropped it in this session or before a resume, is not
waited for: it speaks with the newest weights that it published, and its tokens are trained by nobody. So a group is
consumed at most once by each policy, and resuming from checkpoints of different steps is no special case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlsys.contracts import Graft, GroupScores, Rewards, RolledOut, Rollouts
from rlsys.errors import RunAborted, first_of
from rlsys.loop.driver import Driver
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.in_flight_group import State
from rlsys.types import Acknowledged, Assignment, Group, PolicyVersion, Ref, ReplicaLoad, Task


@dataclass(eq=False)
class _Ask:
    """A driver's wish for its view of a group."""

    assignment: Assignment
    view: asyncio.Future[RolledOut]


@dataclass(eq=False)
class _Play:
    """One rollout of a group, for all who asked for it, and its judgement once somebody asks for that."""

    payload: Ref
    scoring: asyncio.Task[GroupScores] | None = None


@dataclass(eq=False)
class _Member:
    """A trained policy, as long as its driver runs."""

    queue: GroupQueue
    plays: dict[int, _Play] = field(default_factory=dict)
    """By group_id: the rollout that it was given last."""
    failed: set[int] = field(default_factory=set)
    """Serials whose last rollout failed: it asks again, or gives the group up."""

    def owes(self, group_id: int) -> bool:
        """Will it ask for this group, for the first time or again?"""
        group = self.queue.groups.get(group_id)
        if group is None:
            return group_id >= self.queue.ledger.next_group_id
        return group.state is State.REISSUED or group_id in self.failed

    def tidy(self) -> None:
        """Forget what is settled."""
        self.plays = {group_id: play for group_id, play in self.plays.items() if group_id in self.queue.groups}
        self.failed &= self.queue.groups.keys()


class SharedRollouts(Rollouts, Protocol):
    """A pool of replicas that several policies speak at. `run` answers with a view for every policy that
    `Assignment.versions` names."""

    async def versions(self, policy: str = ...) -> Sequence[Acknowledged]: ...

    async def loads(self, policy: str = ...) -> Sequence[ReplicaLoad]: ...


class Joint:
    """What the drivers of a run share. Lives in their event loop."""

    def __init__(self, rollouts: SharedRollouts, rewards: Rewards) -> None:
        self.pool, self.judges = rollouts, rewards
        self._members: dict[str, _Member] = {}
        self._queues: dict[str, GroupQueue] = {}
        """Of every trained policy, those whose drivers have ended too: they know the newest version it published."""
        self._asks: dict[int, dict[str, _Ask]] = {}
        """By group_id and policy: those that no rollout was begun for."""
        self._work: set[asyncio.Task[Any]] = set()

    def join(self, policy: str, queue: GroupQueue) -> None:
        """A trained policy is waited for from now; `queue` is its driver's. All join before the first driver runs."""
        self._members[policy] = _Member(queue)
        self._queues[policy] = queue

    def leave(self, policy: str) -> None:
        """Its driver has ended: nobody waits for it any more."""
        del self._members[policy]
        self._begin()

    def rollouts(self, policy: str) -> JointRollouts:
        """The rollout pool, for the driver of this policy."""
        return JointRollouts(self, policy)

    def rewards(self, policy: str) -> JointRewards:
        """The reward workers, for the driver of this policy."""
        return JointRewards(self, policy)

    def awaited(self, policy: str) -> Mapping[int, str]:
        """By group_id of a group that this policy asked for and nobody rolls out yet: whom it waits for."""
        waiting = {group_id: self._missing(group_id) for group_id, asks in self._asks.items() if policy in asks}
        return {group_id: f"policy {' and '.join(missing)}" for group_id, missing in waiting.items()}

    # ---------------------------------------------------------------------------------------------------- rolling out

    async def run(self, policy: str, assignment: Assignment) -> RolledOut:
        """The group as this policy sees it; see the table of this module. Raises what the rollout raises."""
        member, group_id = self._members[policy], assignment.group_id
        member.tidy()
        member.failed.discard(group_id)
        ask = _Ask(assignment, asyncio.get_running_loop().create_future())
        self._asks.setdefault(group_id, {})[policy] = ask
        self._begin()
        try:
            return await ask.view
        finally:
            self._withdraw(group_id, policy, ask)

    def _begin(self) -> None:
        """Roll out every group that was asked for, and that nobody else will ask for.

        A policy gives a group up without a word. The permit of that group brings its next call of `run`, so all are
        looked at then.
        """
        for group_id in sorted(group_id for group_id in self._asks if not self._missing(group_id)):
            asks = self._asks.pop(group_id)
            rollout = self._spawn(self._roll_out(asks))
            for ask in asks.values():
                ask.view.add_done_callback(lambda _, asks=asks, rollout=rollout: _cancel_unless_awaited(rollout, asks))

    def _missing(self, group_id: int) -> list[str]:
        asks = self._asks[group_id]
        return [name for name, member in self._members.items() if name not in asks and member.owes(group_id)]

    async def _roll_out(self, asks: Mapping[str, _Ask]) -> None:
        try:
            done = await self.pool.run(self._together(asks))
            views = {group.policy: group for group in (done.group, *done.others)}
            told = {name: replace(done, group=views[name], others=()) for name in asks}
        except Exception as error:  # noqa: BLE001  (raised by whoever asked)
            for name, ask in _awaited(asks):
                self._members[name].failed.add(ask.assignment.group_id)
                ask.view.set_exception(error)
            return
        play = _Play(done.group.payload)
        for name, ask in _awaited(asks):
            self._members[name].plays[ask.assignment.group_id] = play
            ask.view.set_result(told[name])

    def _together(self, asks: Mapping[str, _Ask]) -> Assignment:
        """One assignment for all: a policy that did not ask speaks with the newest weights it published."""
        assignments = [ask.assignment for ask in asks.values()]
        first = assignments[0]
        if any((a.task.id, a.size, a.seed) != (first.task.id, first.size, first.seed) for a in assignments):
            told = ", ".join(f"{name}: {a.size} of task {a.task.id}" for name, a in zip(asks, assignments, strict=True))
            raise RunAborted(
                f"the policies do not mean the same by group {first.group_id} ({told}): resume them from one run, with "
                "the tasks and the algorithm.group_size of that run"
            )
        newest = {name: queue.version for name, queue in self._queues.items()}
        return replace(first, versions=newest | {name: ask.assignment.version for name, ask in asks.items()})

    def _withdraw(self, group_id: int, policy: str, ask: _Ask) -> None:
        asks = self._asks.get(group_id, {})
        if asks.get(policy) is ask:
            del asks[policy]
            if not asks:
                del self._asks[group_id]

    # -------------------------------------------------------------------------------------------------------- scoring

    async def score(self, policy: str, task: Task, group: Group) -> GroupScores:
        """The judgement of this rollout. One that failed is asked for again; raises what that raises."""
        play = self._members[policy].plays.get(group.group_id)
        if play is None or play.payload is not group.payload:  # it was rolled out anew since, or in an earlier session
            play = _Play(group.payload)
        if play.scoring is None or _has_failed(play.scoring):
            play.scoring = self._spawn(self.judges.score(task, group))
        return await asyncio.shield(play.scoring)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def close(self) -> None:
        """End what is under way, which nobody waits for."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)


def _awaited(asks: Mapping[str, _Ask]) -> list[tuple[str, _Ask]]:
    """Those whose driver has not gone."""
    return [(name, ask) for name, ask in asks.items() if not ask.view.done()]


def _cancel_unless_awaited(rollout: asyncio.Task[Any], asks: Mapping[str, _Ask]) -> None:
    if not _awaited(asks):
        rollout.cancel()


def _has_failed(scoring: asyncio.Task[GroupScores]) -> bool:
    return scoring.done() and (scoring.cancelled() or scoring.exception() is not None)


@dataclass(frozen=True, slots=True)
class JointRollouts:
    """Implements `Rollouts` for one policy of several."""

    joint: Joint
    policy: str

    async def run(self, assignment: Assignment) -> RolledOut:
        return await self.joint.run(self.policy, assignment)

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        await self.joint.pool.restart(worker, on_recovery)

    async def versions(self) -> Sequence[Acknowledged]:
        return await self.joint.pool.versions(self.policy)

    async def loads(self) -> Sequence[ReplicaLoad]:
        return await self.joint.pool.loads(self.policy)

    async def move(self, source: str, to: str) -> int:
        """Nothing: the groups of a replica of several policies stay where they are."""
        return 0

    def placements(self) -> Mapping[int, str]:
        return {**self.joint.pool.placements(), **self.joint.awaited(self.policy)}


@dataclass(frozen=True, slots=True)
class JointRewards:
    """Implements `Rewards` for one policy of several."""

    joint: Joint
    policy: str

    async def score(self, task: Task, group: Group) -> GroupScores:
        return await self.joint.score(self.policy, task, group)

    async def graft(self, graft: Graft) -> Group:
        return await self.joint.judges.graft(graft)

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        await self.joint.judges.restart(worker, on_recovery)


async def train_jointly(
    joint: Joint, drivers: Mapping[str, Driver], starts: Mapping[str, PolicyVersion]
) -> dict[str, PolicyVersion]:
    """Run the driver of every policy from its version in `starts` to its end; returns the versions they reached.

    A policy that is done first leaves the others to theirs; its relays, which they need, are supervised until the last
    is done. If one fails, all end: raises what it raised.
    """
    supervising: list[asyncio.Task[None]] = []

    async def driven(policy: str) -> PolicyVersion:
        try:
            reached = await drivers[policy].run(starts[policy])
        finally:
            joint.leave(policy)
        supervising.append(group.create_task(drivers[policy].supervise()))
        return reached

    for policy, driver in drivers.items():
        joint.join(policy, driver.queue)
    try:
        async with asyncio.TaskGroup() as group:
            running = {policy: group.create_task(driven(policy)) for policy in drivers}
            await asyncio.wait(running.values())
            for task in supervising:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        await joint.close()
    return {policy: task.result() for policy, task in running.items()}
