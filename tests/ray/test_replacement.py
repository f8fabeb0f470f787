"""The only replica dies or freezes under its groups: all of them wait for its successor, and none is lost."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import time

import pytest

from rlsys.errors import DeadlineExceeded, WorkerDied, WorkerError
from rlsys.types import POLICY, Assignment, Group, GroupKey, Task
from tests.jobs import config_of
from tests.ray_workers import kill_for_good, workers_of
from workers.ray.cluster import NO_MATHS, Resources, is_used_by_others, log_folder, totals
from workers.ray.worker_process import Remote, start
from workers.worker_set import WorkerSet

TASK = Task(id="t", prompt="312>", answer="123")


@pytest.mark.nightly
def test_groups_of_a_dead_only_replica_run_on_its_successor(cluster, model_path, data_path, tmp_path):
    crew = WorkerSet.of(config_of(model_path, data_path, tmp_path))
    rollouts, recovered = crew.rollouts, []
    # Whichever notices the death first, a group or the pool, has the replica replaced.
    rollouts.on_recovery = told = lambda worker, seconds: recovered.append(worker)

    async def group(group_id: int) -> tuple[Group, ...]:
        """Rolled out at the second attempt: its session was in the process that died."""
        assignment = Assignment(GroupKey(group_id, 1), TASK, 2, 0, seed=group_id)
        try:
            return await rollouts.run(assignment)
        except WorkerDied as death:
            await rollouts.restart(death.worker, told)
            return await rollouts.run(assignment)

    async def main() -> list[tuple[Group, ...]]:
        await crew.ready()
        await crew.lines[POLICY].actor.publish(0)
        kill_for_good(rollouts)
        ends = await asyncio.gather(*(group(group_id) for group_id in range(5)))
        await crew.close()
        return ends

    ends = asyncio.run(asyncio.wait_for(main(), 200))
    assert recovered == ["rollout-0"]
    assert {done[0].replica for done in ends} == {"rollout-0.1"}
    assert sorted(done[0].group_id for done in ends) == [0, 1, 2, 3, 4]


def test_a_stopped_replica_is_replaced_within_seconds(cluster, model_path, data_path, tmp_path):
    crew = WorkerSet.of(config_of(model_path, data_path, tmp_path, ["limits.silence_s=5"]))
    rollouts, task = crew.rollouts, Assignment(GroupKey(0, 1), TASK, 2, 0, seed=0)

    async def main() -> float:
        await crew.ready()
        await crew.lines[POLICY].actor.publish(0)
        await rollouts.run(task)
        workers_of("RolloutWorker")[-1].suspend()  # older ones are those of other tests
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="rollout-0 while answering a heartbeat: none within 5 s"):
            await rollouts.run(task)
        await rollouts.restart("rollout-0", lambda worker, seconds: None)
        done = await rollouts.run(task)
        took_s = time.monotonic() - began
        assert done[0].replica == "rollout-0.1"
        await crew.close()
        return took_s

    assert asyncio.run(asyncio.wait_for(main(), 200)) < 40


def stop() -> Hoarder:
    """A model that stops its process while it is loaded."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return Hoarder()


@pytest.mark.nightly
def test_a_worker_that_freezes_in_its_set_up_is_noticed(cluster):
    async def main() -> None:
        worker = start(Hoarder, "frozen-0", stop, NO_MATHS, 60.0)
        with pytest.raises(DeadlineExceeded, match="frozen-0 while answering a heartbeat: no answer within 4 s"):
            await worker.setup(silence_s=0.4)
        worker.kill()

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_worker_without_a_place_is_named(cluster):
    lacks: list[str] = []
    seen = asyncio.Event()

    def note(lack: WorkerError) -> None:
        lacks.append(str(lack))
        seen.set()

    async def main() -> None:
        worker = start(Hoarder, "large-0", Hoarder, Resources(num_cpus=99), 60.0)
        waiting = asyncio.create_task(worker.setup(on_unplaced=note))
        await seen.wait()
        waiting.cancel()
        worker.kill()

    asyncio.run(asyncio.wait_for(main(), 200))
    assert re.fullmatch(
        r"large-0 while waiting for resources: it needs 99 CPUs, and \S+ of the cluster's 8 are free", lacks[0]
    )


def test_a_place_that_a_run_has_taken_itself_is_not_missing(cluster):
    async def main() -> None:
        worker = start(Hoarder, "own-0", Hoarder, Resources(num_cpus=3), 60.0)
        await worker.setup()
        while not is_used_by_others([Resources(num_cpus=2)]):  # noqa: ASYNC110  (Ray learns of it a moment later)
            await asyncio.sleep(0.1)
        assert not is_used_by_others([worker.resources, Resources(num_cpus=totals()["CPU"])])
        worker.kill()

    asyncio.run(asyncio.wait_for(main(), 200))


class Hoarder:
    """Computes without giving the interpreter's lock away."""

    async def hoard(self, seconds: int) -> None:
        ctypes.PyDLL("").sleep(seconds)

    async def close(self) -> None: ...


async def beat_on(worker: Remote[Hoarder]) -> None:
    while True:
        await worker.beat(3.0)


def test_a_worker_that_keeps_the_lock_writes_its_stacks(cluster):
    async def main() -> None:
        worker = start(Hoarder, "hoarder", Hoarder, NO_MATHS, 60.0)
        await worker.setup()
        await worker.beat(3.0)
        hoarding = asyncio.create_task(worker.call(Hoarder.hoard, 100))
        with pytest.raises(DeadlineExceeded):
            await beat_on(worker)
        worker.kill()
        with pytest.raises(WorkerDied):
            await hoarding

    asyncio.run(asyncio.wait_for(main(), 200))
    logs = [path.read_text() for path in log_folder().glob("worker-*.err")]
    assert any("Timeout (0:00:02)" in log and "in hoard" in log for log in logs)
