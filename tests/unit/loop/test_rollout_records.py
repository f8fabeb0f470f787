"""Rollouts are written while later steps are trained, as many groups as were asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from rlsys.contracts import Actor, Saving, TrainedGroup, TrainStats
from rlsys.errors import CheckpointError, ModelError, PayloadLost, RlsysError, WorkerDied
from rlsys.loop.learner import StepResult
from rlsys.loop.rollout_writer import MOST_UNWRITTEN, RolloutWriter
from rlsys.monitoring.events import Events, FileSkipped, RolloutsWritten, WorkerFailed
from rlsys.testing.fake_run import EventRecorder
from rlsys.types import Task
from tests.groups import group


class Writer:
    """Writes when the test says so."""

    def __init__(self) -> None:
        self.places: list[Sequence[int]] = []
        self.files: list[asyncio.Future[None]] = []

    def record(self, path: Path, step: int, trained: Sequence[TrainedGroup]) -> Saving[None]:
        self.places.append([own.place for own in trained])
        self.files.append(asyncio.get_running_loop().create_future())
        return _Written(self.files[-1])


@dataclass(frozen=True)
class _Written:
    file: asyncio.Future[None]

    async def take_copy(self) -> None: ...

    async def write_copy(self) -> None:
        await self.file


def step_of(*group_ids: int) -> tuple[list[Task], StepResult]:
    tasks = [Task(id="t", prompt="1")] * len(group_ids)
    return tasks, StepResult([group(i) for i in group_ids], [()] * len(group_ids), TrainStats({}, 1.0))


def records_of(writer: Writer) -> tuple[RolloutWriter, EventRecorder]:
    told = EventRecorder()
    return RolloutWriter(cast("Actor", writer), Events([told]), Path("r"), 2), told


def test_only_every_so_many_steps_are_due() -> None:
    records, _ = records_of(Writer())
    assert [step for step in range(1, 7) if records.is_due(step)] == [2, 4, 6]
    records.every = 0
    assert not any(map(records.is_due, range(1, 7)))


def test_a_step_waits_only_while_too_many_files_are_unwritten() -> None:
    async def main() -> None:
        writer = Writer()
        records, told = records_of(writer)
        for step in range(MOST_UNWRITTEN):
            await records.begin(step, *step_of(step))
        late = asyncio.create_task(records.begin(9, *step_of(9)))
        await asyncio.sleep(0)
        assert len(writer.files) == MOST_UNWRITTEN and told.of(RolloutsWritten) == []
        writer.files[1].set_result(None)
        await late
        assert [event.step for event in told.of(RolloutsWritten)] == [1]
        for file in writer.files:
            if not file.done():
                file.set_result(None)
        await records.end(10.0)
        assert len(told.of(RolloutsWritten)) == MOST_UNWRITTEN + 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CheckpointError("no room"), FileSkipped),
        (PayloadLost((1,)), WorkerFailed),
        (WorkerDied("recorder", "writing", "its process ended"), WorkerFailed),
        (ModelError("there is no folder"), WorkerFailed),
    ],
)
def test_a_writer_that_fails_costs_its_file_and_no_more(error: RlsysError, kind: type) -> None:
    async def main() -> None:
        writer = Writer()
        records, told = records_of(writer)
        await records.begin(2, *step_of(1))
        await records.begin(4, *step_of(2))
        writer.files[0].set_exception(error)
        writer.files[1].set_result(None)
        await records.end(10.0)
        (skipped,) = told.of(kind)
        assert "step_000002.parquet" in str(skipped)
        assert [event.step for event in told.of(RolloutsWritten)] == [4]

    asyncio.run(main())


def test_at_the_end_a_file_that_takes_too_long_is_given_up() -> None:
    async def main() -> None:
        writer = Writer()
        records, told = records_of(writer)
        await records.begin(2, *step_of(1))
        await records.end(0.0)
        assert writer.files[0].cancelled()
        (skipped,) = told.of(FileSkipped)
        assert (skipped.path, skipped.problem) == ("r/step_000002.parquet", "the run ended before it was written")

    asyncio.run(main())
