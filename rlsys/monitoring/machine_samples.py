"""Samples of what a process of a run uses of its machine, one line every few seconds in a file of the run's folder.

Each worker appends its own samples to `RUN/machine/WORKER.jsonl`, and writes its output to `RUN/logs/WORKER.log`; so
does the driver. No message to the driver is involved. A sample has the size of the log at its time, so that lines of a
log, which have no time of their own, get one.
"""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson

LOGS, MACHINE = "logs", "machine"
"""Folders in that of a run."""
MOST_BYTES = 8 * 2**20
"""Size of a file at which it begins anew; the one before is kept under its name with `.1`."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
LAST_LINES, _LAST_BYTES, _MOST_CHARS = 5, 8192, 300
_MOST_LINE_BYTES = 2**16
"""Most bytes of a line that are looked at: each of them may be an escape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSample:
    """Use of the machine by one worker with its child processes, or by the driver alone, and by all of its node."""

    time_s: float
    """Unix seconds, on the clock of the node."""
    host: str
    pid: int
    cpu: float
    """Processor seconds per second since the sample before: 1 is one busy core."""
    memory: int
    """Bytes of resident memory, also shared ones."""
    gpu: float | None
    """Share of the time since the sample before in which its GPU computed; None without a GPU, or without NVML."""
    gpu_memory: int | None
    """Bytes in use on its GPU, by all processes."""
    node_cpu: float
    """Share of all cores of the node that are busy."""
    node_memory: float
    """Share of the node's memory in use."""
    node_shm: int
    """Bytes of `/dev/shm` in use: Ray's object store, and weights in shared memory."""
    node_sent: float
    node_received: float
    """`node_sent` and `node_received`: bytes per second over all of the node's networks but loopback."""
    log_bytes: int
    """Size of its log."""
    log_turn: int
    """Number of times that its log began anew."""


_KINDS: dict[str, tuple[type, ...]] = {
    "float": (float, int),
    "int": (int,),
    "str": (str,),
    "float | None": (float, int, type(None)),
    "int | None": (int, type(None)),
}
_FIELDS = [(f.name, _KINDS[str(f.type)]) for f in fields(MachineSample)]


def last_sample(run_dir: Path, worker: str) -> MachineSample | None:
    """Return the last sample of a worker; None if it has written none."""
    with suppress(OSError):
        for line in reversed(_end_of(run_dir / MACHINE / f"{worker}.jsonl")):
            if (sample := sample_of(line)) is not None:
                return sample
    return None


def last_lines(run_dir: Path, worker: str) -> list[str]:
    """Return the last lines of a worker's log that are not empty."""
    try:
        lines = _end_of(run_dir / LOGS / f"{worker}.log")
    except OSError:
        return []
    texts = [line_of_log(line)[:_MOST_CHARS] for line in lines]
    return [text for text in texts if text][-LAST_LINES:]


def line_of_log(raw: bytes) -> str:
    """Return the beginning of a line of a log as a terminal shows it: without escapes and colours, of a progress bar
    its last state."""
    last = raw.rstrip().rpartition(b"\r")[2][:_MOST_LINE_BYTES]
    return _ESCAPES.sub("", last.decode(errors="replace")).rstrip()


def described_end(exit_code: int) -> str:
    """Describe the end of a process; the code is minus the number of the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-exit_code}"


def _end_of(path: Path) -> list[bytes]:
    """Lines in the last bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        return file.read().split(b"\n")


def sample_of(line: bytes) -> MachineSample | None:
    """Decode a line of a file of samples; None if it is damaged."""
    try:
        row: Any = orjson.loads(line)
        values = {name: row[name] for name, _ in _FIELDS}
    except (ValueError, LookupError, TypeError):
        return None
    return MachineSample(**values) if all(type(values[name]) in kinds for name, kinds in _FIELDS) else None
