"""Hosts of their own on this machine, as Linux namespaces: a small data centre for tests.

    with Lab.open(folder, 3) as lab:
        lab.start_ray()
        lab.host(1).run("rlsys", "train", ...)
        lab.host(2).set_link(is_up=False)

A host has an address, processes, /tmp, /dev/shm, HOME and a host name of its own; by Debian's habit it calls itself
127.0.1.1. The hosts are joined by a bridge that nothing leaves. They share the cores, and the file system without what
is named above: the project and its environment they may only read. `/mnt/disk` of a host is its own, and `Host.disk`
outside; `/mnt/given` is what the test gives all of them, `Lab.given` outside; `/mnt/shared` exists if the lab has a
shared disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.ray.commands import ROOT, SCRIPTS, wait_until

NETWORK = "10.77.0"
GCS_PORT, JOBS_PORT = 6379, 8265
STORE_BYTES = 2**28
HERE = Path(__file__).parent
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


def why_not() -> str | None:
    """Return why no lab can be made here; None if one can."""
    needed = ("ip", "tc", "unshare", "nsenter")
    if missing := [name for name in needed if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """One host of a lab."""

    number: int
    lab: Lab
    holder: subprocess.Popen[bytes]
    """Process that the host ends with."""
    _delay: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def disk(self) -> Path:
        """The host's `/mnt/disk`, as seen from outside."""
        return self.lab.folder / "hosts" / str(self.number)

    def start(
        self, *words: str | Path, cwd: str = "/mnt", environment: Mapping[str, str] | None = None,
        stdout: int | IO[str] = subprocess.PIPE, stderr: int | IO[str] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Start a command on the host."""
        found = {**self.lab.environment, **(environment or {})}
        inside = ["env", "-i", *(f"{key}={value}" for key, value in found.items()), "sh", "-c", 'cd "$0" && exec "$@"']
        command = [*self.enter(), *inside, cwd, *map(str, words)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True)

    def run(self, *words: str | Path, timeout_s: float = 300.0, cwd: str = "/mnt", **environment: str) -> Ended:
        """Run a command on the host to its end."""
        with self.start(*words, cwd=cwd, environment=environment) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                end_command(process)
                out, err = process.communicate()
                raise AssertionError(f"{words} on host {self.number} did not end:\n{out}\n{err}") from None
        return Ended(process.returncode, out, err)

    def enter(self) -> list[str]:
        """Return the beginning of a command that runs its rest on the host."""
        return ["nsenter", "-t", str(self._init), "-n", "-m", "-p", "-u", "-i", "--"]

    @property
    def _init(self) -> int:
        """Process id, seen from outside, of the host's first process."""
        return psutil.Process(self.holder.pid).children()[0].pid

    def kill(self) -> None:
        """Cut the power: all processes of the host end at once."""
        with suppress(IndexError, psutil.NoSuchProcess):
            os.kill(self._init, 9)
        self.holder.kill()
        self.holder.communicate()
        if self._delay is not None:
            self._delay.kill()
            self._delay.communicate()

    def set_link(self, *, is_up: bool) -> None:
        """Pull the cable, or put it back. The host's own end stays up, as with a broken switch."""
        self.lab.in_switch("ip", "link", "set", self._port, "up" if is_up else "down")

    def shape(self, rate: str, delay_ms: float = 0.0) -> None:
        """Limit the cable to `rate`, as `100mbit`, in both directions, and delay every frame by `delay_ms`."""
        port = f"p{self.number}"
        if delay_ms and self._delay is None:
            far, near = f"q{self.number}", f"b{self.number}"
            self.lab.in_switch("ip", "link", "set", port, "nomaster")
            self.lab.in_switch("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            self.lab.in_switch("ip", "link", "set", far, "master", "br0", "up")
            self.lab.in_switch("ip", "link", "set", near, "up")
            line = [sys.executable, HERE / "delay_line.py"]
            subprocess.run([*self.enter(), *line, "offloads", "eth0"], check=True)
            self.lab.in_switch(*line, "offloads", port, near, far)
            words = [*self.lab.enter_switch(), *map(str, line), "forward", port, near, str(delay_ms / 1000)]
            self._delay = subprocess.Popen(words)
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        subprocess.run([*self.enter(), "tc", "qdisc", "replace", "dev", "eth0", *limit], check=True)
        self.lab.in_switch("tc", "qdisc", "replace", "dev", self._port, *limit)

    @property
    def _port(self) -> str:
        """The bridge's end of the cable."""
        return f"p{self.number}" if self._delay is None else f"q{self.number}"


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str


@dataclass
class Lab:
    """A switch, and hosts that it joins."""

    folder: Path
    environment: dict[str, str]
    """That of every command on a host."""
    has_shared_disk: bool
    hosts: dict[int, Host] = field(default_factory=dict)
    _switch: subprocess.Popen[bytes] = field(init=False)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, num_hosts: int, *, has_shared_disk: bool = False) -> Iterator[Lab]:
        """Build the switch and hosts 1 to `num_hosts`; end all of them at the end of the block."""
        environment = {
            "HOME": "/mnt/home",
            "PATH": f"{SCRIPTS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "HF_HUB_OFFLINE": "1",
            "RAY_raylet_start_wait_time_s": "240",  # else 30, in which a busy machine starts none
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        lab = cls(folder, environment, has_shared_disk)
        for name in ("given", "shared"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lab._switch = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
            stack.callback(lab._end)
            wait_until(lambda: _network_of(lab._switch.pid) != _network_of(os.getpid()))
            for words in ("link set lo up", "link add br0 type bridge", f"addr add {NETWORK}.254/24 dev br0",
                          "link set br0 up"):  # fmt: skip
                lab.in_switch("ip", *words.split())
            for number in range(1, num_hosts + 1):
                lab.add(number)
            yield lab

    @property
    def given(self) -> Path:
        """The folder that all hosts read at `/mnt/given`."""
        return self.folder / "given"

    def host(self, number: int) -> Host:
        return self.hosts[number]

    def find(self, title: str) -> Host:
        """Return the first host that has a process with this title, as `ray::ActorRank`."""
        return next(host for host in self.hosts.values() if host.run("pgrep", "-f", f"^{title}").code == 0)

    def add(self, number: int) -> Host:
        """Build another host."""
        disk = self.folder / "hosts" / str(number)
        disk.mkdir(parents=True, exist_ok=True)
        (disk / "up").unlink(missing_ok=True)
        script = [str(HERE / "host.sh"), str(number), str(self.folder), NETWORK]
        script += ["yes" if self.has_shared_disk else "no", str(ROOT), sys.prefix]
        words = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", *script]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE)
        host = self.hosts[number] = Host(number, self, holder)
        wait_until(lambda: (disk / "up").exists() or holder.poll() is not None)
        assert holder.poll() is None, f"host {number} did not come up"
        port = f"p{number}"
        self.in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host._init))
        self.in_switch("ip", "link", "set", port, "master", "br0", "up")
        inside = ["link set lo up", f"addr add {host.address}/24 dev eth0", "link set eth0 up",
                  f"route add default via {NETWORK}.254"]  # fmt: skip
        for command in inside:
            subprocess.run([*host.enter(), "ip", *command.split()], check=True)
        return host

    def start_ray(self, *, num_cpus: Sequence[int] = (2, 2, 2)) -> None:
        """Start a cluster: its head on host 1, a node on each of the others."""
        head = ("--head", f"--port={GCS_PORT}", "--dashboard-host=0.0.0.0", f"--dashboard-port={JOBS_PORT}")
        self._ray(self.host(1), *head, f"--num-cpus={num_cpus[0]}")
        for number, count in zip(list(self.hosts)[1:], num_cpus[1:], strict=False):
            self.join(self.host(number), num_cpus=count)

    def join(self, host: Host, *, num_cpus: int = 2) -> None:
        """Let a host join the cluster."""
        self._ray(host, f"--address={NETWORK}.1:{GCS_PORT}", f"--num-cpus={num_cpus}")

    def _ray(self, host: Host, *words: str) -> None:
        fixed = (f"--node-ip-address={host.address}", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats")
        ended = host.run("ray", "start", *words, *fixed)
        assert ended.code == 0, ended.out + ended.err

    def in_switch(self, *words: str | Path) -> None:
        """Run a command in the network of the switch."""
        subprocess.run([*self.enter_switch(), *map(str, words)], check=True)

    def enter_switch(self) -> list[str]:
        return ["nsenter", "-t", str(self._switch.pid), "-n", "--"]

    def _end(self) -> None:
        for host in self.hosts.values():
            host.kill()
        self._switch.kill()
        self._switch.communicate()


def end_command(process: subprocess.Popen[str]) -> None:
    """Kill a command of `Host.start`: the process that enters the host, and the one inside."""
    with suppress(psutil.NoSuchProcess):
        for inside in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                inside.kill()
    process.kill()
    process.wait()


def _network_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())
