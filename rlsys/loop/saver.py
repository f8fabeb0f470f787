"""Saving the steps of a run: when, what, and beside the next steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsys.contracts import Files, Saving, Workers
from rlsys.errors import (
    CheckpointError,
    DeadlineExceeded,
    PayloadLost,
    RlsysError,
    WorkerDied,
    WorkerError,
)
from rlsys.loop.checkpoint import Checkpoints, DriverState, SavedModels
from rlsys.loop.checkpoint_files import GROUPS
from rlsys.loop.failure_policy import DroppedGroups
from rlsys.loop.group_queue import GroupQueue, InFlightGroup
from rlsys.loop.learner import Learner
from rlsys.loop.run_position import RunPosition
from rlsys.loop.step_metrics import StepClock
from rlsys.loop.stop_request import StopRequest
from rlsys.monitoring.events import CheckpointSaved, Events, WorkerFailed
from rlsys.util.any_paths import AnyPath
from rlsys.util.deadlines import unless
from rlsys.util.hashed_files import SavedFile
from rlsys.weight_sync.sync import WeightSync

SAVE_S = 300.0
"""Seconds for the last checkpoint once the run is to end: generous, because giving up loses the steps in it."""
_UNSAVED = (
    f"the checkpoint of step {{}} was not written within {SAVE_S:g} s; go on from the one before with run.resume=auto"
)


@dataclass
class Saver:
    """Copies the state of a step before the next one begins, and writes it beside that; one checkpoint at a time.

    Methods raise `CheckpointError`, also for a checkpoint that an earlier call began.
    """

    workers: Workers
    queue: GroupQueue
    weights: WeightSync
    checkpoints: Checkpoints
    events: Events
    learner: Learner
    dropped_groups: DroppedGroups
    clock: StepClock
    stop: StopRequest
    position: RunPosition
    lost: WorkerError | None = field(default=None, init=False)
    """Failure of a rank of actor or critic after `stop`: what was not saved by then is lost."""
    _writing: asyncio.Task[None] | None = field(default=None, init=False)
    """Writing of the newest checkpoint."""

    async def save_if_due(self, *, is_last: bool) -> None:
        """Begin to save the last finished step if its checkpoint is due, once the one before is written."""
        step = self.position.version
        if self._writing is not None and self._writing.done():
            await self._writing  # raises why the last one failed
        now_s = asyncio.get_running_loop().time()
        if not self.checkpoints.is_due(step, now_s, is_last=is_last or self.stop.is_made):
            return
        await self.finish_saving()
        began = asyncio.get_running_loop().time()
        saving, is_copied = self.checkpoints.save(step, self._state(), self._files_in), False
        async with self.stop.cuts(SAVE_S):
            with self.clock.span("checkpoint"):
                await saving.take_copy()
                is_copied = True
        if not is_copied:
            raise CheckpointError(_UNSAVED.format(step))
        self._writing = asyncio.create_task(self._write(step, began, saving))

    async def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is on disk."""
        if self._writing is None:
            return
        async with self.stop.cuts(SAVE_S) as wait:
            await self._writing
        if wait.expired():
            raise CheckpointError(_UNSAVED.format(self.position.version))

    async def abandon_saving(self) -> None:
        """Wait until the checkpoint that is being written has failed with its ranks, or was all but written."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None

    async def save_rest(self) -> None:
        """Save the last finished step, unless that is done, or a later step changed the weights and did not end.

        Nothing more is saved once a rank of actor or critic dies or freezes; see `lost`.
        """
        watches = [model.watch(lambda: None) for model in self.workers.models.values()]
        try:
            await unless(self._save_rest(), *watches)
        except (WorkerDied, DeadlineExceeded) as error:
            self.lose_models(error)

    async def _save_rest(self) -> None:
        if self.position.version > self.position.restored and not self.learner.is_half_way:
            await self.save_if_due(is_last=True)
        await self.finish_saving()

    def lose_models(self, failure: WorkerError) -> None:
        """Give up what is not saved yet, because a rank of actor or critic failed after `stop`."""
        self.events.emit(WorkerFailed(failure.worker, failure.phase, str(failure)))
        self.lost, self.learner.is_half_way = failure, True
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    async def save_before(self, error: BaseException) -> None:
        """Save what there is before `error` ends the run, and note in it what can be resumed."""
        reason, step = "a later step did not end" if self.learner.is_half_way else "", self.position.version
        try:
            await self.save_rest()
        except RlsysError as problem:
            reason = str(problem)
        if self.lost is not None:
            reason = str(self.lost)
        saved = self.checkpoints.last_saved
        if saved != step and step > self.position.restored:
            error.add_note(f"step {step} could not be saved: {reason}")
        kept = "no step is saved; begin anew" if saved is None else f"step {saved} is saved; go on"
        error.add_note(f"{kept} with run.resume=auto")

    async def end_saving(self) -> None:
        """Wait for the checkpoint that is being written, and give it up after `SAVE_S`; raise nothing."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=SAVE_S)
            self._writing.cancel()

    def _state(self) -> DriverState:
        position, published = self.position, dict(self.weights.published)
        ledger, past, scores = self.queue.ledger.state(), dict(self.learner.past), self.checkpoints.best.state()
        return DriverState(position.version, published, ledger, past, position.num_lost, scores)

    def _files_in(self, folder: AnyPath) -> Saving[Files]:
        finished = self.queue.finished_groups  # the hashes of all their versions have arrived: they were verified
        return _SavedFiles(self, folder, finished, SavedModels(self.workers, folder, self.learner.devices))

    async def _write(self, step: int, began: float, saving: Saving[AnyPath]) -> None:
        path = await saving.write_copy()
        self.events.emit(CheckpointSaved(step, str(path), asyncio.get_running_loop().time() - began))

    async def save_groups(self, path: AnyPath, groups: Sequence[InFlightGroup]) -> SavedFile:
        """Write the groups; return the size and hash of the file. Leave out groups whose payload is lost, and reissue
        them unless they are in training now."""
        try:
            return await self.workers.actor.save_groups(path, [each.group for each in groups])
        except PayloadLost as error:
            lost = [each for each in groups if each.group_id in error.group_ids]
            if not lost:
                raise
            if waiting := [each for each in lost if each in self.queue.finished_groups]:
                self.dropped_groups.reissue_lost(error, waiting)
            return await self.save_groups(path, [each for each in groups if each not in lost])


@dataclass(frozen=True)
class _SavedFiles:
    """Implements `Saving`: models and finished groups."""

    saver: Saver
    folder: AnyPath
    finished: Sequence[InFlightGroup]
    models: SavedModels

    async def take_copy(self) -> None:
        await self.models.take_copy()

    async def write_copy(self) -> Files:
        groups = self.saver.save_groups(self.folder / GROUPS, self.finished)
        of_groups, files = await asyncio.gather(groups, self.models.write_copy())
        return {**files, GROUPS: of_groups}
