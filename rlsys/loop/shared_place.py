"""A check before the first step: driver and all ranks reach the same place for checkpoints.

    PLACE/markers-5f3a.../driver     written by the driver, read by every rank
    PLACE/markers-5f3a.../actor-1    written by that rank, read by the driver

Without it, a run on several machines would discover at its first checkpoint that they share no disk.
"""

from __future__ import annotations

import asyncio
import platform
from contextlib import suppress
from uuid import uuid4

from rlsys.contracts import MarkerReply, Workers
from rlsys.errors import CheckpointError, ConfigError
from rlsys.loop.checkpoint_files import remove_checkpoint
from rlsys.util.any_paths import AnyPath, read_any, writing

DRIVER = "driver"
"""Name of the driver's marker."""
_REMEDY = "let run.folder be a folder that all machines share, or set checkpoint.to to a URL that they all reach"


def answer_marker(folder: AnyPath, worker: str) -> MarkerReply:
    """Read the driver's marker in `folder`, and write one of this worker beside it."""
    node, problem = platform.node(), _read_problem(folder / DRIVER, folder.name)
    if not problem:
        problem = _write_problem(folder / worker, folder.name)
    return MarkerReply(worker, node, problem)


async def check_shared(workers: Workers, place: AnyPath) -> None:
    """Raise `ConfigError` with rank and node unless every rank reads what the driver writes to `place`, and the driver
    what the rank writes. The markers are removed."""
    folder = place / f"markers-{uuid4().hex}"
    try:
        if problem := await asyncio.to_thread(_write_problem, folder / DRIVER, folder.name):
            raise ConfigError(f"checkpoints cannot be written to {place}: the driver {problem}; {_REMEDY}")
        answers = await asyncio.gather(*(model.answer_marker(folder) for model in workers.models.values()))
        for reply in (reply for of_model in answers for reply in of_model):
            problem = reply.problem
            if not problem and (unread := await asyncio.to_thread(_read_problem, folder / reply.worker, folder.name)):
                problem = f"wrote a file that the driver {unread}"
            if problem:
                where = f"{reply.worker} on node {reply.node}"
                raise ConfigError(f"{place} is not shared by all machines: {where} {problem}; {_REMEDY}")
    finally:
        with suppress(CheckpointError, ConfigError):
            await asyncio.to_thread(remove_checkpoint, folder)


def _read_problem(path: AnyPath, content: str) -> str:
    """Return what is wrong with a marker; empty if it has this content."""
    try:
        found = read_any(path)
    except (OSError, CheckpointError, ConfigError) as error:
        return f"cannot read: {error}" if path.name != DRIVER else f"cannot read what the driver wrote: {error}"
    return "" if found == content.encode() else f"reads other contents in {path}"


def _write_problem(path: AnyPath, content: str) -> str:
    try:
        with writing(path) as file:
            file.write(content.encode())
    except (OSError, CheckpointError, ConfigError) as error:
        return f"cannot write there: {error}"
    return ""
