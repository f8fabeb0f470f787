"""What benchmarks share: CPU time of process trees, marks between which a run is steady, medians with their spread."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a run: its step had just ended."""

    step: int
    cpu_s: float
    """CPU time so far of the process, all its descendants, and those of them that have ended."""
    wall_s: float


def marks_of(command: Sequence[str], env: Mapping[str, str], metrics: Path, steps: Sequence[int]) -> list[Mark]:
    """Run a command that writes one row to the file `metrics` after each step; a mark at the end of each of `steps`.

    Waits for rows of the file. It is polled, because neither peer can notify us; a poll misses a step's end by at most
    `POLL_S`. Raises `RuntimeError` with the end of its output if the command fails.
    """
    _adopt_orphans()
    metrics.parent.mkdir(parents=True, exist_ok=True)
    log_path = metrics.with_suffix(".log")
    marks: list[Mark] = []
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if len(marks) < len(steps) and _num_rows(metrics) >= steps[len(marks)]:
                    marks.append(Mark(_num_rows(metrics), _tree_cpu_s(process.pid), time.perf_counter()))
                time.sleep(POLL_S)
        finally:
            _end_descendants()
    if process.returncode or len(marks) < len(steps):
        tail = "\n".join(log_path.read_text().splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode} after {len(marks)} marks\n{tail}")
    return marks


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, least and greatest of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def print_result(figures: Mapping[str, object]) -> None:
    """The closing line of every benchmark: one JSON object on stdout, with the command that made it."""
    command = f"python -m {Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}"
    print(json.dumps({**figures, "command": command.strip()}), flush=True)


def _num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _adopt_orphans() -> None:
    """Daemons whose parent ends become our children instead of init's, so that their CPU time is still found."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and its descendants, adopted ones and ended ones included; this process is left out."""
    table = _processes()
    pids = _below(os.getpid(), table)
    assert root in pids
    return sum(table[pid][1] for pid in pids) / TICKS_PER_S


def _processes() -> dict[int, tuple[int, int]]:
    """Of every process: its parent, and its CPU ticks with those of its children that ended and were waited for."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    return table


def _below(root: int, table: Mapping[int, tuple[int, int]]) -> list[int]:
    found: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, (parent, _) in table.items() if parent in frontier}
        found += frontier
    return found


def _end_descendants() -> None:
    for pid in _below(os.getpid(), _processes()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
