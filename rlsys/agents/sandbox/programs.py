"""Run a user's program, and kill it with its children when it ends, is cancelled, or this process ends."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from rlsys.errors import ToolError

_LAUNCHER = Path(__file__).with_name("program_supervisor.py")
_NO_ROOM = {errno.EAGAIN, errno.ENOMEM, errno.E2BIG, errno.EMFILE, errno.ENFILE, errno.ENOSPC}
"""Errors if the machine has no room for another process, or the prompt is too long for an argument."""
_TAIL_BYTES = 4000
"""Bytes kept from the end of stderr."""
_LAST_WORDS_S = 1.0
"""Seconds to read the rest of stderr once the program has ended."""


class ProgramFailed(Exception):
    """A program ended with an exit code other than 0; the message has the end of its stderr."""


async def run_program(command: Sequence[str], *, env: Mapping[str, str], stdin: str) -> None:
    """Run `command` to its end, with `stdin` as its input; its stdout is discarded.

    Waits for the program to end. After this call, even if cancelled, no process of its group is alive, and none
    survives this process. Raises `ProgramFailed`, also for a missing program, and `ToolError` if the machine has no
    room for it.
    """
    tail = bytearray()
    try:
        with TemporaryFile() as given:
            given.write(stdin.encode())
            given.seek(0)
            async with _listening(tail) as stderr, _started(command, env, given, stderr) as process:
                code = await process.wait()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise ToolError(f"cannot start {command[0]}: {error.strerror}") from error
    if code:
        end = tail.decode(errors="replace").strip()
        raise ProgramFailed(f"{command[0]} ended with exit code {code}; the end of its stderr:\n{end}")


@asynccontextmanager
async def _started(
    command: Sequence[str], env: Mapping[str, str], stdin: IO[bytes], stderr: IO[bytes]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the program through its launcher, and kill the whole group on exit."""
    launched = (sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *command)
    nowhere = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *launched, stdin=stdin, stdout=nowhere, stderr=stderr, env=env, start_new_session=True
    )
    stderr.close()  # the program has it
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@asynccontextmanager
async def _listening(tail: bytearray) -> AsyncIterator[IO[bytes]]:
    """Yield a writable file; on exit, `tail` has the end of the written bytes.

    The pipe is created here: asyncio would wait until every process closes its pipe, and a surviving child may never
    close it.
    """
    read, write = os.pipe()
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0))
    listening = asyncio.create_task(_read(reader, tail))
    try:
        with os.fdopen(write, "wb", 0) as file:
            yield file
        await asyncio.wait((listening,), timeout=_LAST_WORDS_S)  # a process outside the group may still have it open
    finally:
        listening.cancel()
        transport.close()


async def _read(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read everything, so that the writer never blocks, and keep the last bytes."""
    while piece := await stream.read(1 << 16):
        tail += piece
        del tail[:-_TAIL_BYTES]
