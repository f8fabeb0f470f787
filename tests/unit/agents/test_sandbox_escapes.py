"""Attempts to escape from the sandbox or to abuse it: one program makes them all, as root and as another user, with
and without bubblewrap.

An attempt is contained if it raises `OSError`; a system call, if the filter refuses it. Should one succeed, it does no
harm to the machine. Attempts that need a program of their own, such as floods and evaded
deadlines, are in `test_sandbox.py` and at the end of this file.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rlsys.sandbox import bubblewrap, confinement
from rlsys.sandbox.python_sandbox import ProgramLimits, run_python
from tests.processes import requires_bubblewrap

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"
"""An interpreter that every user of this machine can start; this one may be in a private folder."""

CALLS = {
    # system calls by their numbers on x86-64 and ARM64, with arguments that the kernel would accept where that is easy
    "ptrace: trace the parent": "101 117 16, parent, 0, 0",
    "ptrace: be traced": "101 117 0, 0, 0, 0",
    "read memory of the parent": "310 270 parent, 0, 0, 0, 0, 0",
    "write memory of the parent": "311 271 parent, 0, 0, 0, 0, 0",
    "compare with the parent": "312 272 parent, me, 0, 0, 0",
    "open a descriptor of the parent": "434 434 parent, 0",
    "take a descriptor of another process": "438 438 0, 0, 0",
    "signal by descriptor": "424 424 0, 9, 0, 0",
    "signal a thread of the parent": "200 130 parent, 9",
    "queue a signal to the parent": "129 138 parent, 10, 0",
    "start a process by clone": "56 220 17, 0, 0, 0, 0",
    "start a process by clone with shared memory": "56 220 0x4111, 0, 0, 0, 0",
    "start a process by clone3": "435 435 0, 88",
    "start a thread that is traced": "56 220 0x12f00, 0, 0, 0, 0",
    "start a thread in another mount namespace": "56 220 0x30f00, 0, 0, 0, 0",
    "create a user namespace": "272 97 0x10000000",
    "create a mount namespace": "272 97 0x20000",
    "create a network namespace": "272 97 0x40000000",
    "create a user namespace by clone": "56 220 0x10000011, 0, 0, 0, 0",
    "join a namespace": "308 268 0, 0",
    "mount a file system": "165 40 b'none', b'.', b'tmpfs', 0, 0",
    "open a file system to mount": "430 430 b'tmpfs', 0",
    "open a mounted tree": "428 428 -100, b'.', 1",
    "change mount attributes": "442 442 -100, b'.', 0, 0, 32",
    "unmount a file system": "166 39 b'/nowhere', 2",
    "change the root": "161 51 b'.'",
    "swap the root": "155 41 b'.', b'.'",
    "become another user": "105 146 1",
    "become another group": "106 144 1",
    "change the groups": "116 159 0, 0",
    "regain capabilities": "126 91 0, 0",
    "set up io_uring": "425 425 8, 0",
    "enter io_uring": "426 426 0, 1, 0, 0, 0, 0",
    "handle page faults": "323 282 0",
    "add a key": "248 217 b'user', b'a', b'b', 1, -3",
    "read keys": "250 219 0, -3, 0",
    "load a BPF program": "321 280 5, 0, 0",
    "open performance counters": "298 241 0, 0, -1, -1, 0",
    "create a memory file": "319 279 b'a', 0",
    "create a secret memory file": "447 447 0",
    "create shared memory": "29 194 0, 4096, 0o1600",
    "create a semaphore": "64 190 0, 1, 0o1600",
    "create a message queue": "68 186 0, 0o1600",
    "create a named queue": "240 180 b'a', 0o102, 0o600, 0",
    "lock memory": "149 228 0, 4096",
    "lock all memory": "151 230 3",
    "reserve space of a file": "285 47 1, 0, 0, 4096",
    "splice": "275 76 0, 0, 1, 0, 1, 0",
    "watch files": "253 26 -1",
    "initialise notification of all files": "300 262 0, 0",
    "open a file by its handle": "304 265 -100, 0, 0",
    "load a module": "175 105 0, 0, b''",
    "load another kernel": "246 104 0, 0, 0, 0",
    "reboot": "169 142 0, 0, 0, 0",
    "set the clock": "227 112 0, 0",
    "set the host's name": "170 161 b'a', 1",
    "read the kernel's log": "103 116 3, 0, 0",
    "write to swap": "167 224 b'.', 0",
    "account for processes": "163 89 0",
    "change the personality": "135 92 0x40000",
    "install a filter of its own": "317 277 1, 8, 0",
    "die later than the parent": "157 167 1, 0, 0, 0, 0",
    "adopt processes": "157 167 36, 1, 0, 0, 0",
    "hide from the parent": "157 167 4, 0, 0, 0, 0",
    "change the priority of the parent": "141 140 0, parent, 19",
    "become a session": "112 157 0",
    "leave the process group": "109 154 0, 0",
    "type into a terminal": "16 29 0, 0x5412, b'a'",
    "clone a file's blocks": "16 29 1, 0x40049409, 0",
    "become another program by descriptor": "322 281 0, b'', 0, 0, 0x1000",
}

ATTEMPTS = {
    **{f"network: {f}": f"s.socket(s.{f}, s.SOCK_DGRAM)" for f in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")},
    "network: raw packets": "s.socket(17, s.SOCK_RAW)",
    "network: virtual machines": "s.socket(40, s.SOCK_STREAM)",
    "network: cryptography of the kernel": "s.socket(38, s.SOCK_SEQPACKET)",
    "network: hand a descriptor to another": "s.socketpair()[0].sendmsg([b'a'], [(1, 1, bytes(4))])",
    "start a process": "os.fork()",
    "start a process by a shell": "os.system('true') and os.stat('/no')",
    "start a program": "os.posix_spawn('/usr/bin/true', ['true'], {})",
    "become another program": "os.execv('/usr/bin/true', ['true'])",
    "kill the parent": "os.kill(parent, 0)",
    "kill every process": "os.kill(-1, 0)",
    "kill its group": "os.kill(0, 0)",
    "environment of the parent": "open(f'/proc/{parent}/environ', 'rb')",
    "memory of the parent": "open(f'/proc/{parent}/mem', 'rb')",
    "its own memory by a file": "open('/proc/self/mem', 'wb')",
    "descriptors of the parent": "os.listdir(f'/proc/{parent}/fd')",
    "folder of the parent": "os.listdir(f'/proc/{parent}/cwd')",
    "command line of the parent": "open(f'/proc/{parent}/cmdline')",
    "list of processes": "os.listdir('/proc')",
    "settings of the kernel": "open('/proc/sys/kernel/core_pattern', 'w')",
    "system request": "open('/proc/sysrq-trigger', 'w')",
    "control groups": "os.mkdir('/sys/fs/cgroup/rlsys-escape')",
    "passwords": "open('/etc/shadow')",
    "users": "open('/etc/passwd')",
    "root's folder": "os.listdir('/root')",
    "the root": "os.listdir('/')",
    "temporary files of others": "os.listdir('/tmp')",
    "a temporary file elsewhere": "open('/tmp/rlsys-escape', 'w')",
    "shared memory by a file": "open('/dev/shm/rlsys-escape', 'w')",
    "a disk": "open('/dev/vda', 'rb')",
    "memory of the machine": "open('/dev/mem', 'rb')",
    "the kernel's log by a file": "open('/dev/kmsg')",
    "a terminal": "open('/dev/tty')",
    "a new terminal": "os.openpty()",
    "a file system in user space": "open('/dev/fuse')",
    "a device file": "os.mknod('d', 0o60666, 0x800)",
    "a named pipe": "os.mkfifo('p')",
    "a set-uid file": "os.chmod('main.py', 0o4755)",
    "a file through a symbolic link": "os.path.lexists('l') or os.symlink('/etc/passwd', 'l'); open('l')",
    "a folder through a symbolic link": "os.path.lexists('m') or os.symlink('/', 'm'); os.listdir('m/etc')",
    "a hard link to a file outside": "os.link('/etc/passwd', 'h')",
    "a file moved out": "os.rename('main.py', '../out')",
    "a file beside its folder": "open('../out', 'w')",
    "its folder removed": "os.rmdir(os.getcwd())",
    "its folder renamed": "os.rename(os.getcwd(), os.getcwd() + '2')",
    "a path above its folder": "open('../../../../../../../../../../../../etc/passwd')",
    "an interpreter's library changed": "open(os.__file__, 'a')",
    "an inherited descriptor": "[os.fstat(d) for d in range(3, 64)]",
    "the owner of a file": "os.chown('main.py', 1, 1)",
    "the owner of signals": "fcntl.fcntl(1, fcntl.F_SETOWN, parent)",
    "a lease on a file": "fcntl.fcntl(os.open('main.py', 0), 1024, 0)",
    "notification of a folder": "fcntl.fcntl(os.open('.', 0), 1026, 1)",
    "limits of the parent": "resource.prlimit(parent, resource.RLIMIT_NOFILE, (8, 8))",
}

HIDDEN = {
    # what only bubblewrap contains: names, sizes and times of files elsewhere, and other processes
    "size of a file of another": "os.stat('/etc/passwd')",
    "access to a file of another": "os.access('/etc/passwd', os.F_OK) or refuse()",
    "link of a file of another": "os.readlink('/etc/mtab')",
    "time of root's folder": "os.stat('/root/.profile')",
    "size of a log": "os.stat('/var/log/dpkg.log')",
    "room on the disk": "os.statvfs('/var')",
    "folders in /home": "os.stat('/home')",
    "temporary files of others by name": f"os.stat({__file__!r})",
    "processes": "os.stat(f'/proc/{parent}')",
    "program of the parent": "os.readlink('/proc/self/exe')",
    "the first process": "os.stat('/proc/1/status')",
    "devices": "os.stat('/sys/class/net')",
    "a disk by name": "os.stat('/dev/tty')",
    "shared memory by name": "os.stat('/dev/shm')",
}

PROGRAM = """
import ctypes, fcntl, json, os, resource, socket as s
libc, me, parent, report = ctypes.CDLL(None, use_errno=True), os.getpid(), os.getppid(), {}
def refuse():
    raise OSError(2, "refused")
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
for name, attempt in ATTEMPTS:
    try:
        exec(attempt)
        report[name] = 0
    except OSError as error:
        report[name] = error.errno
print(json.dumps(report))
"""


def attempts() -> dict[str, str]:
    column = confinement._MACHINES[platform.machine()][0]
    split = {name: text.split(" ", 2) for name, text in CALLS.items()}
    return {name: f"call({parts[column]}, {parts[2]})" for name, parts in split.items()} | ATTEMPTS | HIDDEN


def run_as_nobody(program: str, folder: Path, *, has_bubblewrap: bool) -> str:
    """Start the launcher as a user without powers, from a copy that this user can read."""
    launcher, home = shutil.copy(confinement.__file__, folder / "launcher.py"), folder / "home"
    home.mkdir()
    main = home / "main.py"
    main.write_text(program)
    for path in (folder, home, launcher):
        Path(path).chmod(0o755)
    os.chown(home, NOBODY, NOBODY)
    read, write = os.pipe()
    limits = {"cpu_s": 5, "memory_bytes": 1 << 28, "file_bytes": 1 << 24, "open_files": 64}
    readable = ["/usr", "/lib", "/lib64"]
    parent = 1 if has_bubblewrap else os.getpid()
    asked = {"parent": parent, "report": write, "folder": str(home), "readable": readable}
    asked |= {"requires": ["landlock", "seccomp"], "limits": limits}
    command = [SYSTEM_PYTHON, "-I", "-S", launcher, json.dumps(asked), SYSTEM_PYTHON, "-I", "main.py"]
    given = os.open(main, os.O_RDONLY)
    if has_bubblewrap:
        paths = {"folder": str(home), "main": given, "readable": [*readable, str(launcher)]}
        command = [*bubblewrap.command(shutil.which("bwrap") or "", **paths, num_bytes=1 << 24), *command]
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        ran = subprocess.run(
            command,
            check=False,
            cwd=home,
            pass_fds=[write, *([given] if has_bubblewrap else [])],
            capture_output=True,
            text=True,
            start_new_session=True,
            env={},
            **who,
        )
    finally:
        os.close(given)
        os.close(read)
        os.close(write)
    return ran.stdout or ran.stderr


WAYS = ["this user", "nobody", "this user, bubblewrap", "nobody, bubblewrap"]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def report(way: str) -> dict[str, int]:
    program = PROGRAM.replace("ATTEMPTS", repr([*attempts().items()]))
    has_bubblewrap = "bubblewrap" in way and requires_bubblewrap()
    if "nobody" not in way:
        with pytest.MonkeyPatch.context() as patch:
            if not has_bubblewrap:
                patch.setenv("PATH", "")
            result = asyncio.run(run_python(program, limits=ProgramLimits(wall_s=20)))
        assert ("bubblewrap" in result.guards) == has_bubblewrap
        return json.loads(result.output)
    if os.getuid() != 0 or not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"needs root, to become another user, and {SYSTEM_PYTHON}")
    with TemporaryDirectory() as folder:  # pytest's own are closed to other users
        return json.loads(run_as_nobody(program, Path(folder), has_bubblewrap=has_bubblewrap))


@pytest.mark.parametrize("attempt", [*CALLS, *ATTEMPTS, *HIDDEN])
def test_every_attempt_is_contained(way: str, report: dict[str, int], attempt: str):
    if attempt in HIDDEN and "bubblewrap" not in way:
        pytest.skip("only bubblewrap contains it")
    assert report[attempt] in (errno.EPERM, errno.ENOSYS) if attempt in CALLS else report[attempt] != 0


def test_a_program_in_bubblewrap_sees_only_its_own_paths():
    requires_bubblewrap()
    mounts = asyncio.run(run_python("import os; print(os.path.lexists('/home'), os.path.lexists('/proc'))"))
    assert mounts.output == "False False\n"


EVASIONS = {
    "ignored signals": "for n in {*signal.valid_signals()} - {9, 19}: signal.signal(n, signal.SIG_IGN)",
    "blocked signals": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "a session of its own": "os.setsid()",
    "a double fork": "os.fork() or os.fork() or time.sleep(600)",
    "closed descriptors": "os.closerange(0, 64)",
    "replaced descriptors": "os.dup2(os.open('f', 66), 1); os.dup2(1, 2)",
    "a stopped process": "os.kill(os.getpid(), 19)",
    "a thread that goes on after the main one": "threading.Thread(target=time.sleep, args=(600,)).start(); leave()",
}


@pytest.mark.parametrize("how", EVASIONS)
def test_the_deadline_cannot_be_evaded(how: str):
    code = f"""
import ctypes, os, signal, threading, time
def leave(): ctypes.CDLL(None).pthread_exit(None)
try:
    {EVASIONS[how]}
except OSError:
    pass
time.sleep(600)
"""
    result = asyncio.run(run_python(code, limits=ProgramLimits(wall_s=0.5)))
    assert result.is_timeout and result.exit_code == -9 and result.seconds < 10


def as_nobody(home: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without powers, with the packages of this process. `env` ends with 126 if the user cannot
    reach the program."""
    folders = f"{ROOT}:{Path(pytest.__file__).parents[1]}"
    environment = {"PATH": os.environ["PATH"], "HOME": home, "TMPDIR": home, "PYTHONPATH": folders}
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return subprocess.run(
        ["env", "PYTHONDONTWRITEBYTECODE=1", *command],
        check=False,
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        **who,
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_the_suite_passes_as_another_user_too():
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    suite = [ROOT / "tests/unit/agents/test_sandbox.py", __file__]
    options = ["-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
    whole = ["-k", "not numpy and not encodable"]  # those need this interpreter's packages, or its version
    imports = "import pytest, tests.conftest, tests.processes, rlsys.sandbox.python_sandbox"
    with TemporaryDirectory() as home:
        os.chown(home, NOBODY, NOBODY)
        usable = (p for p in (sys.executable, SYSTEM_PYTHON) if as_nobody(home, p, "-c", imports).returncode == 0)
        if (python := next(usable, None)) is None:
            pytest.skip("another user has no interpreter for these packages, or cannot read them")
        ran = as_nobody(home, python, "-m", "pytest", *options, *whole, *suite)
    assert ran.returncode == 0, ran.stdout
