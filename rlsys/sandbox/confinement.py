"""Launcher of `rlsys.sandbox.python_sandbox`: confines its own process, then executes the requested program.

    python -I -S confinement.py '{"parent": 123, "report": 5, ...}' PROGRAM [ARGUMENT ...]

All restrictions last over `exec` and, with `seccomp`, cannot be undone by the program. The launcher needs no privilege,
imports only the standard library, and calls the kernel through `ctypes`. The numbers are those of kernel headers
(linux/seccomp.h, linux/filter.h, linux/landlock.h, and the system call tables of both architectures).

It writes one line to the descriptor `report`: the active guards, or `!` and the reason why the program cannot start.
This module imports nothing of `rlsys`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Secret: TypeAlias = "tuple[int, int]"

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 22, 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = (1 << bit for bit in (0, 1, 2, 3, 14))
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_TRUNCATE_VERSION = 3
"""First version of Landlock with a right against truncation (Linux 6.2). An older one lets a program empty every file
that it may read, by opening it for reading with O_TRUNC; `seccomp` then refuses that."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of an architecture in the tables below, and its number in a filter."""
_EXECVE = (59, 221)
_FIRST_UNKNOWN = 450
"""First system call newer than these tables (Linux 5.17): it and later ones fail with ENOSYS, others with EPERM."""

_ALLOWED = """
read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 close:3:57 close_range:436:436
lseek:8:62 stat:4:- lstat:6:- fstat:5:80 newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21:-
faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78 getdents:78:- getdents64:217:61 getcwd:79:17
chdir:80:49 fchdir:81:50 umask:95:166 mkdir:83:- mkdirat:258:34 rmdir:84:- rename:82:- renameat:264:38
renameat2:316:276 link:86:- linkat:265:37 unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36 ftruncate:77:46
fsync:74:82 fdatasync:75:83 fadvise64:221:223 readahead:187:213 flock:73:32 dup:32:23 dup2:33:- dup3:292:24
sendfile:40:71 copy_file_range:326:285 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233
msync:26:227 mincore:27:232 brk:12:214
membarrier:324:283
set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 futex:202:98 futex_waitv:449:449 rseq:334:293
restart_syscall:219:128 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 arch_prctl:158:- sched_yield:24:124
sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114
gettimeofday:96:169 time:201:- times:100:153 getitimer:36:102 setitimer:38:103 alarm:37:- timer_create:222:107
timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 timerfd_create:283:85
timerfd_settime:286:86 timerfd_gettime:287:87
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
rt_sigtimedwait:128:137 sigaltstack:131:132 signalfd4:289:74 pause:34:-
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 pipe:22:- pipe2:293:59
recvfrom:45:207 recvmsg:47:212 shutdown:48:210 getsockname:51:204 getsockopt:55:209
getpid:39:172 getppid:110:173 gettid:186:178 getpgrp:111:- getpgid:121:155 getsid:124:156 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150
getpriority:140:141 getrlimit:97:163 setrlimit:160:164 getrusage:98:165 capget:125:90 uname:63:160 sysinfo:99:179
getrandom:318:278 getcpu:309:168
"""
"""Allowed system calls, as `NAME:X86_64:ARM64`; `-` where the architecture lacks the call.

Left out are the network and io_uring; processes, namespaces and mounts; other processes; mode, owner and times of
files; devices and named pipes; `fallocate`, whose space is not in the kernel's count of written bytes;
shared memory and queues; keys, tracing, BPF and userfaultfd.
"""

_UNSUPPORTED = """
setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
"""
"""Calls on attributes of files, which Landlock does not restrict. They fail with ENOTSUP, as on a file system without
attributes: programs that copy files expect that."""

_WHOLE = 0xFFFFFFFF
_CLONE_THREAD, _CLONE_TRACED_OR_APART = 0x10000, 0x2000 | 0x20000 | 0x7E000000
_ONLY_IF = {
    # argument, mask, value: all must match to allow the call
    "clone": ((56, 220), [(0, _CLONE_THREAD | _CLONE_TRACED_OR_APART, _CLONE_THREAD)]),
    "prlimit64": ((302, 261), [(0, _WHOLE, 0)]),  # on itself
    "socketpair": ((53, 199), [(0, _WHOLE, 1), (1, 0xF, 1)]),  # AF_UNIX, SOCK_STREAM: asyncio has one
    "sendto": ((44, 206), [(5, _WHOLE, 0)]),  # without an address
}
_ONE_OF = {
    # argument, and its allowed values
    "fcntl": ((72, 25), 1, (*range(8), 36, 37, 38, 1030, 1031, 1032)),  # no owner of signals, no lease, no seal
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # TCGETS, TIOCGWINSZ, FION*, FIO*CLEX
    "prctl": ((157, 167), 0, (3, 15, 16, 0x53564D41)),  # get dumpable, name of the thread, name of a mapping
}
_OPENING = {
    # arguments with the flags, if any, and with the mode
    "open": ((2, None), 1, 2),
    "openat": ((257, 56), 2, 3),
    "creat": ((85, None), None, 1),
}
"""Allowed, but not to make files with a set-uid or set-gid bit nor, below `_TRUNCATE_VERSION`, to truncate files that
are not opened for writing."""
_CREATES, _TRUNCATES, _ACCESS, _SET_ID = 0o20000100, 0o1000, 3, 0o6000
"""Flags O_CREAT and O_TMPFILE, O_TRUNC, O_ACCMODE, and the two bits of a mode."""
_IN_MEMORY = {"clone3": (435, 435), "openat2": (437, 437)}
"""Calls whose flags are in memory, where a filter cannot see them. They fail with ENOSYS; the C library then uses clone
and openat."""
_KILL, _TGKILL = (62, 129), (234, 131)


class CannotConfine(Exception):
    """The kernel refused a guard."""


def main(arguments: Sequence[str]) -> None:
    """Confine this process, report, then execute the program."""
    asked = json.loads(arguments[0])
    report = asked["report"]
    os.set_inheritable(report, False)
    try:
        die_with(asked["parent"])
        limit(**asked["limits"])
        secret = struct.unpack("II", os.urandom(8))
        version = landlock_version(asked["newest_landlock"])
        guards = confine(asked["folder"], asked["readable"], asked["requires"], secret, version)
        os.write(report, " ".join([str(version if "landlock" in guards else 0), *guards]).encode())
        if "seccomp" not in guards:
            os.execv(arguments[1], list(arguments[1:]))
        become(arguments[1:], secret)
    except (CannotConfine, OSError, ValueError) as error:
        os.write(report, f"!{error}".encode())
        sys.exit(1)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent ends for any reason."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise CannotConfine("the process that asked for it is gone")


def limit(*, cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Limit this process; never raises an existing limit."""
    wanted = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes),
        resource.RLIMIT_NOFILE: (open_files, open_files),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in wanted.items():
        held = resource.getrlimit(kind)[1]
        most = hard if held == resource.RLIM_INFINITY else min(hard, held)
        resource.setrlimit(kind, (min(soft, most), most))


def confine(folder: str, readable: Iterable[str], requires: Iterable[str], secret: Secret, version: int) -> list[str]:
    """Enable every guard that the kernel supports, and return their names. `version` is that of Landlock. Raises
    `CannotConfine` if a required guard is missing."""
    _prctl(_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    held, problems = [], []
    guards = {
        "landlock": lambda: restrict_files(folder, readable, version),
        "seccomp": lambda: filter_system_calls(secret, refuses_truncation=version < _TRUNCATE_VERSION),
    }
    for name, guard in guards.items():
        try:
            guard()
            held.append(name)
        except CannotConfine as error:
            problems.append(f"{name}: {error}")
    if held == ["landlock"] and version < _TRUNCATE_VERSION:
        held.remove("landlock")
        problems.append(f"landlock: version {version} does not stop truncation without seccomp; Linux 6.2 and newer do")
    if not set(requires) <= set(held):
        raise CannotConfine("; ".join(problems))
    return held


def drop_capabilities() -> None:
    """Drop root's capabilities; it still owns its files. `no_new_privs` keeps `exec` from restoring them."""
    if _LIBC.capset(struct.pack("II", 0x20080522, 0), bytes(24)) != 0:
        raise CannotConfine(f"capset: {os.strerror(ctypes.get_errno())}")


def become(program: Sequence[str], secret: Secret) -> None:
    """Call `execve` with the secret in registers that it does not read. Does not return; raises `OSError`."""
    words = [os.fsencode(word) for word in program]
    variables = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
    given = [(ctypes.c_char_p * (len(texts) + 1))(*texts, None) for texts in (words, variables)]
    number = _EXECVE[_MACHINES[platform.machine()][0]]
    _LIBC.syscall(ctypes.c_long(number), words[0], *given, *map(ctypes.c_ulong, secret))
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), program[0])


# -------------------------------------------------------------------------------------------------------- system calls


def filter_system_calls(secret: Secret, *, refuses_truncation: bool) -> None:
    """Install a seccomp filter that allows `_ALLOWED`, `_OPENING`, threads and one `execve`, and nothing else.

    With `refuses_truncation`, files can be truncated only by opening them for writing.

    That `execve` is the launcher's: its arguments contain `secret`, 64 bits that are lost with the launcher's memory. A
    thread that became another program would outlive the parent, since it does not inherit the death signal.
    """
    machine = platform.machine()
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        raise CannotConfine(f"no filter is written for {machine}")
    program = _program(*_MACHINES[machine], secret, refuses_truncation=refuses_truncation)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _prctl(_SET_SECCOMP, 2, header)


def _program(column: int, architecture: int, secret: Secret, *, refuses_truncation: bool) -> bytes:
    """Build the filter in BPF: the architecture and the x32 calls, then one block per call, then the refusal.

    It sees the low halves of arguments, which is all that the kernel reads of the arguments tested here.
    """
    load_architecture, load_number = _bpf(0x20, 4), _bpf(0x20, 0)
    equals, at_least, has_any = 0x15, 0x35, 0x45
    allow, kill = _bpf(0x06, 0x7FFF0000), _bpf(0x06, 0x80000000)
    codes = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EACCES)
    refused, absent, unsupported, denied = (_bpf(0x06, 0x00050000 | code) for code in codes)

    def block(number: int, answer: bytes) -> bytes:
        return _bpf(equals, number, 0, len(answer) // 8) + answer

    def only_if(numbers: tuple[int, int], tests: Iterable[tuple[int, int, int]]) -> bytes:
        passed = (_load(argument, mask) + _bpf(equals, value, 1, 0) + refused for argument, mask, value in tests)
        return block(numbers[column], b"".join(passed) + allow)

    def one_of(numbers: tuple[int, int], argument: int, values: Iterable[int]) -> bytes:
        tests = (_bpf(equals, value, 0, 1) + allow for value in values)
        return block(numbers[column], _load(argument, _WHOLE) + b"".join(tests) + refused)

    def opening(numbers: tuple[int, int | None], flags: int | None, mode: int) -> bytes:
        if (number := numbers[column]) is None:
            return b""
        answer = _load(mode, _WHOLE) + _bpf(has_any, _SET_ID, 0, 1) + refused
        if flags is not None:
            answer = _load(flags, _WHOLE) + _bpf(has_any, _CREATES, 0, len(answer) // 8) + answer
            if refuses_truncation:
                tests = (_bpf(equals, _TRUNCATES | access, 0, 1) + denied for access in (os.O_RDONLY, _ACCESS))
                answer += _load(flags, _TRUNCATES | _ACCESS) + b"".join(tests)
        return block(number, answer + allow)

    itself = [(0, _WHOLE, os.getpid())]
    blocks = [
        load_architecture + _bpf(equals, architecture, 1, 0) + kill,
        load_number + _bpf(at_least, 0x40000000, 0, 1) + kill,
        _bpf(at_least, _FIRST_UNKNOWN, 0, 1) + absent,
        *(block(numbers[column], absent) for numbers in _IN_MEMORY.values()),
        only_if(_EXECVE, [(3, _WHOLE, secret[0]), (4, _WHOLE, secret[1])]),
        only_if(_KILL, itself),
        only_if(_TGKILL, itself),
        *(only_if(*rule) for rule in _ONLY_IF.values()),
        *(one_of(*rule) for rule in _ONE_OF.values()),
        *(opening(*rule) for rule in _OPENING.values()),
        *(block(number, unsupported) for number in listed(_UNSUPPORTED, column).values()),
        *(block(number, allow) for number in listed(_ALLOWED, column).values()),
        refused,
    ]
    return b"".join(blocks)


def listed(table: str, column: int) -> dict[str, int]:
    """System calls of a table by their names, with the numbers of one architecture; without those that it lacks."""
    entries = (entry.split(":") for entry in table.split())
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}


def _load(argument: int, mask: int) -> bytes:
    """Load the low half of an argument, masked."""
    return _bpf(0x20, 16 + 8 * argument) + _bpf(0x54, mask)


def _bpf(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


# --------------------------------------------------------------------------------------------------------------- files


def landlock_version(newest: int | None = None) -> int:
    """Version of Landlock (its ABI) to use: the kernel's, or `newest` if that is lower; 0 if there is none."""
    version = max(_LIBC.syscall(444, None, None, ctypes.c_ulong(1)), 0)
    return version if newest is None else min(version, newest)


def restrict_files(folder: str, readable: Iterable[str], version: int) -> None:
    """Restrict files by Landlock: full access beneath `folder`, reading beneath `readable`, nothing elsewhere."""
    if version < 1:
        raise CannotConfine("this kernel does not have it (Linux 5.13 and newer do, where it is switched on)")
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    ruleset = _call(444, struct.pack("QQQ", everything, 0, scoped), 24 if scoped else 8, 0)
    _allow(ruleset, folder, everything)
    for path in filter(os.path.exists, readable):
        _allow(ruleset, path, _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))  # noqa: PTH112
    for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(ruleset, device, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & everything)
    _call(446, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _call(445, ruleset, 1, struct.pack("=Qi", access, beneath), 0)
    os.close(beneath)


def _call(number: int, *arguments: int | bytes) -> int:
    result = _LIBC.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise CannotConfine(os.strerror(ctypes.get_errno()))
    return result


def _prctl(option: int, first: int, second: bytes = b"") -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(first), second or None, None, None) != 0:
        raise CannotConfine(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1:])
