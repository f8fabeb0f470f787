"""Run a program of the user's, and end it with its children: at its end, at ours, and at that of this process."""

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
"""The machine has no room for another process now, or the prompt is too long for an argument."""
_TAIL_BYTES = 4000
"""Of what a program writes to stderr."""
_LAST_WORDS_S = 1.0
"""Time to read what is left of it once the program has ended."""


class ProgramFailed(Exception):
    """A program ended with an exit code other than 0; the message has the end of its stderr."""


async def run_program(command: Sequence[str], *, env: Mapping[str, str], stdin: str) -> None:
    """Run `command` to its end, with `stdin` as its input; what it writes to stdout goes nowhere.

    Waits for the program to end. However this is left, by cancellation too, nothing of its process group is alive
    then; nor is it when this process is killed. Raises `ProgramFailed`, also for a program that is not there, and
    `ToolError` if the machine has no room for it.
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
    """The program, by way of its launcher; its whole group is ended on leaving."""
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
    """A file to write to; `tail` has the end of what was written, on leaving.

    A pipe of our own: asyncio would wait for everybody who holds one of its own to be done with it, and a child that
    the program leaves behind may never be.
    """
    read, write = os.pipe()
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0))
    listening = asyncio.create_task(_read(reader, tail))
    try:
        with os.fdopen(write, "wb", 0) as file:
            yield file
        await asyncio.wait((listening,), timeout=_LAST_WORDS_S)  # what has left the group may still hold it open
    finally:
        listening.cancel()
        transport.close()


async def _read(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read all there is, so that the writer never waits, and keep the end of it."""
    while piece := await stream.read(1 << 16):
        tail += piece
        del tail[:-_TAIL_BYTES]
