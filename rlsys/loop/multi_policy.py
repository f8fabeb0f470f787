"""Training of several policies in one run: one driver per trained policy, and shared rollouts.

Every driver has separate versions, queue, staleness bound, optimizer and checkpoints. All drivers draw the same tasks
in the same order, so a group id means the same task and seed for each. An episode is rolled out and scored once, for
all its policies. Each driver receives the view of its policy on the group.

    call     consumes              produces                   waits for                      unblocked by
    run      an assignment of      one rollout, and a view    every other policy that will   its call of `run`, its drop
             each trained policy   of it for each policy      still request this group id    of the group, or its end
    score    a view                one result for all         a running scoring              the reward workers

No deadlock. Proof: take the smallest group id that any policy waits for. The policy P that delays it issues group ids
in order, so P holds permits only for smaller ids. No policy waits for those ids: they are rolled out, scored and
trained, and their permits return to P for this id. A lost group gives its permit back and is reissued before any new
group; a dropped group gives its permit back too. The proof does not need steps of equal size, or the same drops, in all
policies.

A policy is not waited for if it trained or dropped a group id, in this session or before a resume. It then samples with
its newest published weights, and those tokens are not trained. So each policy consumes a group at most once, and
checkpoints of different steps can be resumed together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlsys.contracts import GroupScores, Rewards, Rollouts
from rlsys.errors import RunAborted, first_of
from rlsys.loop.driver import Driver
from rlsys.loop.group_queue import GroupQueue, State
from rlsys.types import Assignment, Group, GroupKey, PolicyVersion, Ref, ReplicaLoad, Task


@dataclass(eq=False)
class _Ask:
    """Request of a driver for its view of a group."""

    assignment: Assignment
    view: asyncio.Future[Group]


@dataclass(eq=False)
class _Play:
    """One rollout of a group, for all policies that requested it, and its scoring once requested."""

    payload: Ref
    scoring: asyncio.Task[GroupScores] | None = None


@dataclass(eq=False)
class _Member:
    """A trained policy, while its driver runs."""

    queue: GroupQueue
    plays: dict[int, _Play] = field(default_factory=dict)
    """By group id: the last rollout returned to this policy."""
    failed: set[int] = field(default_factory=set)
    """Ids of groups whose last rollout failed; the policy requests or drops them next."""

    def owes(self, group_id: int) -> bool:
        """Return True if the policy will request this group, for the first time or again."""
        group = self.queue.groups.get(group_id)
        if group is None:
            return group_id >= self.queue.ledger.next_group_id
        return group.state is State.REISSUED or group_id in self.failed

    def tidy(self) -> None:
        """Remove the rollouts and failures of settled groups."""
        self.plays = {group_id: play for group_id, play in self.plays.items() if group_id in self.queue.groups}
        self.failed &= self.queue.groups.keys()


class SharedRollouts(Rollouts, Protocol):
    """Pool of replicas for several policies. `run` returns a view for every policy in `Assignment.versions`."""

    async def loads(self, policy: str = ...) -> Sequence[ReplicaLoad]: ...

    async def drain(self, source: str, to: str, policy: str = ...) -> int: ...


class Joint:
    """State shared by the drivers of a run, in one event loop."""

    def __init__(self, rollouts: SharedRollouts, rewards: Rewards) -> None:
        self.pool, self.judges = rollouts, rewards
        self._members: dict[str, _Member] = {}
        self._queues: dict[str, GroupQueue] = {}
        """By trained policy, including those whose drivers have ended: for the newest version it published."""
        self._asks: dict[int, dict[str, _Ask]] = {}
        """By group id and policy: requests without a rollout."""
        self._num_attempts: Counter[int] = Counter()
        """By group id: rollouts that were begun."""
        self._work: set[asyncio.Task[Any]] = set()

    def join(self, policy: str, queue: GroupQueue) -> None:
        """Register a trained policy with its driver's queue. All policies join before the first driver runs."""
        self._members[policy] = _Member(queue)
        self._queues[policy] = queue

    def leave(self, policy: str) -> None:
        """Stop waiting for a policy whose driver has ended."""
        del self._members[policy]
        self._begin()

    def missing_policies(self, policy: str) -> Mapping[int, str]:
        """Return the policies that this policy waits for, by id of a requested group without a rollout."""
        waiting = {group_id: self._missing(group_id) for group_id, asks in self._asks.items() if policy in asks}
        return {group_id: f"policy {' and '.join(missing)}" for group_id, missing in waiting.items()}

    # ---------------------------------------------------------------------------------------------------- rolling out

    async def run(self, policy: str, assignment: Assignment) -> Group:
        """Return the view of this policy on a group; see the table of this module. Raises the errors of the rollout."""
        member, group_id = self._members[policy], assignment.group_id
        member.tidy()
        member.failed.discard(group_id)
        ask = _Ask(assignment, asyncio.get_running_loop().create_future())
        self._asks.setdefault(group_id, {})[policy] = ask
        self._begin()
        try:
            return await ask.view
        finally:
            asks = self._asks.get(group_id, {})
            if asks.get(policy) is ask:
                del asks[policy]
                if not asks:
                    del self._asks[group_id]

    def _begin(self) -> None:
        """Start the rollout of every requested group that no other policy will still request.

        A policy drops a group without a notification here. Its freed permit leads to its next call of `run`, which
        checks all groups again.
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
            first, *others = await self.pool.run(self._together(asks))
            views = {view.policy: replace(view, report=first.report) for view in (first, *others)}
            answers = {name: replace(views[name], key=ask.assignment.key) for name, ask in asks.items()}
        except Exception as error:  # noqa: BLE001  (set on every request)
            for name, ask in _open_asks(asks):
                self._members[name].failed.add(ask.assignment.group_id)
                ask.view.set_exception(error)
            return
        play = _Play(first.payload)
        for name, ask in _open_asks(asks):
            self._members[name].plays[ask.assignment.group_id] = play
            ask.view.set_result(answers[name])

    def _together(self, asks: Mapping[str, _Ask]) -> Assignment:
        """Merge the assignments of a group, as an attempt of their own: each policy counts its attempts for itself.

        A policy without a request samples with its newest published weights.
        """
        assignments = [ask.assignment for ask in asks.values()]
        first = assignments[0]
        if any((a.task.id, a.size, a.seed) != (first.task.id, first.size, first.seed) for a in assignments):
            rows = ", ".join(f"{name}: {a.size} of task {a.task.id}" for name, a in zip(asks, assignments, strict=True))
            raise RunAborted(
                f"the policies do not mean the same by group {first.group_id} ({rows}): resume them from one run, with "
                "the tasks and the algorithm.group_size of that run"
            )
        newest = {name: queue.version for name, queue in self._queues.items()}
        versions = newest | {name: ask.assignment.version for name, ask in asks.items()}
        self._num_attempts[first.group_id] += 1
        return replace(first, key=GroupKey(first.group_id, self._num_attempts[first.group_id]), versions=versions)

    # -------------------------------------------------------------------------------------------------------- scoring

    async def score(self, policy: str, task: Task, group: Group) -> GroupScores:
        """Return the scores of this rollout; a failed scoring is repeated. Raises the errors of the scoring."""
        play = self._members[policy].plays.get(group.group_id)
        if play is None or play.payload is not group.payload:  # rolled out again since, or in an earlier session
            play = _Play(group.payload)
        if play.scoring is None or _has_failed(play.scoring):
            play.scoring = self._spawn(self.judges.score(task, group))
        return await asyncio.shield(play.scoring)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it may have been cancelled

    async def close(self) -> None:
        """Cancel the work still running, which has no receiver."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)


def _open_asks(asks: Mapping[str, _Ask]) -> list[tuple[str, _Ask]]:
    """Return the requests whose driver still waits."""
    return [(name, ask) for name, ask in asks.items() if not ask.view.done()]


def _cancel_unless_awaited(rollout: asyncio.Task[Any], asks: Mapping[str, _Ask]) -> None:
    if not _open_asks(asks):
        rollout.cancel()


def _has_failed(scoring: asyncio.Task[GroupScores]) -> bool:
    return scoring.done() and (scoring.cancelled() or scoring.exception() is not None)


@dataclass(frozen=True, slots=True)
class JointRollouts:
    """Implements `Rollouts` for one policy of several."""

    joint: Joint
    policy: str

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        return (await self.joint.run(self.policy, assignment),)

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        await self.joint.pool.restart(worker, on_recovery)

    async def loads(self) -> Sequence[ReplicaLoad]:
        return await self.joint.pool.loads(self.policy)

    async def drain(self, source: str, to: str) -> int:
        """Move what this policy samples; the other policies of the groups stay where they are."""
        return await self.joint.pool.drain(source, to, self.policy)

    def placements(self) -> Mapping[int, str]:
        return {**self.joint.pool.placements(), **self.joint.missing_policies(self.policy)}


@dataclass(frozen=True, slots=True)
class JointRewards:
    """Implements `Rewards` for one policy of several."""

    joint: Joint
    policy: str

    async def score(self, task: Task, group: Group) -> GroupScores:
        return await self.joint.score(self.policy, task, group)

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        await self.joint.judges.restart(worker, on_recovery)


async def train_jointly(
    joint: Joint, drivers: Mapping[str, Driver], starts: Mapping[str, PolicyVersion]
) -> dict[str, PolicyVersion]:
    """Run the driver of every policy from its version in `starts`; return the versions they reached.

    The other policies go on after one ends. They need its relays, which stay supervised until the last driver ends. If
    one driver fails, all are cancelled and its error is raised.
    """
    supervising: list[asyncio.Task[None]] = []

    async def drive_policy(policy: str) -> PolicyVersion:
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
            running = {policy: group.create_task(drive_policy(policy)) for policy in drivers}
            await asyncio.wait(running.values())
            for task in supervising:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        await joint.close()
    return {policy: task.result() for policy, task in running.items()}
