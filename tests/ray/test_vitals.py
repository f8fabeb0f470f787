"""Output and samples of workers in the run's folder, and how a worker has died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from rlsys.errors import WorkerDied
from rlsys.monitoring.machine_samples import last_lines, last_sample
from workers.ray import vitals
from workers.ray.cluster import NO_MATHS
from workers.ray.worker_process import Remote, start


class Talker:
    """A worker that prints, and then dies if it is told to."""

    def say(self, text: str, number: int = 0) -> int:
        print(text)
        sys.stderr.write(f"{text} on stderr\n")
        sys.stdout.flush()
        if number:
            os.kill(os.getpid(), number)
        return os.getpid()

    def leave(self, code: int) -> None:
        os._exit(code)


def talker(name: str) -> Remote[Talker]:
    return start(Talker, name, partial(Talker), NO_MATHS, 30.0)


async def ended(worker: Remote[Talker], leaves: int = 0) -> str:
    """Message of the error of a worker that dies."""
    await worker.setup()
    with pytest.raises(WorkerDied) as death:
        await (worker.call(Talker.leave, leaves) if leaves else worker.call(Talker.say, "last words", signal.SIGKILL))
    return str(death.value)


def test_a_killed_worker_is_told_with_its_signal_and_last_lines(cluster: object, tmp_path: Path) -> None:
    with vitals.of_run(tmp_path):
        told = asyncio.run(ended(talker("rollout-7")))
    sample = last_sample(tmp_path, "rollout-7")
    assert sample is not None and f"its process {sample.pid} was killed by SIGKILL" in told
    assert told.endswith("the end of logs/rollout-7.log:\n    last words\n    last words on stderr")


@pytest.mark.nightly
def test_a_worker_that_exits_is_told_with_its_code(cluster: object, tmp_path: Path) -> None:
    with vitals.of_run(tmp_path):
        assert "ended with exit code 3" in asyncio.run(ended(talker("reward-7"), leaves=3))


def test_every_worker_and_the_driver_write_samples(cluster: object, tmp_path: Path) -> None:
    async def main() -> int:
        worker = talker("reward-8")
        await worker.setup()
        pid = await worker.call(Talker.say, "hello")
        await worker.end()
        return pid

    with vitals.of_run(tmp_path):
        pid = asyncio.run(main())
    sample, driver = last_sample(tmp_path, "reward-8"), last_sample(tmp_path, "driver")
    assert sample is not None and driver is not None
    assert (sample.pid, driver.pid, sample.host) == (pid, os.getpid(), driver.host)
    assert sample.memory > 1 << 20 and 0 <= sample.node_memory <= 1 and sample.gpu is None
    assert last_lines(tmp_path, "reward-8") == ["hello", "hello on stderr"]
