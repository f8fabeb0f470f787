"""Run a user's program, and kill it with all that it started when it ends, is cancelled, or this process ends."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from tempfile import TemporaryFile
from typing import IO

from rlsys.errors import ToolError
from rlsys.util.descendants import launcher_command

_NO_ROOM = {errno.EAGAIN, errno.ENOMEM, errno.E2BIG, errno.EMFILE, errno.ENFILE, errno.ENOSPC}
"""Errors if the machine has no room for another process, or the prompt is too long for an argument."""
_TAIL_BYTES = 4000
"""Bytes kept from the end of stderr."""
_LAST_WORDS_S = 1.0
"""Seconds to read the rest of the output once the program has ended."""


class ProgramFailed(Exception):
    """A program ended with an exit code other than 0; the message has the end of its stderr."""


async def run_program(command: Sequence[str], *, env: Mapping[str, str], stdin: str) -> None:
    """Run `command` to its end, with `stdin` as its input; its stdout is discarded.

    Waits for the program to end. After this call, even if cancelled, the program and every process that it started are
    killed, in whatever session or group, and none survives this process. Raises `ProgramFailed`, also for a missing
    program, and `ToolError` if the machine has no room for it.
    """
    tail = CapturedOutput(_TAIL_BYTES, keeps_end=True)
    nowhere = asyncio.subprocess.DEVNULL
    try:
        with TemporaryFile() as given:
            given.write(stdin.encode(errors="replace"))
            given.seek(0)
            async with capturing(tail) as stderr:
                process = await asyncio.create_subprocess_exec(
                    *launcher_command([*command]),
                    stdin=given,
                    stdout=nowhere,
                    stderr=stderr,
                    env=env,
                    start_new_session=True,
                )
                stderr.close()  # the program has it
                try:
                    code = await process.wait()
                finally:
                    with suppress(ProcessLookupError):
                        process.terminate()  # the launcher, which kills the program and its descendants
                    await process.wait()
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise ToolError(f"cannot start {command[0]}: {error.strerror}") from error
    if code:
        end = tail.kept.decode(errors="replace").strip()
        raise ProgramFailed(f"{command[0]} ended with exit code {code}; the end of its stderr:\n{end}")


class CapturedOutput(asyncio.Protocol):
    """Output of a process, of which the first bytes are kept, or the last ones."""

    def __init__(self, most: int, *, keeps_end: bool = False) -> None:
        """`most` is the number of bytes that are kept."""
        self.most, self.keeps_end = most, keeps_end
        self.kept, self.num_bytes = bytearray(), 0
        self.ended = asyncio.get_running_loop().create_future()

    @property
    def is_cut(self) -> bool:
        """True if there was more output than is kept."""
        return self.num_bytes > self.most

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.kept += data
        if self.keeps_end:
            del self.kept[: -self.most]
        else:
            del self.kept[self.most :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@asynccontextmanager
async def capturing(output: CapturedOutput) -> AsyncIterator[IO[bytes]]:
    """Yield a writable file whose bytes `output` receives, and wait on exit until it has the rest.

    The pipe is created here: asyncio would wait until every process closes its pipe, and a surviving child may never
    close it.
    """
    with pipe() as (read, write):
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, read)
        try:
            yield write
            write.close()
            await asyncio.wait((output.ended,), timeout=_LAST_WORDS_S)
        finally:
            transport.close()


@contextmanager
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield the read end and the write end of a pipe."""
    read, write = os.pipe()
    with os.fdopen(read, "rb", 0) as reading, os.fdopen(write, "wb", 0) as writing:
        yield reading, writing
