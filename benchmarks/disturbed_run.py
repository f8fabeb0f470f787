"""A training run that a benchmark disturbs: its commands, its events while they are written, and its processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import psutil

from benchmarks.measure import ENV, POLL_S

Line: TypeAlias = "dict[str, Any]"
"""An event as it is written to `events.jsonl`."""
PROCESSES = {
    "rollout": "ray::RolloutWorker",
    "session": "ray::SessionWorker",
    "reward": "ray::RewardWorker",
    "relay": "ray::Relay",
    "reference": "ray::ReferenceWorker",
    "actor": "ray::ActorRank",
    "critic": "ray::CriticRank",
}
"""By kind of worker: how the titles of its processes begin."""
NORMAL = 1.5
"""A step is as fast as before if it takes at most this multiple of the median."""


@dataclass
class DisturbedRun:
    """One run over any number of commands, each of which goes on from the newest checkpoint."""

    command: Sequence[str]
    folder: Path
    """Folder of the run, with `events.jsonl`."""
    events: list[Line] = field(default_factory=list)
    """All events so far; `follow` appends."""
    process: subprocess.Popen[bytes] | None = None
    _read: int = 0

    def start(self, num_read: int | None = None) -> None:
        """Start or resume the run; with `num_read`, the reader of its output ends after so many lines."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [*self.command, "run.resume=auto"]
        with (self.folder / "console.log").open("a") as log:
            if num_read is None:
                self.process = subprocess.Popen(command, env=ENV, stdout=log, stderr=log)
                return
            reader = subprocess.Popen(["head", "-n", str(num_read)], stdin=subprocess.PIPE, stdout=log)
            self.process = subprocess.Popen(command, env=ENV, stdout=reader.stdin, stderr=reader.stdin)
            assert reader.stdin is not None
            reader.stdin.close()

    @property
    def console(self) -> str:
        """What all commands printed."""
        return (self.folder / "console.log").read_text(errors="replace")

    def follow(self) -> list[Line]:
        """Return the events since the last call."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(map(len, whole))
        new = []
        for line in whole:
            with suppress(json.JSONDecodeError):  # a command that was killed on a full disk cut it
                new.append(json.loads(line))
        self.events += new
        return new

    def wait(self, is_met: Callable[[Line], bool], limit_s: float) -> Line:
        """Return the next event that meets the condition, by polling: a command cannot notify another process.

        Raises `RuntimeError` if the command ends first, or `limit_s` is over.
        """
        until = time.monotonic() + limit_s
        assert self.process is not None
        while time.monotonic() < until:
            is_over = self.process.poll() is not None
            for line in self.follow():
                if is_met(line):
                    return line
            if is_over:
                raise RuntimeError(f"the run ended with {self.process.returncode}:\n{self.console[-4000:]}")
            time.sleep(POLL_S)
        raise RuntimeError(f"not met within {limit_s:g} s; the last events:\n{self.events[-5:]}")

    def wait_steps(self, count: int, limit_s: float) -> float:
        """Return once so many further steps are done: the median of their seconds."""
        ends = [self.wait(is_step, limit_s)["time_s"] for _ in range(count + 1)]
        return median(after - before for before, after in pairwise(ends))

    def wait_recovered(self, kind: str, struck_s: float, step_s: float, limit_s: float) -> float:
        """Return the seconds from the strike at `struck_s` until a successor of the worker is ready, and a step takes
        no longer than `NORMAL` times `step_s` again."""
        self.wait(lambda line: line["kind"] == "worker_restarted" and line["worker"].startswith(kind), limit_s)
        before = self.wait(is_step, limit_s)["time_s"]
        while True:
            after = self.wait(is_step, limit_s)["time_s"]
            if after - before <= NORMAL * step_s:
                return after - struck_s
            before = after

    def workers(self, kind: str) -> list[psutil.Process]:
        """The live processes of a kind of worker below this process."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if " ".join(process.cmdline()).startswith(PROCESSES[kind]):
                    found.append(process)
        return found

    def end(self, signal: int, limit_s: float) -> tuple[int, float]:
        """Send a signal to the command; return its exit code, and the seconds until it ended.

        Raises `RuntimeError` after `limit_s`, with the last events of the run, and its processes that are left.
        """
        assert self.process is not None
        began_s = time.monotonic()
        self.process.send_signal(signal)
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            last = "\n".join(map(str, self.follow()[-10:]))
            left = ", ".join(child.name() for child in psutil.Process(self.process.pid).children(recursive=True))
            raise RuntimeError(
                f"signal {signal} did not end the run within {limit_s:g} s; left: {left}; the last events:\n{last}\n"
                f"its console:\n{self.console[-2000:]}"
            ) from None
        self.follow()
        return code, time.monotonic() - began_s

    def finish(self, limit_s: float) -> int:
        """Return the exit code of the command once it has ended by itself. Raises `RuntimeError` after `limit_s`."""
        assert self.process is not None
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the run did not end within {limit_s:g} s:\n{self.console[-2000:]}") from error
        self.follow()
        return code

    def kill(self) -> None:
        """Kill what is left of the command."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def is_step(line: Line) -> bool:
    """Return True for the end of a step."""
    return line["kind"] == "step_done"
