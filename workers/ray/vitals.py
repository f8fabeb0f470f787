"""A thread beside the work of each process of a run: samples what it uses, and keeps its log from growing.

The driver sets `RUN_DIR` where it starts workers; `start` passes it on in their environment. A process writes its
output straight into the run's folder, so that the last lines before a crash are there, and its samples beside it. This
costs no message. Where the folder cannot be written, as on a node without it, output goes where Ray puts it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import orjson
import psutil

from rlsys.monitoring.machine_samples import (
    LOGS,
    MACHINE,
    MOST_BYTES,
    MachineSample,
    described_end,
    last_lines,
    last_sample,
)
from workers.ray import fork_client
from workers.ray.fork_server import EXITS

SAMPLE_S = 5.0
"""Seconds between two samples."""
RUN_DIR: ContextVar[Path | None] = ContextVar("run_dir", default=None)
"""Folder of the run whose workers are started here; None: they write no files."""
PREFIX: ContextVar[str] = ContextVar("prefix", default="")
"""Beginning of the names of these workers' files."""
DRIVER = "driver"
FOLDER, NAME = "RLSYS_RUN_DIR", "RLSYS_WORKER"
"""Variables in the environment of a worker."""
_REAPED_S, _LOOKS = 0.05, 6
"""The fork server may learn of an end a moment later than Ray."""
_SHM = "/dev/shm"


class Vitals:
    """Samples of this process, and its log."""

    def __init__(self, run_dir: Path, worker: str, *, has_children: bool = True) -> None:
        """With `has_children`, the processes that this one starts are part of its samples."""
        self._has_children = has_children
        self._log = run_dir / LOGS / f"{worker}.log"
        self._samples = run_dir / MACHINE / f"{worker}.jsonl"
        before = last_sample(run_dir, worker)
        self._log_turn = before.log_turn if before else 0
        self._process, self._host = psutil.Process(), socket.gethostname()
        self._cpu_s, self._net = 0.0, _transferred_bytes()
        self._at = time.monotonic() - (time.time() - self._process.create_time())
        psutil.cpu_percent()  # the next value is since this call

    def take_output(self) -> None:
        """Append what this process and its later children print to its log. Raises `OSError`."""
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample in a thread, until the block ends."""
        ended = threading.Event()
        self.begin(ended)
        try:
            yield
        finally:
            ended.set()

    def begin(self, ended: threading.Event) -> None:
        """Start the thread, which ends with `ended`. A sample that cannot be taken or written is left out."""
        threading.Thread(target=self._sample_until, args=(ended,), name="vitals", daemon=True).start()

    def _sample_until(self, ended: threading.Event) -> None:
        """Waits between two samples; unblocked by time, or by `ended`."""
        while True:
            with suppress(OSError, psutil.Error):
                self.sample()
            if ended.wait(SAMPLE_S):
                return

    def sample(self) -> None:
        """Append a sample; a file that has grown too large begins anew. Raises `OSError`."""
        if _rotate_log(self._log):
            self._log_turn += 1
        _rotate_log(self._samples)
        size = self._log.stat().st_size if self._log.exists() else 0
        row = MachineSample(**self._current_usage(), log_bytes=size, log_turn=self._log_turn)
        with self._samples.open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")

    def _current_usage(self) -> Mapping[str, Any]:
        now, children = time.monotonic(), _children_of(self._process.pid) if self._has_children else ()
        cpu_s, memory = 0.0, 0
        for process in (self._process, *children):
            with suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                cpu_s += times.user + times.system
                memory += process.memory_info().rss
        net, seconds = _transferred_bytes(), max(now - self._at, 1e-3)
        sent, received = ((new - old) / seconds for new, old in zip(net, self._net, strict=True))
        cpu = max(0.0, cpu_s - self._cpu_s) / seconds
        self._at, self._cpu_s, self._net = now, cpu_s, net
        shm = os.statvfs(_SHM)
        gpu, gpu_memory = _gpu()
        return {
            "time_s": time.time(),
            "host": self._host,
            "pid": self._process.pid,
            "cpu": round(cpu, 3),
            "memory": memory,
            "gpu": gpu,
            "gpu_memory": gpu_memory,
            "node_cpu": psutil.cpu_percent() / 100,
            "node_memory": psutil.virtual_memory().percent / 100,
            "node_shm": (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "node_sent": round(sent),
            "node_received": round(received),
        }


def _transferred_bytes() -> tuple[int, int]:
    """Bytes that this node has sent and received so far, loopback left out."""
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(card.bytes_sent for card in cards), sum(card.bytes_recv for card in cards)


@contextmanager
def of_run(run_dir: Path, prefix: str = "") -> Iterator[None]:
    """Let the workers that this block starts write into the folder of a run, and sample this process, as `driver`.

    The names of their files begin with `prefix`. A folder that cannot be written is passed over.
    """
    try:
        for name in (LOGS, MACHINE):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        driver = Vitals(run_dir, prefix + DRIVER, has_children=False)  # which are Ray, and workers with their own
    except (OSError, psutil.Error):
        yield
        return
    before, named_before = RUN_DIR.set(run_dir), PREFIX.set(prefix)
    try:
        with driver.sampling():
            yield
    finally:
        PREFIX.reset(named_before)
        RUN_DIR.reset(before)


def begin_in_worker() -> None:
    """Begin in the process of a worker, if it was started for a run whose folder it can write."""
    run_dir, worker = os.environ.get(FOLDER), os.environ.get(NAME)
    if not (run_dir and worker):
        return
    with suppress(OSError, psutil.Error):
        vitals = Vitals(Path(run_dir), worker)
        vitals.take_output()
        vitals.begin(threading.Event())


def environment_of(worker: str) -> Mapping[str, str]:
    """Return the variables that a worker of the current run needs for it."""
    run_dir = RUN_DIR.get()
    return {FOLDER: str(run_dir), NAME: PREFIX.get() + worker} if run_dir else {}


async def end_of(worker: str) -> str:
    """Describe how the process of a worker of the current run has ended, as far as is known, with the end of its log.

    Waits a moment for the fork server, which cannot notify.
    """
    run_dir, worker = RUN_DIR.get(), PREFIX.get() + worker
    if run_dir is None or (sample := last_sample(run_dir, worker)) is None:
        return ""
    note = ""
    if (server := os.environ.get(fork_client.SERVER)) and sample.host == socket.gethostname():
        path = Path(server).parent / EXITS / str(sample.pid)
        for _ in range(_LOOKS):
            with suppress(OSError, ValueError):
                note = f"; its process {sample.pid} {described_end(int(path.read_text()))}"
                break
            await asyncio.sleep(_REAPED_S)
    lines = last_lines(run_dir, worker)
    return note + (f"; the end of {LOGS}/{worker}.log:\n    " + "\n    ".join(lines) if lines else "")


def _rotate_log(path: Path) -> bool:
    """Keep a file that is too large under another name, and empty it: its writers append. True if it was too large."""
    if not path.exists() or path.stat().st_size <= MOST_BYTES:
        return False
    shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    os.truncate(path, 0)
    return True


def _children_of(pid: int) -> Iterator[psutil.Process]:
    """Processes that a process has started, and they in turn; cheaper than a look at all processes of the machine."""
    with suppress(OSError, psutil.Error):
        for thread in os.scandir(f"/proc/{pid}/task"):
            for child in map(int, Path(thread.path, "children").read_text().split()):
                yield psutil.Process(child)
                yield from _children_of(child)


def _gpu() -> tuple[float | None, int | None]:
    """Busy share and used bytes of this process's GPU; only if it computes on one, and as far as NVML is there."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)  # None while torch is being imported, too
    used = None
    with suppress(Exception):  # NVML has errors of its own; a sample without these figures is right
        if cuda is not None and cuda.is_initialized():
            free, total = cuda.mem_get_info()
            used = total - free
            return cuda.utilization() / 100, used
    return None, used
