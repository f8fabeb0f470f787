"""Pools of slow replicas and of session workers in other processes, for tests of what happens to either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import ray

from rlsys.agents.workflow import SingleTurn
from rlsys.errors import WorkerError
from rlsys.routing.requests import Request
from rlsys.types import POLICY, Assignment, Episode, Group, GroupKey, Task
from tests.replicas import DIGIT, replica_of, scripted, sessions_of
from workers.ray.call_stream import PayloadRef
from workers.ray.cluster import NO_MATHS
from workers.ray.fault_tolerant_pool import PoolSpec
from workers.ray.worker_process import Remote, start
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.rollout_pool import RolloutPool, SessionPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_worker import SessionWorker

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
