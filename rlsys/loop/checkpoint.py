"""Atomic checkpoints of the state that survives a run.

    checkpoints/step_000050/
        actor/           weights and optimizer (written by the ranks)
        critic/          weights and optimizer of the critic, in a run that has one
        groups.jsonl     finished groups that are not trained yet
        driver.json      policy version, task cursor, pending groups, hashes of published weights,
                         metrics of the previous step
        manifest.json    size of every file above; without it, or with other sizes, the checkpoint is incomplete
    checkpoints/latest   name of the newest complete checkpoint: a text file, since object stores have no links

A checkpoint is first written as `step_N.tmp`, then flushed to disk, renamed, and named in `latest`. After an
interruption at any point, the previous checkpoint is still complete and is found.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, with_config

from rlsys.errors import CheckpointError
from rlsys.loop.task_ledger import LedgerState
from rlsys.types import PolicyVersion
from rlsys.util.files import flush, write_atomically

STEP = "step_{:06d}"
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
    state_v: int = STATE_FORMAT
    """Format of the file; a file without this key has format 1."""


_STATE = TypeAdapter(with_config(ConfigDict(ser_json_inf_nan="constants"))(DriverState))
"""A metric may be NaN."""
_OTHERWISE = "go on with the version of rlsys that wrote it, or name another checkpoint with run.resume=PATH"


@dataclass
class Checkpoints:
    """Checkpoints of one run."""

    folder: Path
    every: int
    """Steps between two checkpoints; 0 saves only at the end."""
    keep_last: int
    last_saved: int | None = None

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return True if a checkpoint is due after `step` steps."""
        return step != self.last_saved and (is_last or (self.every > 0 and step % self.every == 0))

    async def save(self, step: int, state: DriverState, write: Callable[[Path], Awaitable[None]]) -> Path:
        """Write `state` and the files of `write(folder)`. Raises `CheckpointError`; earlier checkpoints stay."""
        final = self.folder / STEP.format(step)
        partial = final.with_suffix(".tmp")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            await write(partial)
            (partial / "driver.json").write_bytes(_STATE.dump_json(state, indent=1))
            (partial / "manifest.json").write_text(json.dumps(_sizes(partial), indent=1))
            flush(partial, partial.iterdir())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            write_atomically(self.folder / "latest", final.name)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(self._lost(step, error)) from error
        self.last_saved = step
        self._retire()
        return final

    def _lost(self, step: int, error: Exception) -> str:
        last = find_latest(self.folder)
        free = shutil.disk_usage(self.folder if self.folder.exists() else Path("/")).free / 2**30
        return (
            f"the checkpoint of step {step} could not be written to {self.folder} ({free:.1f} GiB free): {error}; "
            f"{f'the last good one is {last}' if last else 'none was saved before'}. "
            "Make room, then go on with run.resume=auto"
        )

    def _retire(self) -> None:
        """Delete all but the newest `keep_last` checkpoints, never the one that `latest` names."""
        named = (self.folder / "latest").read_text()
        steps = sorted(p for p in self.folder.glob("step_*") if p.suffix != ".tmp")
        for old in steps[: -self.keep_last]:
            if old.name != named:
                shutil.rmtree(old, ignore_errors=True)


def step_of(checkpoint: Path) -> PolicyVersion:
    """Return the step that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("step_"))


def find_latest(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names if it is complete, else the newest complete one under `folder`."""
    latest = folder / "latest"
    named = [folder / latest.read_text().strip()] if latest.is_file() else []
    candidates = [*named, *sorted(folder.glob("step_*[0-9]"), reverse=True)]
    return next((c for c in candidates if is_complete(c)), None)


def is_complete(checkpoint: Path) -> bool:
    """Return True if every file exists and has the size in the manifest."""
    try:
        sizes: dict[str, int] = json.loads((checkpoint / "manifest.json").read_bytes())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def read_state(checkpoint: Path) -> DriverState:
    """Read the driver's part. Raises `CheckpointError` if the checkpoint is incomplete or unreadable."""
    if not is_complete(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint; remove it, or name another with run.resume=PATH"
        )
    path = checkpoint / "driver.json"
    try:
        row = json.loads(path.read_bytes())
        state_v = row.get("state_v", 1) if isinstance(row, dict) else None
        if state_v == STATE_FORMAT:
            return _STATE.validate_python(row)
    except ValueError as error:  # from json and pydantic
        raise CheckpointError(f"{path} cannot be read: {error}; {_OTHERWISE}") from error
    raise CheckpointError(f"{path} has format {state_v}, and this version of rlsys reads {STATE_FORMAT}; {_OTHERWISE}")


def check_written(folder: Path) -> None:
    """Raise `CheckpointError` if `folder` holds no file from the ranks, which may run on other machines."""
    if not any(path.is_file() for path in folder.rglob("*")):
        raise CheckpointError(f"the ranks wrote to {folder}, but not where the driver sees it: share run.folder")


def _sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
