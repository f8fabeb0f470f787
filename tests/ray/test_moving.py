"""Groups move between replicas that are processes, and outlive those that die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import ray

from rlsys.errors import WorkerDied
from rlsys.types import POLICY, Assignment, Episode, Group, GroupKey, Task
from tests.jobs import config_of
from workers.ray.call_stream import PayloadRef
from workers.worker_set import WorkerSet


@pytest.fixture
def crew(cluster, model_path, data_path, tmp_path) -> WorkerSet:
    overrides = [
        "rollout.replicas=2",
        "rollout.workflow=tests.ray.tools:Asks",
        "data.max_prompt_tokens=24",
        "rollout.max_new_tokens=16",
    ]
    return WorkerSet.of(config_of(model_path, data_path, tmp_path, overrides))


def assignment(group_id: int, answer: Path, version: int = 0) -> Assignment:
    return Assignment(
        GroupKey(group_id, 1), Task(id="t", prompt="312>", info={"answer": str(answer)}), 2, version, seed=group_id
    )


def played(crew: WorkerSet, scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await crew.ready()
        await crew.lines[POLICY].actor.publish(0)
        try:
            await scenario()
        finally:
            await crew.close()

    asyncio.run(asyncio.wait_for(main(), 200))


async def running(crew: WorkerSet, task: Assignment) -> tuple[asyncio.Task[tuple[Group, ...]], str]:
    """A group that waits on its tool, and where."""
    group = asyncio.create_task(crew.rollouts.run(task))
    while True:
        await asyncio.sleep(0.02)
        loads = await crew.rollouts.loads()
        where = crew.rollouts.placements().get(task.group_id)
        if any(load.replica == where and load.stats.num_tokens and load.num_present for load in loads):
            return group, where or ""


def payload_of(done: tuple[Group, ...]) -> tuple[Episode, ...]:
    ref = done[0].payload
    assert isinstance(ref, PayloadRef)
    return ray.get(ref.chunk)[ref.index]


def test_a_moved_group_keeps_its_version_while_its_source_reloads(crew, tmp_path):
    rollouts, answer = crew.rollouts, tmp_path / "answer"

    async def scenario() -> None:
        done = tmp_path / "done"
        done.touch()
        others = await asyncio.gather(*(rollouts.run(assignment(group_id, done)) for group_id in (5, 6)))
        group, source = await running(crew, assignment(5, answer))
        (host,) = {each[0].replica for each in others} - {source}
        assert await rollouts.move(source, host) == 1
        await crew.lines[POLICY].actor.publish(1)
        loads = {load.replica: load for load in await rollouts.loads()}
        assert loads[source].num_present == 0 < loads[host].num_present
        newer = await rollouts.run(assignment(7, done, version=1))
        assert (newer[0].replica, newer[0].oldest_version) == (source, 1)
        answer.touch()
        assert {span.version for span in (await group)[0].versions} == {0}
        loads = {load.replica: load for load in await rollouts.loads()}
        assert (loads[host].version, loads[host].num_present) == (0, 0)

    played(crew, scenario)


def test_a_group_that_lost_its_host_resumes_from_its_record(crew, tmp_path):
    rollouts, answer = crew.rollouts, tmp_path / "answer"

    async def scenario() -> None:
        done = tmp_path / "done"
        done.touch()
        others = await asyncio.gather(*(rollouts.run(assignment(group_id, done)) for group_id in (5, 6)))
        group, source = await running(crew, assignment(5, answer))
        (host,) = {each[0].replica for each in others} - {source}
        while await crew.rollouts._partials[POLICY].proxy.version(5) is None:  # noqa: ASYNC110  (the recorder tells nobody)
            await asyncio.sleep(0.05)
        assert await rollouts.move(source, host) == 1
        rollouts.members[int(host[-1])].worker.kill()
        answer.touch()
        with pytest.raises(WorkerDied) as raised:
            await group
        assert raised.value.worker == host
        await rollouts.restart(host, lambda worker, seconds: None)
        sampled = {load.replica: load.stats.num_tokens for load in await rollouts.loads()}
        again = await rollouts.run(assignment(5, answer))
        assert again[0].replica == source, "the other is not set up yet"
        after = {load.replica: load.stats.num_tokens for load in await rollouts.loads()}
        first_turns = sum(len(e.trajectories[0].turns[0].output_ids) for e in payload_of(again))
        assert after[source] - sampled[source] == again[0].num_trained - first_turns
        same = next(each for each in others if each[0].group_id == 5)
        assert payload_of(again) == payload_of(same)

    played(crew, scenario)
