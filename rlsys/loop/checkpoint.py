"""Atomic checkpoints of the state that survives a run.

    checkpoints/step_000050/
        actor/           weights and optimizer (written by the ranks)
        critic/          weights and optimizer of the critic, in a run that has one
        groups.jsonl     finished groups that are not trained yet
        driver.json      policy version, task cursor, pending groups, hashes of published weights,
                         metrics of the previous step
        manifest.json    size and content hash of every file above; a checkpoint with others is damaged
    checkpoints/latest   name of the newest complete checkpoint: a text file, since object stores have no links

The manifest consists of what the ranks report of the files that they wrote: the driver reads none of them. A checkpoint
is first written as `step_N.tmp`, then flushed to disk, renamed, and named in `latest`. After an
interruption at any point, the previous checkpoint is still complete and is found.

A step that produced non-finite numbers is saved in the same form, so that it can be computed again:

    failed/step_000007/
        actor/, critic/         weights and optimizers
        groups.jsonl            the groups of the step with their payloads
        config.resolved.yaml    the configuration of the failed run
        step.json               the rest, `FailedStep`; written last, so a folder that has it is complete

The failed model is saved as it was before the update `FailedStep.update`, with the earlier updates of the step applied.
The critic trains after the policy. If the policy failed, the critic is as it was before the step. If the critic failed,
the policy has taken the step. Columns of the step are not saved: `rlsys replay` recomputes them from the same models.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from rlsys.algorithm import Column, TrajectoryAdvantage
from rlsys.contracts import Files, Saving, Workers
from rlsys.errors import CheckpointError, DataError, WorkerError
from rlsys.loop.checkpoint_files import (
    ACTOR,
    CRITIC,
    MANIFEST,
    MOST_STATE_BYTES,
    STATE,
    STEP,
    find_latest,
    make_empty,
    newest_first,
    problem_of,
    put_in_place,
    read_manifest,
    remove_checkpoint,
    step_of,
    unfinished_before,
    write_manifest,
)
from rlsys.loop.checkpoint_scores import BestCheckpoints
from rlsys.loop.device_leases import DeviceLeases
from rlsys.loop.task_ledger import LedgerState
from rlsys.types import PolicyVersion
from rlsys.util.any_paths import AnyPath, RemotePath, read_any
from rlsys.util.files import write_atomically
from rlsys.util.hashed_files import SavedFile
from rlsys.util.regular_files import read_regular

T = TypeVar("T")
STATE_FORMAT = 1
"""Format of `driver.json`. A file of another format cannot be read."""


@dataclass(frozen=True, slots=True)
class DriverState:
    """The driver's part of a checkpoint."""

    version: PolicyVersion
    published: dict[PolicyVersion, str]
    """Content hash by version: after a resume, groups sampled before it are still verified."""
    ledger: LedgerState
    past: dict[str, float] = field(default_factory=dict)
    """Metrics of the previous step, see `Algorithm.finalize_advantages`; empty in checkpoints older than this key."""
    num_lost: int = 0
    """Versions whose steps were lost with the actor, so that `version - num_lost` steps are behind the weights."""
    scores: dict[str, dict[PolicyVersion, float | None]] = field(default_factory=dict)
    """Results of evaluations by metric and version, see `BestCheckpoints`; empty in checkpoints older than this key."""
    state_v: int = STATE_FORMAT
    """Format of the file; a file without this key has format 1."""


_STATE = TypeAdapter(with_config(ConfigDict(ser_json_inf_nan="constants"))(DriverState))
"""A metric may be NaN."""
_OTHERWISE = "go on with the version of rlsys that wrote it, or name another checkpoint with run.resume=PATH"


@dataclass
class Checkpoints:
    """Checkpoints of one run."""

    folder: AnyPath
    every: int
    """Steps between two checkpoints; 0 saves only at the end."""
    keep_last: int
    every_s: float = 0.0
    """Seconds after which the next step is saved too; 0: never."""
    best: BestCheckpoints = field(default_factory=lambda: BestCheckpoints(0))
    """Those that are kept by their evaluation. Each evaluated step is saved, if there are to be any."""
    last_saved: int | None = None
    """Step of the newest complete checkpoint."""
    _begun: int | None = None
    _since_s: float | None = None
    """Time of the newest checkpoint's beginning, or of the first question."""

    def is_due(self, step: int, now_s: float, *, is_last: bool) -> bool:
        """Return True if a checkpoint is due after `step` steps, at `now_s` on the loop's clock, and not begun yet."""
        if self._since_s is None:
            self._since_s = now_s
        is_new = step not in (self.last_saved, self._begun)
        is_time = self.every_s > 0 and now_s - self._since_s >= self.every_s
        is_due = is_last or is_time or self.best.is_due(step) or (self.every > 0 and step % self.every == 0)
        is_due = is_due and is_new
        if is_due:
            self._since_s = now_s
        return is_due

    def save(self, step: int, state: DriverState, files_in: Callable[[AnyPath], Saving[Files]]) -> Saving[AnyPath]:
        """Save `state` and the files of `files_in(folder)`; what is written is the folder of the checkpoint.

        Both parts raise `CheckpointError`, in a folder also if a reported file is missing; earlier checkpoints stay.
        """
        return SavedStep(self, step, state, files_in)

    def mark_begun(self, step: int) -> None:
        """Note that the state of a step is copied."""
        self._begun = step

    def partial(self, step: int) -> AnyPath:
        """Folder in which the files of a step are written: at a URL the final one, no checkpoint until its manifest."""
        folder = self.folder / STEP.format(step)
        return folder if isinstance(folder, RemotePath) else folder.with_suffix(".tmp")

    def complete(self, state: DriverState, partial: AnyPath, files: Files) -> AnyPath:
        """Complete the checkpoint whose files are in the folder `partial`; return its final folder."""
        content = _STATE.dump_json(state, indent=1)
        if not isinstance(partial, RemotePath):
            check_seen(partial, files)
        (partial / STATE).write_bytes(content)
        write_manifest(partial, {**files, STATE: SavedFile.of(content)})
        return put_in_place(partial)

    @asynccontextmanager
    async def remove_on_failure(self, step: int) -> AsyncIterator[None]:
        """Remove a checkpoint that fails half way. If no worker is the cause, name the last good one in its error."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            await _end_in_thread(lambda: self._remove(step))
            raise CheckpointError(await asyncio.to_thread(self._failure, step, error)) from error
        except WorkerError:
            await _end_in_thread(lambda: self._remove(step))
            raise

    def _remove(self, step: int) -> None:
        """Remove what there is of a checkpoint that failed, if that is possible; one with its manifest is complete."""
        partial = self.partial(step)
        with suppress(OSError, CheckpointError):
            if not (isinstance(partial, RemotePath) and (partial / MANIFEST).exists()):
                remove_checkpoint(partial)

    def _failure(self, step: int, error: Exception) -> str:
        """Return the text of a failure to write a checkpoint."""
        try:
            last = find_latest(self.folder)
            before = f"the last good one is {last}" if last else "none was saved before"
        except CheckpointError as unseen:
            before = f"those before cannot be looked up: {unseen}"
        room, remedy = "", "Go on"
        if not isinstance(self.folder, RemotePath):
            free = shutil.disk_usage(self.folder if self.folder.exists() else Path("/")).free / 2**30
            room = f" ({free:.1f} GiB free)"
            remedy = remedy if isinstance(error, _NotShared) else "Make room, then go on"
        return (
            f"the checkpoint of step {step} could not be written to {self.folder}{room}: {error}; "
            f"{before}. {remedy} with run.resume=auto"
        )

    def retire(self) -> None:
        """Delete all checkpoints but those of `steps_to_keep`, and what earlier saves that were cut off left at a URL.

        `latest` names the newest. An old checkpoint that cannot be removed ends no run: the newest one is whole.
        """
        with suppress(OSError, CheckpointError):
            checkpoints = list(newest_first(self.folder))
            steps = [step_of(checkpoint) for checkpoint in checkpoints]
            kept = self.steps_to_keep(steps)
            old = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) not in kept]
            for each in (*old, *unfinished_before(self.folder, max(steps, default=0))):
                with suppress(OSError, CheckpointError):
                    remove_checkpoint(each)

    def steps_to_keep(self, steps: Sequence[int]) -> set[int]:
        """Return those of `steps`, newest first, whose checkpoints are kept: the newest `keep_last`, and the
        best."""
        return {*steps[: self.keep_last]} | self.best.steps_to_keep(steps)


@dataclass
class SavedStep:
    """Implements `Saving`: one checkpoint."""

    checkpoints: Checkpoints
    step: int
    state: DriverState
    files_in: Callable[[AnyPath], Saving[Files]]

    def __post_init__(self) -> None:
        self._partial = self.checkpoints.partial(self.step)
        self._files = self.files_in(self._partial)

    async def take_copy(self) -> None:
        async with self.checkpoints.remove_on_failure(self.step):
            await asyncio.to_thread(make_empty, self._partial)
            await self._files.take_copy()
        self.checkpoints.mark_begun(self.step)

    async def write_copy(self) -> AnyPath:
        async with self.checkpoints.remove_on_failure(self.step):
            files = await self._files.write_copy()
            final = await asyncio.to_thread(self.checkpoints.complete, self.state, self._partial, files)
        self.checkpoints.last_saved = self.step
        await asyncio.to_thread(self.checkpoints.retire)
        return final


async def _end_in_thread(work: Callable[[], None]) -> None:
    """Do the work in a thread; a cancellation waits for its end, so that a save after it finds nothing half removed."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def read_state(checkpoint: AnyPath) -> DriverState:
    """Read the driver's part. Raises `CheckpointError` if the checkpoint is incomplete or unreadable."""
    if problem := problem_of(checkpoint, sizes_only=True):
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint: {problem}; remove it, or name another with run.resume=PATH"
        )
    path = checkpoint / STATE
    try:
        row = json.loads(read_any(path, MOST_STATE_BYTES))
        state_v = row.get("state_v", 1) if isinstance(row, dict) else None
        if state_v == STATE_FORMAT:
            state = _STATE.validate_python(row)
            _check_sense(state)
            return state
    except (ValueError, RecursionError) as error:  # from json, pydantic and `_check_sense`
        raise CheckpointError(f"{path} cannot be read: {error}; {_OTHERWISE}") from error
    raise CheckpointError(f"{path} has format {state_v}, and this version of rlsys reads {STATE_FORMAT}; {_OTHERWISE}")


def _check_sense(state: DriverState) -> None:
    """Raise `ValueError` for numbers that no run saves."""
    ledger, ids = state.ledger, list(state.ledger.pending)
    if not 0 <= state.num_lost <= state.version:
        raise ValueError(f"{state.num_lost} of {state.version} versions are lost")
    if ledger.num_consumed < 0 or any(a >= b for a, b in pairwise([-1, *ids, ledger.next_group_id])):
        raise ValueError(f"the pending groups {ids} are not in order below {ledger.next_group_id}")
    if any(draw.size is not None and draw.size < 1 for draw in ledger.pending.values()):
        raise ValueError("a pending group has no episodes")


class _NotShared(CheckpointError):
    """A file that a rank reports, and that is not where the driver reads it."""


def check_seen(folder: Path, files: Files) -> None:
    """Raise `CheckpointError` unless `folder` has all files that the ranks report: they may run on other machines."""
    for name, saved in sorted(files.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != saved.num_bytes:
            problem = "is missing" if size is None else f"has {size} bytes"
            raise _NotShared(
                f"{path} {problem}, and a rank wrote {saved.num_bytes} bytes to it: "
                "let run.folder be a folder that all machines share"
            )


async def copy_and_write(saving: Saving[T]) -> T:
    """Await both parts of a saving, where nothing goes on between them."""
    await saving.take_copy()
    return await saving.write_copy()


class SavedModels:
    """Implements `Saving`: actor, and critic if there is one, in a folder. Both parts raise `CheckpointError`."""

    def __init__(self, workers: Workers, folder: AnyPath, devices: DeviceLeases) -> None:
        self._savings = {name: model.save(folder / name) for name, model in workers.models.items()}
        self._devices = devices

    async def take_copy(self) -> None:
        for name, saving in self._savings.items():
            async with self._devices.lease(name):
                await saving.take_copy()

    async def write_copy(self) -> Files:
        of_models = await asyncio.gather(*(saving.write_copy() for saving in self._savings.values()))
        named = zip(self._savings, of_models, strict=True)
        return {f"{name}/{file}": saved for name, files in named for file, saved in files.items()}


async def find_damage(workers: Workers, checkpoint: AnyPath, files: Files) -> str | None:
    """Let all ranks read these files of a checkpoint, each a share; return the first problem."""
    models, names = list(workers.models.values()), sorted(files)
    shares = [{name: files[name] for name in names[i :: len(models)]} for i in range(len(models))]
    found = await asyncio.gather(*map(lambda model, share: model.find_damage(checkpoint, share), models, shares))
    return next(filter(None, found), None)


async def load_models(workers: Workers, folder: AnyPath, devices: DeviceLeases) -> int:
    """Restore what `SavedModels` wrote; return the number of further steps that the stabilizer needs without staleness.

    Raises `CheckpointError` if the critic is missing.
    """
    files = await asyncio.to_thread(read_manifest, folder)
    if workers.critic is not None and not any(name.startswith(f"{CRITIC}/") for name in files):
        raise CheckpointError(
            f"{folder} contains no critic, and the algorithm needs one: resume with the algorithm that saved it, or "
            "start a new run from its weights, as `rlsys export` writes them"
        )
    async with devices.lease(ACTOR):
        num_synchronous = await workers.actor.load(folder / ACTOR)
    if workers.critic is not None:
        async with devices.lease(CRITIC):
            await workers.critic.load(folder / CRITIC)
    return num_synchronous


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The driver's decisions about the step."""

    version: PolicyVersion
    """Policy version that the step started from."""
    columns: tuple[Column, ...]
    """Columns that the algorithm read."""
    assigned: tuple[tuple[TrajectoryAdvantage, ...], ...]
    """One tuple for each group of `groups.jsonl`, in order."""
    num_updates: int
    """Optimizer updates of the step."""
    error: str
    """Text of the error that ended the run."""
    model: Literal["actor", "critic"] = "actor"
    """The model with non-finite numbers."""
    update: int | None = None
    """Index of the failed update in the step, from 0; None if unknown, or outside any update."""

    def write(self, folder: Path) -> None:
        """Write `step.json`, which completes `folder`. Raises `OSError`."""
        # The standard library writes and reads NaN and Infinity, which an advantage may be.
        write_atomically(folder / "step.json", json.dumps(asdict(self), indent=1))


def read_failed(folder: Path) -> FailedStep:
    """Read the step in `folder`. Raises `DataError` if there is none."""
    path = folder / "step.json"
    try:
        return TypeAdapter(FailedStep).validate_python(json.loads(read_regular(path)))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} contains no failed step: there is no {path.name} in it; "
            "give the folder that the error of the run names, RUN/failed/step_N; or, for a step that was trained, the "
            "run and the number of the step: rlsys replay RUN --step N"
        ) from None
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; it belongs to another version of rlsys, or is damaged"
        ) from error
