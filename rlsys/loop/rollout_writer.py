"""Writing down the rollouts of trained steps, while later steps are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.contracts import Actor, TrainedGroup
from rlsys.errors import CheckpointError, RlsysError, WorkerError
from rlsys.loop.learner import StepResult
from rlsys.monitoring.events import Events, FileSkipped, RolloutsWritten, WorkerFailed
from rlsys.types import Task

MOST_UNWRITTEN = 4
"""Steps whose files may be unwritten at once: their payloads stay in memory until then."""


@dataclass
class RolloutWriter:
    """The rollout files of a run, one per step that is due."""

    actor: Actor
    events: Events
    folder: Path
    every: int
    """Steps between two that are written; 0: none is."""
    _writing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def is_due(self, step: int) -> bool:
        """True if the rollouts of this step are written."""
        return self.every > 0 and step % self.every == 0

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"step_{step:06d}.parquet"

    async def begin(self, step: int, tasks: Sequence[Task], result: StepResult) -> None:
        """Begin to write a step.

        Waits for the files of earlier steps only if `MOST_UNWRITTEN` of them are unwritten. A failure of the writer
        costs its file, and is an event. Raises `WorkerDied` or `DeadlineExceeded` of the actor.
        """
        while len(self._writing) >= MOST_UNWRITTEN:
            await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
        path = self.path(step)
        parts = zip(tasks, result.groups, result.assigned, strict=True)
        trained = [TrainedGroup(place, *part) for place, part in enumerate(parts)]
        recording = self.actor.record(path, step, trained)
        await recording.take_copy()
        task = asyncio.create_task(self._finish(path, step, recording.write_copy()))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def end(self, patience_s: float) -> None:
        """Return once all files are written; give up those that are not within `patience_s`."""
        if self._writing:
            _, late = await asyncio.wait(self._writing, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _finish(self, path: Path, step: int, written: Awaitable[None]) -> None:
        if await is_written(path, written, self.events):
            self.events.emit(RolloutsWritten(step, str(path)))


async def is_written(path: Path, written: Awaitable[None], events: Events) -> bool:
    """Wait for a rollout file. Returns False, after an event with the reason, if it could not be written: the run
    goes on without it."""
    try:
        await written
    except (OSError, CheckpointError) as error:
        events.emit(FileSkipped(str(path), str(error)))
    except RlsysError as error:
        worker = error.worker if isinstance(error, WorkerError) else "recorder"
        events.emit(WorkerFailed(worker, f"writing {path.name}", str(error)))
    except asyncio.CancelledError:
        events.emit(FileSkipped(str(path), "the run ended before it was written"))
        raise
    else:
        return True
    return False
