"""Sandbox for model-written programs: allowed and forbidden actions, and complete clean-up."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlsys.agents.tool_calls import ToolCall
from rlsys.agents.tools import Toolbox
from rlsys.errors import SandboxError
from rlsys.sandbox import confinement as confined
from rlsys.sandbox import python_sandbox as sandbox
from rlsys.sandbox.program_usage import StoredFiles, WrittenBytes, num_threads
from rlsys.sandbox.python_sandbox import ProgramLimits, PythonResult, python_tool, run_python
from tests.by_day import first_by_day
from tests.processes import is_gone, requires_bubblewrap

pytestmark = pytest.mark.slow

FAST = ProgramLimits(wall_s=20, cpu_s=5, memory_mb=256)
FOREVER = "while True: pass"
FOR_A_MINUTE = f"60.{os.getpid()}"
"""An argument of `sleep` by which the process can be found."""


WAYS = {
    f"{'' if wraps else 'no '}bubblewrap{f', landlock {version}' if version else ''}": (wraps, version)
    for version in (None, 1, 2, 3)
    for wraps in (True, False)
}
"""Every test runs with and without bubblewrap, and with the versions of Landlock that older kernels have."""
NEWEST_LANDLOCK: ContextVar[int | None] = ContextVar("the version that `ran` uses", default=None)


@pytest.fixture(autouse=True, params=first_by_day(WAYS, 2))
def has_bubblewrap(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[bool]:
    """Is there bubblewrap? Without it, the PATH has `setarch` alone."""
    wraps, version = WAYS[request.param]
    if wraps:
        requires_bubblewrap()
    else:
        bin_folder = tmp_path_factory.mktemp("bin")
        if setarch := shutil.which("setarch"):
            (bin_folder / "setarch").symlink_to(setarch)
        monkeypatch.setenv("PATH", str(bin_folder))
    token = NEWEST_LANDLOCK.set(version)
    yield wraps
    NEWEST_LANDLOCK.reset(token)


def ran(code: str, *, stdin: str = "", limits: ProgramLimits = FAST) -> PythonResult:
    return asyncio.run(run_python(code, stdin=stdin, limits=replace(limits, newest_landlock=NEWEST_LANDLOCK.get())))


# -------------------------------------------------------------------------------------------------- what it comes to


def test_a_program_reads_its_input_and_says_how_it_ended():
    result = ran("import sys; print(input() * 2); print('no', file=sys.stderr); sys.exit(3)", stdin="ab\n")
    assert (result.output, result.exit_code, result.is_timeout) == ("abab\nno\n", 3, False)
    assert str(result) == "abab\nno\n[exit code 3]"


def test_this_machine_has_every_guard_and_the_result_tells(has_bubblewrap: bool):
    result = ran("")
    assert result.guards == (*(("bubblewrap",) if has_bubblewrap else ()), "landlock", "seccomp")
    assert result.landlock_version == confined.landlock_version(NEWEST_LANDLOCK.get()) > 0


def test_input_that_is_not_read_is_no_problem():
    assert ran("print(1)", stdin="x" * 1_000_000).output == "1\n"


def test_tracebacks_show_lines_of_the_program_without_host_folders():
    assert ran("def f(:").output.startswith('  File "main.py", line 1')
    result = ran("x = 1\nx / 0")
    assert 'File "main.py", line 2, in <module>\n    x / 0' in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero\n")


def test_bytes_that_are_not_text_are_shown_as_such():
    assert ran(r"import sys; sys.stdout.buffer.write(b'a\xffb')").output == "a\N{REPLACEMENT CHARACTER}b"


def test_code_that_is_not_encodable_fails_inside_the_sandbox():
    assert "main.py" in ran("\udc80 = 1").output
    assert ran("\0").exit_code == 1


def test_the_same_program_writes_the_same():
    code = "print({*'abcdefgh'})"
    assert ran(code).output == ran(code).output


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (PythonResult("1\n", 0, 0.1), "1"),
        (PythonResult("", 0, 0.1), "[no output]"),
        (PythonResult("1", -24, 0.1), "1\n[killed by SIGXCPU]"),
        (PythonResult("1", -9, 2.04, "wall_s", is_cut=True), "1\n[output cut]\n[killed after 2.0 s]"),
        (PythonResult("", -9, 2.04, "total_mb"), "[killed: too many bytes written]"),
    ],
)
def test_the_model_is_told_what_it_cannot_see(result: PythonResult, text: str):
    assert str(result) == text


def test_the_tool_answers_with_the_output_whatever_the_program_does():
    toolbox = Toolbox(python_tool(FAST))
    calls = [ToolCall("python", {"code": code}, code) for code in ("print(6 * 7)", "1 / 0", "raise SystemExit(2)")]
    fine, error, left = asyncio.run(toolbox.run(calls))
    assert (fine.content, fine.outcome) == ("42", "ok")
    assert error.content.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert left.content == "[exit code 2]"


# ------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.slow
def test_an_endless_loop_is_killed_and_its_output_kept():
    result = ran(f"print('begun')\n{FOREVER}", limits=ProgramLimits(wall_s=3.0))
    assert (result.output, result.is_timeout, result.exit_code) == ("begun\n", True, -9)
    assert 3.0 <= result.seconds < 20


@pytest.mark.slow
def test_processor_time_is_limited():
    result = ran(FOREVER, limits=ProgramLimits(wall_s=30, cpu_s=1))
    assert not result.is_timeout and str(result) == "[killed by SIGXCPU]"


def test_memory_is_limited():
    assert ran("x = bytearray(1 << 30)").output.endswith("MemoryError\n")


def test_a_flood_of_output_is_read_and_cut():
    result = ran("print('x' * 10_000_000); print('end')", limits=ProgramLimits(output_bytes=1000))
    assert (result.output, result.is_cut, result.exit_code) == ("x" * 1000, True, 0)


def test_output_without_end_is_killed_long_before_the_deadline():
    result = ran("while True: print('x' * 100_000)", limits=ProgramLimits(wall_s=60, file_mb=1))
    assert (result.is_cut, result.exceeded, result.exit_code) == (True, "file_mb", -9)


def test_a_huge_file_cannot_be_written():
    assert "File too large" in ran("open('a', 'wb').write(bytes(20 << 20))").output


WRITTEN = {
    "files": "open(f'f{i}', 'wb').write(bytes(1 << 20))",
    "one file, rewritten": "open('f', 'wb').write(bytes(1 << 20))",
    "deleted files": "open('f', 'wb').write(bytes(1 << 20)); os.remove('f')",
    "held open": "f = os.open('f', 66); os.write(f, bytes(1 << 20)); os.remove('f'); i < 40 or time.sleep(60)",
    "mapped files": "f = open(f'f{i}', 'w+b'); f.truncate(1 << 20); mmap.mmap(f.fileno(), 0)[:] = bytes(1 << 20)",
    "copies": "open('f', 'wb').write(bytes(1 << 20)); shutil.copyfile('f', f'f{i}')",
    "files in folders": "os.mkdir('d'); os.chdir('d'); open('f', 'wb').write(bytes(1 << 20))",
    "files in a folder that others cannot read": "i or (os.mkdir('d', 0o300), os.chdir('d')); "
    "open(f'f{i}', 'wb').write(bytes(1 << 20))",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_the_bytes_that_it_writes_are_limited_in_total(how: str):
    code = f"import itertools, mmap, os, shutil, time\nfor i in itertools.count():\n    {WRITTEN[how]}"
    result = ran(code, limits=ProgramLimits(wall_s=60, total_mb=30))
    assert result.exceeded in ("total_mb", "files") or is_full(result)
    assert result.seconds < 20


def is_full(result: PythonResult) -> bool:
    """Did the program fill its folder in memory before a check saw it?"""
    return "No space left on device" in result.output or result.exit_code == -signal.SIGBUS


def test_a_thread_that_outlives_the_main_one_is_still_counted():
    code = """
import ctypes, threading, time
def write():
    time.sleep(0.5)
    while True:
        with open("f", "wb") as file:
            file.write(bytes(1 << 20))
threading.Thread(target=write).start()
time.sleep(0.3)  # until a check has seen the program
ctypes.CDLL(None).pthread_exit(None)
"""
    result = ran(code, limits=ProgramLimits(wall_s=20, total_mb=30))
    assert result.exceeded == "total_mb" or is_full(result)


def test_what_an_ended_process_used_is_what_was_read_last():
    code = "import sys; print('x' * 1000, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process, closing(WrittenBytes()) as written:
        assert process.stdin and process.stdout
        process.stdout.readline()
        before = written.count(process.pid)
        assert 1000 < before < 10_000
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with closing(WrittenBytes()) as late, closing(StoredFiles("/tmp", 10, is_apart=True)) as stored:
            assert late.count(process.pid) in (0, before)
            assert stored.count(process.pid) == (0, 0)
        assert num_threads(process.pid) <= 1
        process.wait()
        assert (written.count(process.pid), num_threads(process.pid)) == (before, 0)


UNCOUNTED = {
    "mapped files that are deleted": "f = open('f', 'w+b'); f.truncate(1 << 20); os.remove('f'); "
    "held.append(mmap.mmap(f.fileno(), 0)); held[-1][:] = bytes(1 << 20)",
    "files in a folder that is renamed": "i or os.mkdir('d0'); os.rename(f'd{i}', f'd{i + 1}'); "
    "open(f'd{i + 1}/f{i}', 'w').close()",
}


@pytest.mark.parametrize("how", UNCOUNTED)
def test_a_folder_in_memory_counts_what_has_no_name(has_bubblewrap: bool, how: str):
    if not has_bubblewrap:
        pytest.skip("only the kernel's count of a file system sees it")
    code = f"import itertools, mmap, os\nheld = []\nfor i in itertools.count():\n    {UNCOUNTED[how]}"
    result = ran(code, limits=ProgramLimits(wall_s=60, total_mb=30, files=500, open_files=4096))
    assert result.exceeded in ("total_mb", "files") or is_full(result)


ENTRIES = {
    "files": "open(f'f{i}', 'w').close()",
    "folders": "os.mkdir(f'f{i}')",
    "nested folders": "os.mkdir('d'); os.chdir('d')",
    "files below long paths": "os.mkdir('d' * 200); os.chdir('d' * 200)",
    "symbolic links": "os.symlink('/', f'f{i}')",
    "hard links": "os.link('main.py', f'f{i}')",
    "files in a folder that others cannot read": "i or (os.mkdir('d', 0o300), os.chdir('d')); open(f'{i}', 'w')",
}


@pytest.mark.parametrize("what", ENTRIES)
def test_the_number_of_files_is_limited(what: str):
    code = f"import itertools, os\nfor i in itertools.count():\n    {ENTRIES[what]}"
    result = ran(code, limits=ProgramLimits(wall_s=60, files=100))
    assert result.exceeded == "files" and result.seconds < 20


def test_files_below_the_limits_are_no_problem():
    code = "import time\nfor i in range(90): open(f'f{i}', 'wb').write(bytes(1 << 16))\ntime.sleep(0.2); print('fine')"
    assert ran(code, limits=ProgramLimits(files=100, total_mb=8)).output == "fine\n"


def test_open_files_are_limited():
    assert "Too many open files" in ran("held = [open('a', 'w') for _ in range(100)]").output


def test_limits_cannot_be_raised():
    code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))"
    assert "ValueError: not allowed to raise maximum limit" in ran(code).output


# --------------------------------------------------------------------------------------------------------- what it sees


def test_the_working_folder_is_writable_and_removed_afterwards():
    code = "from pathlib import Path as P\nP('a').mkdir(); P('a/b').write_text('c'); print(P('a/b').read_text())\n"
    result = ran(code + "import os; print(os.getcwd() == str(P.home())); print('cwd', os.getcwd())")
    c, is_home, folder = result.output.splitlines()
    assert (c, is_home) == ("c", "True")
    assert not Path(folder.removeprefix("cwd ")).exists()


def test_its_environment_holds_nothing_of_the_parents():
    names = json.loads(ran("import json, os; print(json.dumps([*os.environ]))").output)
    known = {"HOME", "TMPDIR", "PATH", "LANG", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE", "PWD"}
    threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"}
    assert set(names) <= known | threads
    assert is_hidden(ran("import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()"))


def is_hidden(result: PythonResult) -> bool:
    """Did the program end because a file is not for it, or not there?"""
    return any(error in result.output for error in ("PermissionError", "FileNotFoundError"))


def test_files_outside_are_readable_only_when_allowed_and_never_writable(tmp_path: Path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text("42")
    for attempt in (f"print(open({str(answers)!r}).read())", f"open({str(answers)!r}, 'w')"):
        assert is_hidden(ran(attempt))
    assert is_hidden(ran(f"import os; os.remove({str(answers)!r})"))
    given = ProgramLimits(readable=(str(tmp_path),))
    assert ran(f"print(open({str(answers)!r}).read())", limits=given).output == "42\n"
    refused = ran(f"open({str(answers)!r}, 'w')", limits=given).output
    assert "PermissionError" in refused or "Read-only file system" in refused
    assert answers.read_text() == "42"


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
        "import ctypes as c; raise SystemExit('Operation not permitted' if c.CDLL(None).socket(2, 1, 0) < 0 else 0)",
    ],
)
def test_there_is_no_network(attempt: str):
    assert "Operation not permitted" in ran(attempt).output


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_SEQPACKET"])
def test_no_pair_of_sockets_can_speak_to_a_third(kind: str):
    assert "Operation not permitted" in ran(f"import socket as s; s.socketpair(s.AF_UNIX, s.{kind})").output


def test_nothing_reaches_a_socket_of_another_process(tmp_path: Path):
    named, abstract = tmp_path / "socket", f"\0rlsys-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as a, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as b:
        a.bind(str(named))
        b.bind(abstract)
        code = f"""
import socket as s
for kind in (s.SOCK_STREAM, s.SOCK_DGRAM):
    for address in ({str(named)!r}, {abstract!r}):
        for send in (
            lambda a: a.sendto(b"x", address), lambda a: a.sendmsg([b"x"], [], 0, address), lambda a: a.connect(address)
        ):
            try:
                send(s.socketpair(s.AF_UNIX, kind)[0])
            except PermissionError:
                print(end=".")
"""
        assert ran(code).output == "." * 12
        for receiver in (a, b):
            receiver.setblocking(False)
            with pytest.raises(BlockingIOError):
                receiver.recv(1)


def test_asyncio_works():
    code = """
import asyncio, sys
async def main():
    await asyncio.to_thread(print, 1)
asyncio.run(main())
"""
    assert ran(code).output == "1\n"


def test_the_program_cannot_change_metadata_of_files_outside(tmp_path: Path):
    given = tmp_path / "given"
    given.write_text("data")
    before = given.stat()
    limits = ProgramLimits(readable=(str(given),))
    code = f"""
import os
f = {str(given)!r}
d = os.open(f, os.O_RDONLY)
def refused(change):
    try:
        change()
    except OSError:
        print(end=".")
refused(lambda: os.chmod(f, 0))
refused(lambda: os.chmod(d, 0))
refused(lambda: os.chown(f, -1, -1))
refused(lambda: os.chown(d, -1, -1))
refused(lambda: os.utime(f, (1, 1)))
refused(lambda: os.utime(d, (1, 1)))
refused(lambda: os.setxattr(f, "user.a", b"1"))
refused(lambda: os.setxattr(d, "user.a", b"1"))
refused(lambda: os.removexattr(f, "user.a"))
refused(lambda: os.truncate(f, 0))
refused(lambda: os.link(f, "a"))
refused(lambda: os.rename(f, "a"))
"""
    assert ran(code, limits=limits).output == "." * 12
    after = given.stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_size) == (before.st_mode, before.st_mtime_ns, before.st_size)
    assert given.read_text() == "data"


def test_files_in_its_folder_can_be_replaced_and_shortened():
    code = """
import os
with open("f", "w") as file: file.write("abc")
with open("f", "w+") as file: print(file.read() == "", file.write("abcd"))
os.close(os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o1755))
with open("f", "r+") as file: print(file.write("abc"), file.truncate(1), os.umask(0))
print(os.path.getsize("f"), os.stat(os.open("g", os.O_CREAT | os.O_RDONLY, 0o755)).st_mode & 0o7777 == 0o755)
"""
    assert ran(code).output == "True 4\n3 1 18\n1 True\n"


def test_system_calls_of_newer_kernels_do_not_exist():
    for number in (452, 463, 469):  # fchmodat2, setxattrat, file_setattr
        assert ran(f"{CALL}\nprint(call({number}, -100, b'.', 0, 0))").output == f"{errno.ENOSYS}\n"


CALL = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return ctypes.get_errno() if c.syscall(*arguments) < 0 else 0
""".strip()


def numbers(column: int) -> dict[str, int]:
    """All system calls by name that the filter has a rule for, but those of the launcher and signals."""
    rules = {**confined._ONLY_IF, **confined._ONE_OF, **confined._OPENING}
    ruled = {name: rule[0][column] for name, rule in rules.items()} | {
        n: c[column] for n, c in confined._IN_MEMORY.items()
    }
    tables = confined.listed(confined._ALLOWED, column) | confined.listed(confined._UNSUPPORTED, column)
    return tables | {name: number for name, number in ruled.items() if number is not None}


def test_every_system_call_outside_the_list_is_refused():
    column = confined._MACHINES[platform.machine()][0]
    probes = {335, 336}  # uretprobe and uprobe of x86: no filter sees them; they end the program
    others = [n for n in range(confined._FIRST_UNKNOWN) if n not in {*numbers(column).values(), *probes}]
    result = ran(f"{CALL}\nprint({{call(number, 0, 0, 0, 0) for number in {others}}})")
    assert result.output == f"{{{errno.EPERM}}}\n" and len(others) > 200


@pytest.mark.parametrize(
    ("header", "column", "numbered"),
    [
        (f"{platform.machine()}-linux-gnu/asm/unistd_64.h", 0, r"#define __NR_(\w+)\s+(\d+)"),
        ("asm-generic/unistd.h", 1, r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
    ],
)
def test_system_calls_have_the_numbers_of_the_kernels_headers(header: str, column: int, numbered: str):
    file = Path("/usr/include") / header
    if not file.exists():
        pytest.skip(f"no {file}; the package linux-libc-dev has it")
    kernels = dict(re.findall(numbered, file.read_text()))
    kernels.setdefault("newfstatat", kernels.get("fstatat", ""))
    own = {"execve": confined._EXECVE, "kill": confined._KILL, "tgkill": confined._TGKILL}
    ours = numbers(column) | {name: given[column] for name, given in own.items()}
    assert [name for name, number in ours.items() if str(number) != kernels.get(name)] == []


def test_root_has_no_powers_left():
    code = """
import ctypes, struct
data = ctypes.create_string_buffer(24)
assert ctypes.CDLL(None).capget(struct.pack("II", 0x20080522, 0), data) == 0
print(*struct.unpack("6I", data.raw))
"""
    assert ran(code).output == "0 0 0 0 0 0\n"


def test_numpy_and_threads_work():
    code = "import numpy as n, threading as t\nmine = t.Thread(target=lambda: print(n.ones(3).sum())); mine.start()"
    assert ran(code, limits=ProgramLimits()).output == "3.0\n"


# ----------------------------------------------------------------------------------------------------------- processes


def test_a_fork_bomb_is_one_process():
    code = """
import os
refused = 0
for _ in range(20):
    try:
        os.fork()
    except PermissionError:
        refused += 1
print(refused)
"""
    assert ran(code).output == "20\n"


def children() -> set[psutil.Process]:
    """Those of the test run itself; other tests may have left theirs to its end."""
    return set(psutil.Process().children())


def test_no_child_can_be_left_behind():
    before = children()
    code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    assert "PermissionError" in ran(code).output
    assert ran("import os; print(os.system('sleep 60 &') == 0)").output == "False\n"
    assert children() <= before


def test_other_processes_are_out_of_its_reach():
    for how in ("os.kill(os.getppid(), 9)", "os.killpg(os.getpgid(os.getppid()), 9)", "os.pidfd_open(os.getppid())"):
        assert "Permission" in ran(f"import os\n{how}").output
    assert str(ran("import os; os.kill(os.getpid(), 15)")) == "[killed by SIGTERM]"


@pytest.mark.parametrize(
    "how",
    [
        "fcntl.fcntl(r, fcntl.F_SETOWN, {pid})",
        "fcntl.fcntl(r, 15, struct.pack('ii', 1, {pid}))",  # F_SETOWN_EX
        "fcntl.fcntl(r, 10, 9)",  # F_SETSIG
        "fcntl.ioctl(r, 0x8901, struct.pack('i', {pid}))",  # FIOSETOWN
        "fcntl.ioctl(r, 0x8902, struct.pack('i', {pid}))",  # SIOCSPGRP
    ],
)
def test_no_file_signals_another_process(how: str):
    code = f"import os, fcntl, struct\nr, w = os.pipe()\n{how.format(pid='os.getppid()')}"
    assert "Operation not permitted" in ran(code).output


def test_landlock_alone_keeps_a_files_signals_from_another_process():
    code = f"""
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, {os.getpid()})
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b"x")
"""
    received: list[int] = []
    held = signal.signal(signal.SIGIO, lambda number, frame: received.append(number))
    try:
        launched = f"""
from rlsys.sandbox import confinement as confined
confined._prctl(38, 1)
confined.restrict_files("/tmp", ["/"], confined.landlock_version())
{code}"""
        subprocess.run([sys.executable, "-c", launched], check=True)
    finally:
        signal.signal(signal.SIGIO, held)
    assert received == []


@pytest.mark.parametrize(
    "how",
    [
        "os.sched_setaffinity({pid}, [0])",
        "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
        "os.sched_setparam({pid}, os.sched_param(0))",
        "__import__('resource').prlimit({pid}, 7, (10, 10))",
    ],
)
def test_no_other_process_is_slowed_down(how: str):
    assert "Operation not permitted" in ran(f"import os\n{how.format(pid='os.getppid()')}").output


def test_it_cannot_become_another_program():
    assert "Operation not permitted" in ran("import os; os.execv('/usr/bin/env', ['env'])").output


def test_threads_without_end_are_killed_long_before_the_deadline():
    code = "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=(60,)).start(); time.sleep(0.001)"
    result = ran(code, limits=ProgramLimits(wall_s=60))
    assert (result.exit_code, result.exceeded) == (-9, "threads") and result.seconds < 30


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setarch") is None, reason="no setarch, which shows programs another machine")
@pytest.mark.parametrize("is_apart", first_by_day([True, False]))
def test_without_seccomp_a_child_does_not_stretch_the_deadline(has_bubblewrap: bool, is_apart: bool):
    code = f"""
import asyncio, time
from rlsys.sandbox.python_sandbox import ProgramLimits, run_python
child = "import subprocess; print(subprocess.Popen(['sleep', '{FOR_A_MINUTE}'], start_new_session={is_apart}).pid)"
limits = ProgramLimits(requires=("landlock",))
print(asyncio.run(run_python(child, limits=limits)))
limits = ProgramLimits(wall_s=1, requires=("landlock",))
result = asyncio.run(run_python(child + "\\nwhile True: pass", limits=limits))
print(result.output, result.is_timeout, sep="")
"""
    command = ["setarch", "i686", sys.executable, "-c", code]
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    *pids, is_timeout = result.stdout.splitlines()
    assert time.monotonic() - began < 30 and is_timeout == "True"
    if has_bubblewrap:  # the number is that of another namespace
        assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", FOR_A_MINUTE]]
        return
    if is_apart:
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
    assert [is_gone(int(pid)) for pid in pids] == [True, True]


@pytest.mark.slow
def test_folders_nested_deeper_than_any_stack_are_removed(tmp_path: Path):
    top = tmp_path / "top"
    (top / "home").mkdir(parents=True)
    deepest = os.open(top / "home", os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("d", dir_fd=deepest)
        above, deepest = deepest, os.open("d", os.O_RDONLY, dir_fd=deepest)
        os.close(above)
    os.close(deepest)
    sandbox._remove(str(top))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("mode", [0o777, 0])
def test_folders_nested_deeper_than_any_path_are_removed(mode: int):
    code = """
import os
print(os.getcwd())
os.mkdir("0")
os.symlink("/", "1")
for _ in range(45):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
open("f", "w").close()
os.mkdir("last", MODE)
print("made")
""".replace("MODE", str(mode))
    folder, *made = ran(code).output.split()
    assert made in (["made"], [])  # 4500 bytes deep; killed if a check sees it
    assert not Path(folder).exists() and not Path(folder).parent.exists()


def test_a_cancelled_program_is_killed_and_its_folder_removed():
    ran("")  # the first program of a process tries bubblewrap before
    before = children()

    async def cancelled() -> tuple[psutil.Process, str]:
        task = asyncio.create_task(run_python(FOREVER, limits=FAST))
        while not (started := children() - before):  # noqa: ASYNC110  (another process sets no event)
            await asyncio.sleep(0)
        (child,) = started
        folder = child.cwd()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return child, folder

    child, folder = asyncio.run(cancelled())
    assert is_gone(child.pid)
    assert not Path(folder).exists()


def test_a_program_cancelled_while_it_starts_leaves_no_process():
    ran("")  # as above
    before, left = children(), []

    async def cancelled(num_turns: int) -> None:
        task = asyncio.create_task(run_python(FOREVER, limits=FAST))
        while not (started := children() - before):  # noqa: ASYNC110  (another process sets no event)
            await asyncio.sleep(0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (child,) = started
        left.extend(pid for pid in psutil.pids() if group_of(pid) == child.pid)

    for num_turns in range(30):
        asyncio.run(cancelled(num_turns % 3))
    assert all(is_gone(pid) for pid in left)


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_a_program_ends_with_the_process_that_asked_for_it():
    assert is_gone(left_by_a_killed_parent(FOREVER))


@pytest.mark.parametrize(
    "escape",
    [
        "import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)",
        # a thread has no parent death signal, and the program that it becomes is the whole process
        "import os, threading as t; t.Thread(target=os.execv, args=('/usr/bin/sleep', ['sleep', '600'])).start()",
    ],
)
def test_no_program_outlives_the_process_that_asked_for_it(escape: str):
    assert is_gone(left_by_a_killed_parent(f"try:\n    exec({escape!r})\nexcept OSError: pass\n{FOREVER}"))


def left_by_a_killed_parent(code: str) -> int:
    """The process of a program that has run for a moment when the one that asked for it was killed."""
    began = f"{code.replace(FOREVER, '')}\nprint('begun')\nopen('begun', 'w').close()\n{FOREVER}"
    parent = f"""
import asyncio, os, psutil
from rlsys.sandbox.python_sandbox import ProgramLimits, run_python
async def main():
    running = asyncio.create_task(run_python({began!r}, limits=ProgramLimits(cpu_s=60, wall_s=60)))
    children = []
    while not (children and os.path.exists(f"/proc/{{children[-1].pid}}/cwd/begun")):
        await asyncio.sleep(0.01)
        children = psutil.Process().children(recursive=True)  # the last is the program
    print(children[-1].pid, children[-1].cwd(), flush=True)
    await running
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        pid, folder = asking.stdout.readline().split()
        asking.kill()
    shutil.rmtree(Path(folder).parent)
    return int(pid)


@pytest.mark.skipif(shutil.which("setarch") is None, reason="no setarch, which shows programs another machine")
def test_where_a_required_guard_is_missing_nothing_is_run():
    code = """
import asyncio
from rlsys.errors import SandboxError
from rlsys.sandbox.python_sandbox import ProgramLimits, run_python
try:
    asyncio.run(run_python("print('run')"))
except SandboxError as error:
    print(error)
print(asyncio.run(run_python("print('run')", limits=ProgramLimits(requires=("landlock",), newest_landlock=3))))
try:
    asyncio.run(run_python("print('run')", limits=ProgramLimits(requires=("landlock",), newest_landlock=2)))
except SandboxError as error:
    print(error)
result = asyncio.run(run_python("print('run')", limits=ProgramLimits(requires=(), newest_landlock=2)))
print(result, "landlock" in result.guards, result.landlock_version)
"""
    command = ["setarch", "i686", sys.executable, "-c", code]
    refused, allowed, empties, unguarded = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert refused == (
        "cannot run a program in the sandbox: seccomp: no filter is written for i686; "
        "see `rlsys.sandbox.python_sandbox.ProgramLimits.requires`"
    )
    assert allowed == "run" and unguarded == "run False 0"
    assert "landlock: version 2 does not stop truncation without seccomp; Linux 6.2 and newer do" in empties


def test_bubblewrap_may_be_required(has_bubblewrap: bool):
    limits = ProgramLimits(requires=("bubblewrap", "landlock", "seccomp"))
    if has_bubblewrap:
        assert ran("print(1)", limits=limits).output == "1\n"
    else:
        with pytest.raises(SandboxError, match="bubblewrap: no `bwrap` on the PATH; install the package bubblewrap"):
            ran("print(1)", limits=limits)


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_a_bubblewrap_that_does_not_work_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no user namespaces >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ran("print(1)").guards == ("landlock", "seccomp")
    with pytest.raises(SandboxError, match=f"{broken} does not work here: no user namespaces"):
        ran("print(1)", limits=ProgramLimits(requires=("bubblewrap",)))
