"""The only replica dies under several groups: all of them wait for its successor, and none is lost."""

from __future__ import annotations

import asyncio

from rlsys.contracts import RolledOut
from rlsys.errors import WorkerDied
from rlsys.types import POLICY, Assignment, Task
from tests.jobs import config_of
from workers.worker_set import WorkerSet

TASK = Task(id="t", prompt="312>", answer="123")


def test_groups_of_a_dead_only_replica_run_on_its_successor(cluster, model_path, data_path, tmp_path):
    crew = WorkerSet.of(config_of(model_path, data_path, tmp_path))
    rollouts, recovered = crew.rollouts, []

    async def group(group_id: int) -> tuple[str, RolledOut]:
        """Rolled out at the second attempt."""
        try:
            await rollouts.run(Assignment(group_id, TASK, 2, 0, seed=group_id))
        except WorkerDied as death:
            await rollouts.restart(death.worker, lambda worker, seconds: recovered.append(worker))
            return death.worker, await rollouts.run(Assignment(group_id, TASK, 2, 0, seed=group_id))
        raise AssertionError("the replica was to die")

    async def main() -> list[tuple[str, RolledOut]]:
        await crew.ready()
        await crew.lines[POLICY].actor.publish(0)
        rollouts.members[0].worker.kill()
        ends = await asyncio.gather(*(group(group_id) for group_id in range(5)))
        await crew.close()
        return ends

    ends = asyncio.run(asyncio.wait_for(main(), 100))
    assert recovered == ["rollout-0"]
    assert {name for name, _ in ends} == {"rollout-0"}
    assert {done.group.replica for _, done in ends} == {"rollout-0.1"}
    assert sorted(done.group.group_id for _, done in ends) == [0, 1, 2, 3, 4]
