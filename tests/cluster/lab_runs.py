"""Runs on the hosts of a lab, whose files are read from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.lab import GCS_PORT, NETWORK, Ended, Lab, end_command
from tests.jobs import keys_of
from tests.ray.commands import DEADLINE_S, wait_until

SHARED_RUNS = Path("/mnt/shared/runs")
NAME = "r"
REWARD = "def digits(completion):\n    return sum(c.isdigit() for c in completion) / 8\n"


def lab_keys(folder: Path = SHARED_RUNS) -> list[str]:
    """Return the overrides of a small run on a lab's cluster."""
    keys = keys_of("/mnt/given/model", Path("/mnt/given/tasks.jsonl"), folder)
    keys = [key for key in keys if not key.startswith(("reward.fn", "limits.silence_s"))]
    return [*keys, "reward.fn=/mnt/given/judges.py:digits", f"run.name={NAME}", "ray=auto"]


def give(lab: Lab, model_path: Path, data_path: Path) -> None:
    """Give all hosts a model, tasks and a reward."""
    shutil.copytree(model_path, lab.given / "model")
    shutil.copy(data_path, lab.given / "tasks.jsonl")
    (lab.given / "judges.py").write_text(REWARD)


@dataclass(frozen=True)
class LabRun:
    """A run that a host has started."""

    process: subprocess.Popen[str]
    folder: Path
    """Its folder, seen from outside."""

    @classmethod
    @contextmanager
    def on(cls, lab: Lab, number: int, overrides: Sequence[str] = ()) -> Iterator[LabRun]:
        """Start a run with `lab_keys` on a host, with its folder on the shared disk; kill it at the end of the
        block."""
        address = {"RAY_ADDRESS": f"{NETWORK}.1:{GCS_PORT}"}
        process = lab.host(number).start("rlsys", "train", *lab_keys(), *overrides, environment=address)
        try:
            yield cls(process, lab.folder / "shared" / SHARED_RUNS.name / NAME)
        finally:
            end_command(process)

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the run's events of one kind, so far."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    @property
    def steps_at(self) -> list[float]:
        """Time of the end of every step."""
        return [row["time_s"] for row in self.events("step_done")]

    def wait_for_step(self, number: int) -> None:
        """Return once so many steps are done. Raises `AssertionError` if the run ends before."""
        wait_until(lambda: len(self.steps_at) >= number or self.process.poll() is not None)
        assert len(self.steps_at) >= number, self.process.communicate()

    def end(self) -> Ended:
        """Wait until it ends by itself."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return Ended(self.process.returncode, out, err)
