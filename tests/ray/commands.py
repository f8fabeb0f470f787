"""Commands as processes of their own, for tests of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlsys.loop.checkpoint_files import find_latest
from tests.jobs import keys_of

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
RLSYS = SCRIPTS / "rlsys"
ENDLESS = 100_000
"""Steps of a run that a test ends."""
DEADLINE_S = 200.0
"""For anything a test waits for: minutes pass on a busy machine, seconds on a quiet one."""


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


class Command:
    """A running command, in a process group of its own, as a terminal starts it. Leaving the block kills all of it."""

    def __init__(self, *words: str | Path) -> None:
        self._process = subprocess.Popen(
            words,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):  # killing one may end the next
                os.kill(pid, signal.SIGKILL)

    def end(self) -> Ended:
        """Wait until it ends by itself."""
        stdout, stderr = self._process.communicate(timeout=DEADLINE_S)
        return Ended(self._process.returncode, stdout, stderr)

    def interrupt(self) -> None:
        """Ctrl-C: every process of the group gets it, as from a terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM to the command alone, as from `kill`, Docker and Kubernetes. The processes of a local Ray cluster
        end at once when they get it too, and no step can be finished then."""
        os.kill(self._process.pid, signal.SIGTERM)

    def hang_up(self) -> None:
        """SIGHUP to every process of the group, as from a terminal that is closed."""
        os.killpg(self._process.pid, signal.SIGHUP)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once it is so, while the command runs."""
        wait_until(lambda: is_so() or self._process.poll() is not None)
        assert is_so(), self.end().stderr

    def processes(self) -> list[int]:
        """Those it started that are still alive, itself included."""
        alive = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in alive if _session(pid) == self._process.pid]


def rlsys(*arguments: str | Path) -> Ended:
    """Run a command to its end."""
    with Command(RLSYS, *arguments) as command:
        return command.end()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return once it is so; other processes and their files announce nothing, so it looks again and again."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < DEADLINE_S, "waited in vain"
        time.sleep(0.05)


@dataclass
class Job:
    """A run in the making: its file, its keys, and what it wrote so far."""

    file: Path
    keys: list[str]
    run_dir: Path

    def train(self, steps: int, *keys: str) -> Command:
        return Command(RLSYS, "train", self.file, *self.keys, f"run.steps={steps}", *keys)

    @property
    def steps(self) -> list[int]:
        """Steps in `metrics.jsonl`, resumed ones included."""
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    @property
    def saved(self) -> int:
        """Step of the latest complete checkpoint."""
        latest = find_latest(self.run_dir / "checkpoints")
        assert latest is not None
        return int(latest.name.removeprefix("step_"))

    def interrupted(self, how: Callable[[Command], None], *keys: str) -> Ended:
        """Train, and end it once a step is done."""
        before = len(self.steps)
        with self.train(ENDLESS, "checkpoint.every=0", *keys) as command:
            command.wait_until(lambda: len(self.steps) > before)
            how(command)
            return command.end()


def job_in(folder: Path, model_path: Path, data_path: Path) -> Job:
    file = folder / "job.yaml"
    file.write_text("run: {steps: 4}\n")
    return Job(file, keys_of(model_path, data_path, folder), folder / "run")


def _session(pid: int) -> int | None:
    """The session of a process: its leader's id; None if it is gone or a zombie."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(session)
