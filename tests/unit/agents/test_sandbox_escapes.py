"""Attempts to escape from the sandbox or to abuse it: one program makes them all, as root and as another user, with
and without bubblewrap, and with the versions of Landlock that older kernels have.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rlsys.sandbox import bubblewrap, confinement
from rlsys.sandbox.python_sandbox import ProgramLimits, run_python
from tests.by_day import first_by_day
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
    "empty a file that it may read": "76 45 given, 0",
    "empty a file that it may read, by openat2": "437 437 -100, given, how(os.O_TRUNC), 24",
    "make a set-uid file by openat2": "437 437 -100, b's1', how(os.O_CREAT | os.O_WRONLY, 0o4755), 24",
    "make a set-uid file by creat": "85 -1 b's2', 0o4755",
    "make a set-gid file by creat": "85 -1 b's3', 0o2755",
    "make a file set-uid by fchmodat2": "452 452 -100, b'main.py', 0o4755, 0",
    "read an attribute by getxattrat": "464 464 -100, given, 0, b'user.rlsys', attribute(), 16",
    "list attributes by listxattrat": "465 465 -100, given, 0, bytes(64), 64",
    "set an attribute by setxattrat": "463 463 -100, b'main.py', 0, b'user.rlsys', attribute(), 16",
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
    "a set-uid file by descriptor": "os.chmod(os.open('main.py', 0), 0o4755)",
    "a set-uid file when it is made": "os.open('s4', os.O_CREAT | os.O_WRONLY, 0o4755)",
    "a set-gid file when it is made": "os.open('s5', os.O_CREAT | os.O_RDONLY, 0o2755)",
    "a set-uid file without a name": "os.open('.', os.O_TMPFILE | os.O_WRONLY, 0o4755)",
    "a set-uid file as a node": "os.mknod('s6', 0o104755)",
    "a set-gid folder": "os.path.lexists('s7') or os.mkdir('s7', 0o6755); os.stat('s7').st_mode & 0o6000 or refuse()",
    "a readable file emptied by reading": "os.open(given, os.O_RDONLY | os.O_TRUNC)",
    "a readable file emptied by reading or making": "os.open(given, os.O_RDONLY | os.O_CREAT | os.O_TRUNC)",
    "a readable file emptied without access": "os.open(given, os.O_ACCMODE | os.O_TRUNC)",
    "a readable file emptied by writing": "os.open(given, os.O_WRONLY | os.O_TRUNC)",
    "a readable file emptied by both": "os.open(given, os.O_RDWR | os.O_CREAT | os.O_TRUNC)",
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

ATTRIBUTES = {
    # attributes of files, which the filter refuses as a file system without them does
    "an attribute of a readable file": "os.getxattr(given, 'user.rlsys')",
    "an attribute of a descriptor": "os.getxattr(os.open(given, 0), 'user.rlsys')",
    "an attribute of a link": "os.getxattr(given, 'user.rlsys', follow_symlinks=False)",
    "an attribute of a file elsewhere": "os.getxattr('/etc/passwd', 'user.rlsys')",
    "an attribute of its own": "os.getxattr('main.py', 'user.rlsys')",
    "names of attributes": "os.listxattr(given)",
    "names of attributes of a descriptor": "os.listxattr(os.open(given, 0))",
    "names of attributes of a link": "os.listxattr(given, follow_symlinks=False)",
    "an attribute set": "os.setxattr('main.py', 'user.rlsys', b'1')",
    "an attribute of a descriptor set": "os.setxattr(os.open('main.py', 0), 'user.rlsys', b'1')",
    "an attribute of a link set": "os.setxattr('main.py', 'user.rlsys', b'1', follow_symlinks=False)",
    "an attribute removed": "os.removexattr(given, 'user.rlsys')",
    "an attribute of a descriptor removed": "os.removexattr(os.open(given, 0), 'user.rlsys')",
    "an attribute of a link removed": "os.removexattr(given, 'user.rlsys', follow_symlinks=False)",
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
import ctypes, fcntl, json, os, resource, socket as s, struct
given, libc, me, parent, report = GIVEN, ctypes.CDLL(None, use_errno=True), os.getpid(), os.getppid(), {}
def how(flags, mode=0):
    return struct.pack("QQQ", flags, mode, 0)
def attribute():
    return struct.pack("QII", ctypes.addressof(ctypes.create_string_buffer(64)), 64, 0)
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
    return (
        {name: f"call({parts[column]}, {parts[2]})" for name, parts in split.items()} | ATTEMPTS | ATTRIBUTES | HIDDEN
    )


@dataclass(frozen=True)
class Way:
    """How the program runs. `landlock` is the newest version that is used; None for the kernel's."""

    user: str
    has_bubblewrap: bool
    landlock: int | None

    def __str__(self) -> str:
        parts = (self.user, "bubblewrap" * self.has_bubblewrap, f"landlock {self.landlock}" * bool(self.landlock))
        return ", ".join(filter(None, parts))


WAYS = [Way(user, wraps, v) for v in (None, 1, 2, 3) for wraps in (False, True) for user in ("this user", "nobody")]


def run_as_nobody(program: str, folder: Path, given: Path, way: Way) -> str:
    """Start the launcher as a user without powers, from a copy that this user can read."""
    launcher, home = shutil.copy(confinement.__file__, folder / "launcher.py"), folder / "home"
    home.mkdir()
    main = home / "main.py"
    main.write_text(program)
    for path in (folder, home, launcher):
        Path(path).chmod(0o755)
    for path in (home, given):
        os.chown(path, NOBODY, NOBODY)
    read, write = os.pipe()
    limits = {"cpu_s": 5, "memory_bytes": 1 << 28, "file_bytes": 1 << 24, "open_files": 64}
    readable = ["/usr", "/lib", "/lib64", str(given)]
    parent = 1 if way.has_bubblewrap else os.getpid()
    asked = {"parent": parent, "report": write, "folder": str(home), "readable": readable}
    asked |= {"requires": ["landlock", "seccomp"], "limits": limits, "newest_landlock": way.landlock}
    command = [SYSTEM_PYTHON, "-I", "-S", launcher, json.dumps(asked), SYSTEM_PYTHON, "-I", "main.py"]
    source = os.open(main, os.O_RDONLY)
    if way.has_bubblewrap:
        paths = {"folder": str(home), "main": source, "readable": [*readable, str(launcher)]}
        command = [*bubblewrap.command(shutil.which("bwrap") or "", **paths, num_bytes=1 << 24), *command]
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        ran = subprocess.run(
            command,
            check=False,
            cwd=home,
            pass_fds=[write, *([source] if way.has_bubblewrap else [])],
            capture_output=True,
            text=True,
            start_new_session=True,
            env={},
            **who,
        )
    finally:
        os.close(source)
        os.close(read)
        os.close(write)
    return ran.stdout or ran.stderr


def run_as_this_user(program: str, given: Path, way: Way) -> str:
    limits = ProgramLimits(wall_s=20, readable=(str(given),), newest_landlock=way.landlock)
    with pytest.MonkeyPatch.context() as patch:
        if not way.has_bubblewrap:
            patch.setenv("PATH", "")
        result = asyncio.run(run_python(program, limits=limits))
    assert ("bubblewrap" in result.guards) == way.has_bubblewrap
    assert result.landlock_version == confinement.landlock_version(way.landlock) > 0
    return result.output


@pytest.fixture(scope="module", params=first_by_day(WAYS, 6), ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture(scope="module")
def report(way: Way) -> dict[str, int]:
    if way.has_bubblewrap:
        requires_bubblewrap()
    if way.user == "nobody" and (os.getuid() != 0 or not Path(SYSTEM_PYTHON).exists()):
        pytest.skip(f"needs root, to become another user, and {SYSTEM_PYTHON}")
    with TemporaryDirectory() as name:  # pytest's own are closed to other users
        folder = Path(name).resolve()
        given = folder / "given"
        given.write_text("42")
        with suppress(OSError):  # a tmpfs has no such attributes before Linux 6.6
            os.setxattr(given, "user.rlsys", b"42")
        before = given.read_text(), os.listxattr(given)
        program = PROGRAM.replace("ATTEMPTS", repr([*attempts().items()])).replace("GIVEN", repr(str(given)))
        if way.user == "nobody":
            output = run_as_nobody(program, folder, given, way)
        else:
            output = run_as_this_user(program, given, way)
        assert (given.read_text(), os.listxattr(given)) == before
        return json.loads(output)


@pytest.mark.parametrize("attempt", [*CALLS, *ATTEMPTS, *ATTRIBUTES, *HIDDEN])
def test_every_attempt_is_contained(way: Way, report: dict[str, int], attempt: str):
    if attempt in HIDDEN and not way.has_bubblewrap:
        pytest.skip("only bubblewrap contains it")
    if attempt in CALLS:
        assert report[attempt] in (errno.EPERM, errno.ENOSYS)
    elif attempt in ATTRIBUTES:
        assert report[attempt] == errno.ENOTSUP
    else:
        assert report[attempt] != 0


def test_the_documentation_counts_the_attempts():
    always = len(CALLS) + len(ATTEMPTS) + len(ATTRIBUTES)
    text = (ROOT / "docs" / "security.md").read_text()
    assert f"{always} of them with and without\nbubblewrap, and {len(HIDDEN)} more with it." in text


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
@pytest.mark.timeout(1200)  # with every version of Landlock
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
