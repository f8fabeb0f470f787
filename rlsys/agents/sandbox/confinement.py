"""Launcher of `rlsys.agents.sandbox.python_sandbox`: confines its own process, then executes the requested program.

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
_SET_PDEATHSIG, _SET_SECCOMP, _SET_NO_NEW_PRIVS, _SCHED_CORE = 1, 22, 38, 62
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = (1 << bit for bit in (0, 1, 2, 3, 14))
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of an architecture in the tables below, and its number in a filter."""
_CLONE3, _EXECVE = (435, 435), (59, 221)
_FIRST_UNKNOWN = 450
"""First system call newer than this list (Linux 5.17); it and later ones fail with ENOSYS."""

_WHOLE = 0xFFFFFFFF
_ONLY_IF = {
    # argument, mask, value: all must match to allow the call
    "clone": ((56, 220), [(0, 0x10000, 0x10000)]),  # CLONE_THREAD
    "prlimit": ((302, 261), [(0, _WHOLE, 0)]),  # on itself
    "socketpair": ((53, 199), [(0, _WHOLE, 1), (1, 0xF, 1)]),  # AF_UNIX, SOCK_STREAM: asyncio has one
    "sendto": ((44, 206), [(5, _WHOLE, 0)]),  # without an address
    "ioctl": ((16, 29), [(1, 0xFF00, 0x5400)]),  # those of terminals and descriptors
}
_UNLESS = {
    # argument, and its refused values
    "fcntl": ((72, 25), 1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others
    "prctl": ((157, 167), 0, (_SET_PDEATHSIG, _SCHED_CORE)),
}
_KILL, _TGKILL = (62, 129), (234, 131)
_REFUSED = {
    # the network, and other programs on this machine
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425),
    # processes, other programs and namespaces; ARM64 has no fork, only clone
    "fork": (57, None),
    "vfork": (58, None),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # not covered by Landlock: mode, owner, times and attributes of files; in its first versions truncation
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "truncate": (76, 45),
    # memory that no limit counts, or that outlives or is shared with other processes
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # parts of the kernel that the program does not need
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}


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
        guards = confine(asked["folder"], asked["readable"], asked["requires"], secret)
        os.write(report, " ".join(guards).encode())
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


def confine(folder: str, readable: Iterable[str], requires: Iterable[str], secret: Secret) -> list[str]:
    """Enable every guard that the kernel supports, and return their names. Raises `CannotConfine` if a required guard
    is missing."""
    _prctl(_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    held, problems = [], []
    guards = {"landlock": lambda: restrict_files(folder, readable), "seccomp": lambda: filter_system_calls(secret)}
    for name, guard in guards.items():
        try:
            guard()
            held.append(name)
        except CannotConfine as error:
            problems.append(f"{name}: {error}")
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


def filter_system_calls(secret: Secret) -> None:
    """Install a seccomp filter that allows threads and one `execve`, but no network and no other processes.

    That `execve` is the launcher's: its arguments contain `secret`, 64 bits that are lost with the launcher's memory. A
    thread that became another program would outlive the parent, since it does not inherit the death signal.
    """
    machine = platform.machine()
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        raise CannotConfine(f"no filter is written for {machine}")
    program = _program(*_MACHINES[machine], secret)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _prctl(_SET_SECCOMP, 2, header)


def _program(column: int, architecture: int, secret: Secret) -> bytes:
    """Build the filter in BPF: the architecture and the x32 calls, then one block per call, then the permission.

    It sees the low halves of arguments, which is all that the kernel reads of the arguments tested here.
    """
    load_architecture, load_number = _bpf(0x20, 4), _bpf(0x20, 0)
    equals, at_least = 0x15, 0x35
    allow, kill = _bpf(0x06, 0x7FFF0000), _bpf(0x06, 0x80000000)
    refused, absent = (_bpf(0x06, 0x00050000 | code) for code in (errno.EPERM, errno.ENOSYS))

    def block(numbers: tuple[int | None, ...], answer: bytes) -> bytes:
        number = numbers[column]
        return b"" if number is None else _bpf(equals, number, 0, len(answer) // 8) + answer

    def only_if(numbers: tuple[int, int], tests: Iterable[tuple[int, int, int]]) -> bytes:
        passed = (_load(argument, mask) + _bpf(equals, value, 1, 0) + refused for argument, mask, value in tests)
        return block(numbers, b"".join(passed) + allow)

    def unless(numbers: tuple[int, int], argument: int, values: Iterable[int]) -> bytes:
        tests = (_bpf(equals, value, 0, 1) + refused for value in values)
        return block(numbers, _load(argument, _WHOLE) + b"".join(tests) + allow)

    itself = [(0, _WHOLE, os.getpid())]
    blocks = [
        load_architecture + _bpf(equals, architecture, 1, 0) + kill,
        load_number + _bpf(at_least, 0x40000000, 0, 1) + kill,
        _bpf(at_least, _FIRST_UNKNOWN, 0, 1) + absent,
        block(_CLONE3, absent),  # a filter cannot see its flags; the C library then uses clone
        only_if(_EXECVE, [(3, _WHOLE, secret[0]), (4, _WHOLE, secret[1])]),
        only_if(_KILL, itself),
        only_if(_TGKILL, itself),
        *(only_if(*rule) for rule in _ONLY_IF.values()),
        *(unless(*rule) for rule in _UNLESS.values()),
        *(block(numbers, refused) for numbers in _REFUSED.values()),
        allow,
    ]
    return b"".join(blocks)


def _load(argument: int, mask: int) -> bytes:
    """Load the low half of an argument, masked."""
    return _bpf(0x20, 16 + 8 * argument) + _bpf(0x54, mask)


def _bpf(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


# --------------------------------------------------------------------------------------------------------------- files


def restrict_files(folder: str, readable: Iterable[str]) -> None:
    """Restrict files by Landlock: full access beneath `folder`, reading beneath `readable`, nothing elsewhere."""
    abi = _LIBC.syscall(444, None, None, ctypes.c_ulong(1))
    if abi < 1:
        raise CannotConfine("this kernel does not have it (Linux 5.13 and newer do, where it is switched on)")
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
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
