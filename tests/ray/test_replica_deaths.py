"""Replicas die, drain and are blocked under requests of session workers that are other processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import pytest
import ray

from rlsys.agents.workflow import SingleTurn
from rlsys.errors import WorkerDied, WorkerError
from rlsys.routing.requests import Request
from rlsys.types import POLICY, Assignment, Episode, Group, GroupKey, Task
from tests.jobs import config_of
from tests.ray.tools import Blocks
from tests.replicas import DIGIT, replica_of, scripted, sessions_of
from workers.ray.call_stream import PayloadRef
from workers.ray.cluster import NO_MATHS
from workers.ray.fault_tolerant_pool import PoolSpec
from workers.ray.worker_process import Remote, start
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.rollout_pool import RolloutPool, SessionPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_worker import SessionWorker
from workers.worker_set import WorkerSet

NUM_TOKENS, TICK_S, SIZE = 240, 0.02, 4
"""A reply takes some five seconds; four of them are a group."""


def digits(request: Request) -> Sequence[int]:
    """A long reply that differs from request to request, and not from replica to replica."""
    return [DIGIT + (request.seed + i * (i + 3)) % 7 for i in range(NUM_TOKENS)]


async def slow_replica(name: str) -> RolloutWorker:
    """A replica of a scripted engine that takes its time."""
    engine = scripted(name, digits, tick_s=TICK_S)
    return RolloutWorker(name, ReplicaWorker(name, {POLICY: replica_of(None, engine, name=name)}))


async def session_worker(workflow: SingleTurn, name: str) -> SessionWorker:
    return sessions_of(name=name, workflow=workflow, num_tokens=NUM_TOKENS)


@dataclass
class Crew:
    """Pools of slow replicas and of session workers."""

    size: int
    workflow: SingleTurn
    group_s: float = inf

    def __post_init__(self) -> None:
        self.recovered: list[str] = []
        self.failures: list[WorkerError] = []

        def replica(name: str) -> Remote[RolloutWorker]:
            return start(RolloutWorker, name, partial(slow_replica, name), NO_MATHS, 30.0)

        def sessions(name: str) -> Remote[SessionWorker]:
            return start(SessionWorker, name, partial(session_worker, self.workflow, name), NO_MATHS, 30.0)

        players = SessionPool("session", PoolSpec(2, sessions, inf, 6.0, 3), self.group_s)
        self.pool = RolloutPool(PoolSpec(self.size, replica, inf, 6.0, 3), sessions=players)
        for pool in self.pool.pools:
            pool.on_failure = self.failures.append
            pool.on_recovery = lambda worker, seconds: self.recovered.append(worker)

    def played(self, scenario: Callable[[RolloutPool], Awaitable[None]]) -> None:
        async def main() -> None:
            await self.pool.ready()
            try:
                await scenario(self.pool)
            finally:
                await self.pool.close()

        asyncio.run(asyncio.wait_for(main(), 200))


def assignment(group_id: int, info: Mapping[str, str] | None = None) -> Assignment:
    task = Task(id="t", prompt="312>", info=info or {})
    return Assignment(GroupKey(group_id, 1), task, SIZE, 0, seed=group_id)


def payload_of(done: tuple[Group, ...]) -> tuple[Episode, ...]:
    ref = done[0].payload
    assert isinstance(ref, PayloadRef)
    return ray.get(ref.chunk)[ref.index]


async def sampled(pool: RolloutPool) -> dict[str, int]:
    """Tokens by live replica."""
    return {load.replica: load.stats.num_tokens for load in await pool.loads()}


async def busy(pool: RolloutPool, num_tokens: int) -> dict[str, int]:
    """Tokens by replica, once all have sampled so many."""
    while True:
        tokens = await sampled(pool)
        if tokens and min(tokens.values()) >= num_tokens:
            return tokens
        await asyncio.sleep(0.02)


def test_requests_of_a_dead_replica_go_on_elsewhere_from_their_last_tokens(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(4)]
        before = await busy(pool, 2 * SIZE * 150)  # older than a second: their tokens are sent as they come
        pool.members[0].worker.kill()
        ends = await asyncio.gather(*groups)
        tokens = [t for end in ends for e in payload_of(end) for t in e.trajectories[0].turns]
        assert all(len(turn.output_ids) == NUM_TOKENS for turn in tokens)
        after = await sampled(pool)
        total = before["rollout-0"] + sum(num for name, num in after.items() if name != "rollout-0")
        num_again = total - 4 * SIZE * NUM_TOKENS  # below 0 by what it sampled between the count and its death
        assert num_again <= before["rollout-0"] / 2, "some were on their way, more on a busy machine; not all"
        assert not any("session" in failure.worker for failure in crew.failures)

    crew.played(scenario)


@pytest.mark.nightly
def test_requests_of_an_only_replica_wait_for_its_successor(cluster):
    crew = Crew(1, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        group = asyncio.create_task(pool.run(assignment(7)))
        await busy(pool, SIZE * 100)
        pool.members[0].worker.kill()
        end = await group
        after = await sampled(pool)
        assert end[0].replica in ("rollout-0", "rollout-0.1")
        assert after["rollout-0.1"] < SIZE * NUM_TOKENS, "it goes on, and does not begin again"
        turns = [turn for episode in payload_of(end) for turn in episode.trajectories[0].turns]
        assert [len(turn.output_ids) for turn in turns] == [NUM_TOKENS] * SIZE
        assert crew.recovered == ["rollout-0"]

    crew.played(scenario)


def test_the_groups_of_a_dead_session_worker_are_issued_again(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(2)]
        await busy(pool, 10)
        players = pool.pools[1]
        players.members[0].worker.kill()
        ends = await asyncio.gather(*groups, return_exceptions=True)
        (failure,) = [end for end in ends if isinstance(end, WorkerDied)]
        assert failure.worker == "session-0"
        await pool.restart("session-0", lambda worker, seconds: crew.recovered.append(worker))
        assert len(await pool.run(assignment(0))) == 1
        for load in await pool.loads():
            assert (load.stats.num_running, load.num_groups) == (0, 0), "the replicas forgot what it asked"

    crew.played(scenario)


@pytest.mark.nightly
def test_a_drained_replica_gives_its_requests_to_another(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(2)]
        await busy(pool, SIZE * 20)
        await pool._live()[0].worker.at(ReplicaWorker, "replica").call(ReplicaWorker.drain, POLICY)
        ends = await asyncio.gather(*groups)
        total = sum((await sampled(pool)).values())
        assert total == 2 * SIZE * NUM_TOKENS, "no token is sampled twice"
        assert len(ends) == 2

    crew.played(scenario)


@pytest.mark.nightly
def test_a_blocked_session_worker_is_named_with_its_line_and_blocks_no_other(cluster, tmp_path):
    crew = Crew(1, Blocks(), group_s=9.0)
    line = f"{Path(Blocks.run.__code__.co_filename).name}:{Blocks.run.__code__.co_firstlineno + 3} in Blocks.run"

    async def scenario(pool: RolloutPool) -> None:
        blocked = asyncio.create_task(pool.run(assignment(0, {"block": "yes"})))
        await asyncio.sleep(0)
        other = await pool.run(assignment(1, {"block": "no"}))
        assert other[0].group_id == 1
        with pytest.raises(WorkerError, match=re.escape(line)) as raised:
            await blocked
        assert raised.value.worker == "session-0"
        assert any(line in str(failure) for failure in crew.failures), "it is named before it is replaced"

    crew.played(scenario)


def test_a_slow_tool_keeps_no_weights_back_and_ends_nothing(cluster, model_path, data_path, tmp_path):
    """A group that waits for its tool holds its version at one replica; the other takes new weights meanwhile."""
    keys = [
        "rollout.replicas=2", "rollout.workflow=tests.ray.tools:Asks", "data.max_prompt_tokens=24",
        "rollout.max_new_tokens=16", "limits.group_s=4",
    ]  # fmt: skip
    crew, answer, done = WorkerSet.of(config_of(model_path, data_path, tmp_path, keys)), tmp_path / "a", tmp_path / "b"
    done.touch()

    def ask(group_id: int, file: Path, version: int) -> Assignment:
        task = Task(id="t", prompt="312>", info={"answer": str(file)})
        return Assignment(GroupKey(group_id, 1), task, 2, version, seed=group_id)

    async def main() -> None:
        await crew.ready()
        await crew.lines[POLICY].actor.publish(0)
        rollouts = crew.rollouts
        try:
            slow = asyncio.create_task(rollouts.run(ask(5, answer, 0)))
            while not (held := [load.replica for load in await rollouts.loads() if load.num_groups]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await crew.lines[POLICY].actor.publish(1)
            newer = [await rollouts.run(ask(group_id, done, 1)) for group_id in (6, 7, 8)]
            assert {view.oldest_version for (view,) in newer} == {1}
            assert held[0] not in {view.replica for (view,) in newer}
            await asyncio.sleep(5.0)  # longer than a group may wait for tokens: the tool's time does not count
            answer.touch()
            assert {span.version for span in (await slow)[0].versions} == {0}
        finally:
            await crew.close()

    asyncio.run(asyncio.wait_for(main(), 200))
