"""Parts shared by the drivers of several policies, called directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rlsys.contracts import GroupScores
from rlsys.errors import WorkerDied
from rlsys.loop.group_queue import Permit
from rlsys.loop.multi_policy import Joint
from rlsys.testing import tasks
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import Assignment, Busy, Group, GroupKey, ReplicaLoad, Score, Task
from tests.groups import group as group_of
from tests.groups import hand_in, queue_of, rolled_out


@dataclass
class Workers:
    """A pool of replicas and judges, which fail in the calls that the test says."""

    failing_rollouts: set[int] = field(default_factory=set)
    failing_scores: set[int] = field(default_factory=set)
    rolled_out: list[Assignment] = field(default_factory=list)
    scored: list[object] = field(default_factory=list)
    """Payloads."""

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        self.rolled_out.append(assignment)
        await asyncio.sleep(1.0)
        if len(self.rolled_out) in self.failing_rollouts:
            raise WorkerDied("rollout-0", "rolling out", "the process is gone")
        payload = f"rollout {len(self.rolled_out)}"
        first, *others = (
            replace(group_of(assignment.group_id), payload=payload, policy=policy) for policy in assignment.versions
        )
        return rolled_out(first), *others

    async def score(self, task: Task, group: Group) -> GroupScores:
        self.scored.append(group.payload)
        await asyncio.sleep(1.0)
        if len(self.scored) in self.failing_scores:
            raise WorkerDied("reward-0", "scoring", "the process is gone")
        return GroupScores((Score(float(len(self.scored))),), Busy("reward-0", 0, 1))

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None: ...

    async def loads(self, policy: str = "policy") -> list[ReplicaLoad]:
        return []

    async def drain(self, source: str, to: str, policy: str = "policy") -> int:
        return 0

    def placements(self) -> dict[int, str]:
        return {}


class Pair:
    """Two policies that share them."""

    def __init__(self, workers: Workers) -> None:
        self.joint = Joint(workers, workers)
        self.queues = {name: queue_of(1, max_staleness=3, num_tasks=9) for name in ("a", "b")}
        self.permits = AsyncExitStack()
        for name, queue in self.queues.items():
            self.joint.join(name, queue)

    async def permit(self, policy: str) -> Permit:
        """With its next group."""
        return await self.permits.enter_async_context(self.queues[policy].permit())

    def asks(self, policy: str, assignment: Assignment | None = None) -> asyncio.Task[Group]:
        """For its next group, or again for one."""

        async def issued() -> Group:
            return await self.joint.run(policy, assignment or (await self.permit(policy)).group.assignment)

        return asyncio.create_task(issued())

    def played(self, scenario: Callable[[], Any]) -> None:
        async def main() -> None:
            async with self.permits, asyncio.timeout(100.0):
                await scenario()

        run_virtual(main())


def test_a_policy_without_a_request_uses_its_newest_published_version():
    workers = Workers()
    pair = Pair(workers)

    async def scenario() -> None:
        trained = hand_in(pair.queues["b"], await pair.permit("b"), group_of(0))
        assert await pair.queues["b"].take(0) == [trained]
        pair.queues["b"].release([trained], 7)
        await pair.asks("a")
        assert workers.rolled_out[0].versions == {"a": 0, "b": 7}
        pair.queues["b"].version = 8
        pair.joint.leave("b")
        await pair.asks("a")
        assert workers.rolled_out[1].versions == {"a": 0, "b": 8}

    pair.played(scenario)


def test_a_rollout_dropped_by_one_policy_is_retried_for_another():
    workers = Workers(failing_rollouts={1})
    pair = Pair(workers)

    async def scenario() -> None:
        assignment = (await pair.permit("a")).group.assignment
        both = [pair.asks("a", assignment), pair.asks("b")]
        assert {type(end) for end in await asyncio.gather(*both, return_exceptions=True)} == {WorkerDied}
        again = pair.asks("a", assignment)
        await asyncio.sleep(1.0)
        assert pair.joint.missing_policies("a") == {0: "policy b"}
        pair.queues["b"].drop(pair.queues["b"].groups[0], "failed", "nothing to train")
        pair.asks("b")
        assert (await again).policy == "a"

    pair.played(scenario)


def test_each_rollout_of_a_group_has_another_key():
    workers = Workers()
    pair = Pair(workers)

    async def scenario() -> None:
        views = await asyncio.gather(pair.asks("a"), pair.asks("b"))
        for policy, view in zip("ab", views, strict=True):  # each lost the payload, one after the other
            queue = pair.queues[policy]
            queue.finish_rollout(queue.start_rollout(Permit(queue.groups[0])), view)
            queue.reissue(queue.groups[0], "its payload is lost")
            assert (await pair.asks(policy)).key == GroupKey(0, 2)
        assert [assignment.key for assignment in workers.rolled_out] == [(0, 1), (0, 2), (0, 3)]

    pair.played(scenario)


def test_a_rollout_is_scored_once_unless_scoring_failed():
    workers = Workers(failing_scores={1})
    pair = Pair(workers)

    async def scenario() -> None:
        done = await asyncio.gather(pair.asks("a"), pair.asks("b"))
        scores = [pair.joint.score(name, tasks(1)[0], each) for name, each in zip("ab", done, strict=True)]
        assert {type(end) for end in await asyncio.gather(*scores, return_exceptions=True)} == {WorkerDied}
        scores = [pair.joint.score(name, tasks(1)[0], each) for name, each in zip("ab", done, strict=True)]
        one, other = await asyncio.gather(*scores)
        assert one is other
        assert workers.scored == ["rollout 1"] * 2

    pair.played(scenario)


def test_scores_belong_to_the_rollout_they_were_requested_for():
    workers = Workers(failing_scores={1})
    pair = Pair(workers)

    async def scenario() -> None:
        task = tasks(1)[0]
        pair.joint.leave("b")
        assignment = (await pair.permit("a")).group.assignment
        lost = await pair.asks("a", assignment)
        with pytest.raises(WorkerDied):
            await pair.joint.score("a", task, lost)
        anew = await pair.asks("a", assignment)
        await pair.joint.score("a", task, lost)
        await pair.joint.score("a", task, anew)
        assert workers.scored == ["rollout 1", "rollout 1", "rollout 2"]

    pair.played(scenario)
