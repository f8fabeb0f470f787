"""Runs Python that a model wrote, in a process of its own: `run_python`, and the same as a tool, `python_tool`.

    ran = await run_python("print(6 * 7)")          # PythonResult(output="42\\n", exit_code=0, ...)
    toolbox = Toolbox(python_tool(ProgramLimits(wall_s=5)))

The program is a fresh interpreter in a temporary folder, with a clean environment. What holds it, in this order:

| guard | what it stops |
| --- | --- |
| limits of the kernel (`setrlimit`) | processor time, address space, size of a file, open files; no core dumps |
| `landlock` | reading and writing files outside the folder; the interpreter and the system's libraries can be read |
| `seccomp` | the network, other processes (none can be started, signalled or traced) |
| `seccomp` | changing the mode, owner, times or attributes of a file, one of its own included |
| the deadline | whatever still runs is killed; also when the episode is cancelled or the parent process ends |

Root's powers are dropped as well. The program can start threads, but no process. A guard in `ProgramLimits.requires`
that the kernel refuses is an error, `SandboxError`, and nothing is run; `PythonResult.guards` tells which were in
force. Linux only, x86-64 and ARM64.

What it is not: a boundary against somebody who attacks it on purpose. The program shares the kernel, the user id and
the disk with the training run, sees the names, sizes and times of files everywhere, can fill the disk, and its threads
can keep as many cores busy until `ProgramLimits.cpu_s` are used. Against that run it in a container or a virtual
machine of its own and call that from a tool. What it is for: the code that a policy writes while it learns, which
loops, floods, deletes and peeks at answers without any plan.

Starting a program costs about 50 ms of one core, most of it the interpreter's own start.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal, TypeAlias

from pydantic import Field

from rlsys.agents.tools import Tool, tool
from rlsys.errors import SandboxError, ToolError

Guard: TypeAlias = Literal["landlock", "seccomp"]

_LAUNCHER = Path(__file__).with_name("confinement.py")
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf")


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What a program may use, and what must hold it."""

    wall_s: float = 10.0
    """Seconds from its start until it is killed."""
    cpu_s: int = 10
    """Seconds of processor time, over all its threads."""
    memory_mb: int = 1024
    """Address space, which is more than what it uses: 1024 is enough to import numpy, not torch."""
    file_mb: int = 16
    """Size of a file it writes, and of all its output. How many files it writes is not limited."""
    open_files: int = 64
    threads: int = 64
    """More, which is looked at 20 times a second, and it is killed."""
    output_bytes: int = 20_000
    """Bytes of its output that are kept, from the beginning; the rest is read and thrown away."""
    readable: tuple[str, ...] = ()
    """Files and folders it may read besides those of the interpreter, e.g. those of a data set."""
    requires: tuple[Guard, ...] = ("landlock", "seccomp")
    """Guards without which nothing is run. Without `seccomp` it could reach the network and start processes, some of
    which may be left behind; without `landlock` read and delete every file that the training run can."""


@dataclass(frozen=True)
class PythonResult:
    """How a program ended, and what it wrote."""

    output: str
    """What it wrote to stdout and stderr, in order. Bytes that are not UTF-8 are shown as �."""
    exit_code: int
    """What it ended with; minus the signal's number if one killed it, e.g. -24 (SIGXCPU) after
    `ProgramLimits.cpu_s`."""
    seconds: float
    """From start to end, the start of the interpreter included."""
    is_timeout: bool = False
    """Was it killed at `ProgramLimits.wall_s`?"""
    is_cut: bool = False
    """Did it write more than `ProgramLimits.output_bytes`?"""
    guards: tuple[str, ...] = ()
    """What held it besides its limits."""

    def __str__(self) -> str:
        """The output, and in brackets what a reader of it could not see: `1\\n[exit code 3]`."""
        notes = ["[output cut]"] if self.is_cut else []
        if self.is_timeout:
            notes.append(f"[killed after {self.seconds:.1f} s]")
        elif self.exit_code < 0:
            notes.append(f"[killed by {signal.Signals(-self.exit_code).name}]")
        elif self.exit_code > 0:
            notes.append(f"[exit code {self.exit_code}]")
        if not self.output and not notes:
            return "[no output]"
        return "\n".join([*([self.output.removesuffix("\n")] if self.output else []), *notes])


async def run_python(code: str, *, stdin: str = "", limits: ProgramLimits = ProgramLimits()) -> PythonResult:
    """Run a program, with `stdin` at its standard input, until it ends or is killed.

    Raises `SandboxError` if a guard that it requires is missing, and `ToolError` if the machine has no room for another
    process, or its folder cannot be removed. When this call is cancelled, the program is killed.
    """
    began = time.monotonic()
    output = _Output(limits.output_bytes)
    with _pipe() as (report, told):
        async with _folder(code) as folder:
            async with _started(folder, stdin, told, output, limits) as process:
                is_timeout = await _is_overdue(process, output, limits)
            os.set_blocking(report.fileno(), False)  # a process that is being started elsewhere may have its other end
            guards = _reported((report.read(4096) or b"").decode(), process, is_timeout)
    assert process.returncode is not None
    text = output.kept.replace(os.fsencode(folder + os.sep), b"").decode(errors="replace")
    return PythonResult(text, process.returncode, time.monotonic() - began, is_timeout, output.is_cut, guards)


def python_tool(limits: ProgramLimits = ProgramLimits()) -> Tool:
    """`python`, a tool that runs a program and answers with what it wrote."""

    async def python(code: Annotated[str, Field(description="A whole program: print what you want to see.")]) -> str:
        """Run a Python program. It has no network and starts from nothing each time."""
        return str(await run_python(code, limits=limits))

    return tool(python, timeout_s=limits.wall_s + _GRACE_S, max_chars=limits.output_bytes + 200)


_GRACE_S = 5.0
"""The tool's deadline lies so much later than the program's, which should end it."""


_LOOK_S = 0.05
"""Between two looks at what a program uses."""
_LAST_WORDS_S = 1.0
"""To read what is left of the output once the program has ended."""


# ---------------------------------------------------------------------------------------------------------- the process


@asynccontextmanager
async def _started(
    folder: str, stdin: str, told: IO[bytes], output: _Output, limits: ProgramLimits
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program; on leaving, its process group is killed and its output read.

    The pipes are our own: asyncio would wait for everybody who holds one of its own, and without `seccomp` a process
    that has left the group may never let go.
    """
    connect = asyncio.get_running_loop().connect_read_pipe
    with _pipe() as (read, write), tempfile.TemporaryFile() as given:
        transport, _ = await connect(lambda: output, read)
        try:
            try:
                given.write(stdin.encode(errors="replace"))
                given.seek(0)
                process = await _start(folder, given, write, told, limits)
            except OSError as error:
                raise ToolError(f"cannot start a program: {error}") from error
            write.close()  # the program has them
            told.close()
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            await asyncio.wait((output.ended,), timeout=_LAST_WORDS_S)
        finally:
            transport.close()


async def _start(
    folder: str, stdin: IO[bytes], stdout: IO[bytes], told: IO[bytes], limits: ProgramLimits
) -> asyncio.subprocess.Process:
    asked = {
        "parent": os.getpid(),
        "report": told.fileno(),
        "folder": folder,
        "readable": [sys.prefix, sys.base_prefix, sys.exec_prefix, *_READABLE, *limits.readable],
        "requires": limits.requires,
        "limits": {
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.file_mb << 20,
            "open_files": limits.open_files,
        },
    }
    program = [sys.executable, "-s", "-P", "-u", "-X", "utf8", "main.py"]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(asked), *program),
        stdin=stdin,
        stdout=stdout,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env=_environment(folder),
        pass_fds=[told.fileno()],
        start_new_session=True,
    )


async def _is_overdue(process: asyncio.subprocess.Process, output: _Output, limits: ProgramLimits) -> bool:
    """Has the program to be killed at its deadline?

    Waits for its end, which is unblocked by the deadline, by cancellation and, at the next look, by too much output or
    too many threads.
    """
    now = asyncio.get_running_loop().time
    deadline, ended = now() + limits.wall_s, asyncio.create_task(process.wait())
    while now() < deadline:
        await asyncio.wait((ended,), timeout=min(_LOOK_S, deadline - now()))
        is_flood = output.num_bytes > limits.file_mb << 20
        if ended.done() or is_flood or _num_threads(process.pid) > limits.threads:
            return False
    return True


def _num_threads(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()  # `PID (NAME) STATE ...`, see proc(5)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(status.rpartition(")")[2].split()[17])


class _Output(asyncio.Protocol):
    """What a program writes: the first `most` bytes are kept."""

    def __init__(self, most: int) -> None:
        self.most, self.kept, self.num_bytes = most, bytearray(), 0
        self.ended = asyncio.get_running_loop().create_future()

    @property
    def is_cut(self) -> bool:
        return self.num_bytes > self.most

    def data_received(self, data: bytes) -> None:
        self.kept += data[: self.most - len(self.kept)]
        self.num_bytes += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Where to read and where to write."""
    read, write = os.pipe()
    with os.fdopen(read, "rb", 0) as reading, os.fdopen(write, "wb", 0) as writing:
        yield reading, writing


# ----------------------------------------------------------------------------------------------------------- its folder


@asynccontextmanager
async def _folder(code: str) -> AsyncIterator[str]:
    """A folder with `main.py` in it, as a path without symbolic links; removed on leaving."""
    try:
        top = _written(code)
    except OSError as error:
        raise ToolError(f"cannot write a program into a temporary folder: {error}") from error
    try:
        yield f"{top}/{_HOME}"
    finally:
        try:
            await asyncio.to_thread(_remove, top)
        except OSError as error:
            raise ToolError(f"cannot remove the folder of a program, {top}: {error}") from error


def _written(code: str) -> str:
    top = Path(tempfile.mkdtemp(prefix="rlsys-")).resolve()
    try:
        (top / _HOME).mkdir()
        (top / _HOME / "main.py").write_bytes(code.encode(errors="replace"))
    except OSError:
        _remove(str(top))
        raise
    return str(top)


_HOME = "home"
"""The program's folder in the one that is made for it, where it can write nothing."""


def _remove(top: str) -> None:
    """Delete a folder that holds nothing but `_HOME`, however deep that is.

    What is nested is moved up into `top` first, under a number: no path is long, and no more than two folders are open.
    """
    above = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        folders, number = [_HOME] if _HOME in os.listdir(above) else [], itertools.count()  # noqa: PTH208
        while folders:
            inner = os.open(folders[-1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            try:
                nested = _emptied(inner, above, number)
            finally:
                os.close(inner)
            os.rmdir(folders.pop(), dir_fd=above)
            folders += nested
    finally:
        os.close(above)
    Path(top).rmdir()


def _emptied(folder: int, above: int, number: Iterator[int]) -> list[str]:
    """Delete the files of a folder and move its folders up; returns their names there."""
    nested: list[str] = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.name, 0o700, dir_fd=folder)  # it may have been made without
            nested.append(str(next(number)))
            os.rename(entry.name, nested[-1], src_dir_fd=folder, dst_dir_fd=above)
        else:
            os.unlink(entry.name, dir_fd=folder)
    return nested


# -------------------------------------------------------------------------------------------------- what it is told of


def _reported(line: str, process: asyncio.subprocess.Process, is_timeout: bool) -> tuple[str, ...]:
    """The guards that the launcher tells of. Raises what `run_python` does."""
    if line.startswith("!"):
        raise SandboxError(
            f"cannot run a program in the sandbox: {line[1:]}; see "
            f"`rlsys.agents.sandbox.python_sandbox.ProgramLimits.requires`"
        )
    if not line and not is_timeout:
        raise ToolError(f"the launcher of the sandbox, {_LAUNCHER}, ended with exit code {process.returncode}")
    return tuple(line.split())


def _environment(folder: str) -> dict[str, str]:
    """All there is of it; with a fixed hash seed, so that the same program writes the same."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    home = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return {**home, **threads, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
