"""Sandbox for Python code that a model wrote: `run_python`, and the same as a tool, `python_tool`.

    ran = await run_python("print(6 * 7)")          # PythonResult(output="42\\n", exit_code=0, ...)
    toolbox = Toolbox(python_tool(ProgramLimits(wall_s=5)))

The program is a fresh interpreter in a temporary folder, with a clean environment. Its guards, in this order:

| guard | stops |
| --- | --- |
| limits of the kernel (`setrlimit`) | processor time, address space, size of a file, open files; no core dumps |
| `landlock` | reading and writing files outside the folder; the interpreter and the system's libraries can be read |
| `seccomp` | system calls that are not on a list: the network; starting, signalling and tracing processes |
| `seccomp` | also changes of the mode, owner or times of any file, set-uid and set-gid files, and extended attributes |
| `seccomp` | where Landlock is older than version 3 (Linux 6.2), also truncation of files that can be read |
| `bubblewrap` | seeing other files, processes and the network at all; its folder is in memory, with a limited size |
| the deadline | the program is killed at it, when the episode is cancelled, and when the parent process ends |

`bubblewrap` is used where it works: it is a program that not every machine has. Root's capabilities are dropped as
well. The program can start threads, but no process. If the kernel lacks a guard of
`ProgramLimits.requires`, nothing runs and `SandboxError` is raised; `PythonResult.guards` lists the active guards.
Linux only, x86-64 and ARM64.

The sandbox is for code that a policy writes while it learns: loops, floods of output, deletions, a look at the answers.
It does not withstand a deliberate attack. The program shares the kernel, the user id and the disk with the training
run. It can keep several cores busy until `ProgramLimits.cpu_s` is used up, and without `bubblewrap` it sees the names,
sizes and times of all files. Against attacks, run code in a container or virtual machine, and call that from a tool.

Starting a program costs about 50 ms of one core, mostly for the interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from rlsys.agents.tools import Tool, tool
from rlsys.errors import SandboxError, ToolError
from rlsys.sandbox import bubblewrap
from rlsys.sandbox.bubblewrap import BubblewrapUnusable
from rlsys.sandbox.program_usage import LauncherReport, StoredFiles, WrittenBytes, num_threads
from rlsys.sandbox.programs import CapturedOutput, capturing

Guard: TypeAlias = Literal["bubblewrap", "landlock", "seccomp"]
Watched: TypeAlias = Literal["wall_s", "file_mb", "total_mb", "files", "threads"]
"""Fields of `ProgramLimits` that the parent process checks."""

_LAUNCHER = Path(__file__).with_name("confinement.py")
_LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf")
_READABLE = (sys.prefix, sys.base_prefix, sys.exec_prefix, *_LIBRARIES)
_HOME = "home"
"""The program's folder, inside a temporary folder in which the program cannot write."""
_EXCESS = {
    "file_mb": "too much output",
    "total_mb": "too many bytes written",
    "files": "too many files",
    "threads": "too many threads",
}
_GRACE_S = 5.0
"""Seconds between the program's deadline, which normally ends it, and the tool's."""
_LOOK_S = 0.05
"""Seconds between two checks of a program's use."""
_FIRST_LOOK_S = 0.005
"""The same until the launcher has reported: less than the start of an interpreter, which follows."""
_SPARE_MB = 8
"""Room in a folder in memory beyond `ProgramLimits.total_mb`, so that a check can see the excess."""
_REASON_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Limits of a program, and its required guards."""

    wall_s: float = 10.0
    """Seconds from start until the program is killed."""
    cpu_s: int = 10
    """Processor seconds, over all threads."""
    memory_mb: int = 1024
    """Address space, which exceeds the memory in use: 1024 is enough to import numpy, not torch."""
    file_mb: int = 16
    """Size of each written file, and of the whole output."""
    total_mb: int = 128
    """Size of everything that the program writes: output, files, and files that it deletes. With more, checked 20 times
    a second, the program is killed. With `bubblewrap`, its folder is full at 8 MB more."""
    files: int = 1000
    """Files, folders and links in the program's folder. With more, checked 20 times a second, or with paths too long to
    count them, the program is killed."""
    open_files: int = 64
    threads: int = 64
    """With more threads, checked 20 times a second, the program is killed."""
    output_bytes: int = 20_000
    """Bytes kept from the beginning of the output; the rest is discarded."""
    readable: tuple[str, ...] = ()
    """Files and folders that the program may read besides the interpreter's, e.g. a data set."""
    requires: tuple[Guard, ...] = ("landlock", "seccomp")
    """Guards without which nothing runs. Without `seccomp` the program could reach the network and start processes that
    outlive it; without `landlock` it could read and delete every file that the training run can. Add `bubblewrap` to
    refuse machines where it does not work."""
    newest_landlock: int | None = None
    """Newest version of Landlock that is used, to see what an older kernel guards; None for the kernel's."""


@dataclass(frozen=True)
class PythonResult:
    """Output of a program, and how it ended."""

    output: str
    """Stdout and stderr, in order. Bytes that are not UTF-8 are shown as �."""
    exit_code: int
    """Exit code, or minus the number of the signal that killed the program, e.g. -24 (SIGXCPU) after
    `ProgramLimits.cpu_s`."""
    seconds: float
    """Duration, including the start of the interpreter."""
    exceeded: Watched | None = None
    """Field of `ProgramLimits` for which the program was killed; None if it ended otherwise."""
    is_cut: bool = False
    """True if the program wrote more than `ProgramLimits.output_bytes`."""
    guards: tuple[str, ...] = ()
    """Active guards, besides the limits."""
    landlock_version: int = 0
    """Version of `landlock`, 0 without it. It stops truncation of files from version 3 (Linux 6.2); below, `seccomp`
    does, and `landlock` is no active guard without that."""

    @property
    def is_timeout(self) -> bool:
        """True if the program was killed at `ProgramLimits.wall_s`."""
        return self.exceeded == "wall_s"

    def __str__(self) -> str:
        """Format the output with notes in brackets on how the program ended: `1\\n[exit code 3]`."""
        notes = ["[output cut]"] if self.is_cut else []
        if self.is_timeout:
            notes.append(f"[killed after {self.seconds:.1f} s]")
        elif self.exceeded is not None:
            notes.append(f"[killed: {_EXCESS[self.exceeded]}]")
        elif self.exit_code < 0:
            notes.append(f"[killed by {signal.Signals(-self.exit_code).name}]")
        elif self.exit_code > 0:
            notes.append(f"[exit code {self.exit_code}]")
        if not self.output and not notes:
            return "[no output]"
        return "\n".join([*([self.output.removesuffix("\n")] if self.output else []), *notes])


async def run_python(code: str, *, stdin: str = "", limits: ProgramLimits = ProgramLimits()) -> PythonResult:
    """Run a program, with `stdin` as its standard input, until it ends or is killed.

    Raises `SandboxError` if a required guard is missing, and `ToolError` if the machine has no room for another process
    or the program's folder cannot be removed. Cancellation kills the program.
    """
    began = time.monotonic()
    output = CapturedOutput(limits.output_bytes)
    bwrap = await asyncio.to_thread(_bubblewrap, limits.requires)
    report, report_socket = LauncherReport.pair()
    with report.receiver, report_socket:
        async with _folder(code) as folder:
            with (
                closing(StoredFiles(folder, limits.files, is_apart=bwrap is not None)) as stored,
                closing(WrittenBytes()) as written,
            ):
                async with _start_program(folder, stdin, report_socket, output, limits, bwrap) as process:
                    exceeded = await _wait_for_limit(process, report, stored, written, output, limits)
        report.look()
    assert process.returncode is not None
    text = output.kept.replace(os.fsencode(folder + os.sep), b"").decode(errors="replace")
    landlock, *launched = _parse_report(report.line, process, exceeded, text)
    guards = (*(("bubblewrap",) if bwrap else ()), *launched)
    exit_code = process.returncode if bwrap is None else _inner_exit_code(process.returncode)
    return PythonResult(text, exit_code, time.monotonic() - began, exceeded, output.is_cut, guards, int(landlock))


def python_tool(limits: ProgramLimits = ProgramLimits()) -> Tool:
    """Make the tool `python`, which runs a program and returns its output."""

    async def python(code: Annotated[str, Field(description="A whole program: print what you want to see.")]) -> str:
        """Run a Python program. It has no network and starts from nothing each time."""
        return str(await run_python(code, limits=limits))

    return tool(python, timeout_s=limits.wall_s + _GRACE_S, max_chars=limits.output_bytes + 200)


# ---------------------------------------------------------------------------------------------------------- the process


def _bubblewrap(requires: Sequence[Guard]) -> str | None:
    """Path of a bubblewrap that works here; None if there is none."""
    try:
        return bubblewrap.find(_READABLE)
    except BubblewrapUnusable as error:
        if "bubblewrap" in requires:
            raise _refusal(error) from error
        return None


@contextmanager
def _bubblewrap_command(bwrap: str | None, folder: str, limits: ProgramLimits) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the command line of bubblewrap and the descriptors that it inherits; both are empty without it."""
    if bwrap is None:
        yield [], []
        return
    readable = (*_READABLE, *limits.readable, str(_LAUNCHER))
    num_bytes = (limits.total_mb + _SPARE_MB) << 20
    with Path(folder, "main.py").open("rb") as main:
        number = main.fileno()
        yield bubblewrap.command(bwrap, folder=folder, main=number, readable=readable, num_bytes=num_bytes), [number]


@asynccontextmanager
async def _start_program(
    folder: str,
    stdin: str,
    report_socket: socket.socket,
    output: CapturedOutput,
    limits: ProgramLimits,
    bwrap: str | None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the program; on exit, kill its process group and read its output."""
    asked = {
        "parent": os.getpid() if bwrap is None else 1,  # as the launcher sees it
        "report": report_socket.fileno(),
        "folder": folder,
        "readable": (*_READABLE, *limits.readable),
        "newest_landlock": limits.newest_landlock,
        "requires": [guard for guard in limits.requires if guard != "bubblewrap"],
        "limits": {
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.file_mb << 20,
            "open_files": limits.open_files,
        },
    }
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(asked))
    program = (sys.executable, "-s", "-P", "-u", "-X", "utf8", "main.py")
    async with capturing(output) as write:
        with tempfile.TemporaryFile() as given, _bubblewrap_command(bwrap, folder, limits) as (wrapped, files):
            try:
                given.write(stdin.encode(errors="replace"))
                given.seek(0)
                creation = asyncio.create_subprocess_exec(
                    *(*wrapped, *launcher, *program),
                    stdin=given,
                    stdout=write,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=folder,
                    env=_environment(folder),
                    pass_fds=[report_socket.fileno(), *files],
                    start_new_session=True,
                )
                process = await _finish_or_kill(asyncio.ensure_future(creation))
            except OSError as error:
                raise ToolError(f"cannot start a program: {error}") from error
        write.close()  # the program has inherited both
        report_socket.close()
        try:
            yield process
        finally:
            await _kill_group(process)


async def _finish_or_kill(creation: asyncio.Future[asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    """Wait for the process. Cancellation kills its group.

    asyncio would kill the process alone. A bubblewrap that has just forked would then leave a child that waits forever.
    """
    try:
        return await asyncio.shield(creation)
    except asyncio.CancelledError:
        with suppress(OSError):  # it was not even started
            await _kill_group(await creation)
        raise


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _wait_for_limit(
    process: asyncio.subprocess.Process,
    report: LauncherReport,
    stored: StoredFiles,
    written: WrittenBytes,
    output: CapturedOutput,
    limits: ProgramLimits,
) -> Watched | None:
    """Wait for the program; return the limit for which it has to be killed, or None if it has ended.

    Waits for the program's end; unblocked by the deadline, by cancellation and, at the next check, by an exceeded
    limit. No limit of the kernel counts the files or the written bytes of a process, so they are polled. The first look
    comes soon, because a program can hide its written bytes from a later one.
    """
    now = asyncio.get_running_loop().time
    deadline, ended = now() + limits.wall_s, asyncio.create_task(process.wait())
    while now() < deadline:
        pause_s = _FIRST_LOOK_S if report.pid is None else _LOOK_S
        await asyncio.wait((ended,), timeout=min(pause_s, deadline - now()))
        if ended.done():
            return None
        if output.num_bytes > limits.file_mb << 20:
            return "file_mb"
        report.look()
        if report.pid is None:  # the program has not started
            continue
        if num_threads(report.pid) > limits.threads:
            return "threads"
        num_files, num_bytes = stored.count(report.pid)
        if num_files > limits.files:
            return "files"
        if max(num_bytes, written.count(report.pid)) > limits.total_mb << 20:
            return "total_mb"
    return "wall_s"


# ----------------------------------------------------------------------------------------------------------- its folder


@asynccontextmanager
async def _folder(code: str) -> AsyncIterator[str]:
    """Create a folder with `main.py`, and remove it on exit. The path has no symbolic links."""
    try:
        top = _write_code(code)
    except OSError as error:
        raise ToolError(f"cannot write a program into a temporary folder: {error}") from error
    try:
        yield f"{top}/{_HOME}"
    finally:
        try:
            await asyncio.to_thread(_remove, top)
        except OSError as error:
            raise ToolError(f"cannot remove the folder of a program, {top}: {error}") from error


def _write_code(code: str) -> str:
    top = Path(tempfile.mkdtemp(prefix="rlsys-")).resolve()
    try:
        (top / _HOME).mkdir()
        (top / _HOME / "main.py").write_bytes(code.encode(errors="replace"))
    except OSError:
        _remove(str(top))
        raise
    return str(top)


def _remove(top: str) -> None:
    """Delete a folder that contains only `_HOME`, at any depth.

    Nested folders are first moved up into `top`, named by numbers: paths stay short, and at most two folders are open.
    """
    above = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        folders, number = [_HOME] if _HOME in os.listdir(above) else [], itertools.count()  # noqa: PTH208
        while folders:
            inner = os.open(folders[-1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            try:
                nested = _empty_folder(inner, above, number)
            finally:
                os.close(inner)
            os.rmdir(folders.pop(), dir_fd=above)
            folders += nested
    finally:
        os.close(above)
    Path(top).rmdir()


def _empty_folder(folder: int, above: int, number: Iterator[int]) -> list[str]:
    """Delete the files of a folder and move its folders up; returns their new names."""
    nested: list[str] = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.name, 0o700, dir_fd=folder)  # the program may have removed permissions
            nested.append(str(next(number)))
            os.rename(entry.name, nested[-1], src_dir_fd=folder, dst_dir_fd=above)
        else:
            os.unlink(entry.name, dir_fd=folder)
    return nested


# ---------------------------------------------------------------------------------------------- report and environment


def _parse_report(line: str, process: asyncio.subprocess.Process, exceeded: Watched | None, text: str) -> list[str]:
    """The version of Landlock, and the names of the active guards."""
    if line.startswith("!"):
        raise _refusal(line[1:])
    if not line and exceeded is None:
        what = f"the launcher of the sandbox, {_LAUNCHER}, ended with exit code {process.returncode}"
        raise ToolError(f"{what}: {text.strip()[:_REASON_CHARS]}" if text.strip() else what)
    return line.split() or ["0"]  # it was killed before it reported


def _refusal(reason: object) -> SandboxError:
    return SandboxError(
        f"cannot run a program in the sandbox: {reason}; see `rlsys.sandbox.python_sandbox.ProgramLimits.requires`"
    )


def _inner_exit_code(code: int) -> int:
    """Exit code of the program from that of bubblewrap, which ends with 128 + the number of a signal, as shells do."""
    return 128 - code if code - 128 in signal.valid_signals() else code


def _environment(folder: str) -> dict[str, str]:
    """The whole environment of a program; the hash seed is fixed, so that the same program writes the same output."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    home = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return {**home, **threads, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
