"""Tracker plug-ins: send the metrics of a run to a service that shows many runs.

A plug-in is a frozen dataclass, which is its configuration. Its `start` opens the destination:

    tracking:
      - {type: wandb, project: sums, mode: offline}
      - tensorboard

Each tracker has a thread (`rlsys.monitoring.trackers.tracker_thread`): it may be slow or raise, and training continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from pydantic import NonNegativeInt, PositiveInt

from rlsys.monitoring.events import AlertRaised
from rlsys.monitoring.metric_catalog import NameSet
from rlsys.util.files import write_atomically

EndReason: TypeAlias = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The tracked run. With several policies, each policy is tracked as one run."""

    run_dir: Path
    name: str
    """Name of the run, `run.name`."""
    policy: str
    """Name of the policy; empty if the run has only one."""
    config: Mapping[str, Any]
    """Every key with its value, as in `config.resolved.yaml`."""
    first_step: int = 0
    """Step after which the run resumes; 0: a new run."""

    @property
    def folder(self) -> Path:
        """Folder for the files of trackers."""
        return self.run_dir / "tracking"

    @property
    def title(self) -> str:
        """Display name, e.g. `sums` or `sums/solver`."""
        return f"{self.name}/{self.policy}" if self.policy else self.name

    def kept_id(self, service: str, make: Callable[[], str]) -> str:
        """Id of the run in an external service, made once and stored with the run, so that a resumed run keeps it."""
        path = self.folder / f"{service}.json"
        if not path.exists():
            text = json.dumps({"id": make()})
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{text}\n")
        return json.loads(path.read_text())["id"]


class TrackedEpisode(NamedTuple):
    """One episode of a rollout record, as a row of a tracker's table."""

    step: int
    task_id: str
    group_id: int
    episode: int
    reward: float | None
    """Reward of the root; None: the episode failed, or has no reward."""
    advantage: float | None
    """Advantage of the root; None: not trained, or each sample has a separate one."""
    num_tokens: int
    """Tokens sampled by all agents."""
    outcome: str
    """`ok`, `truncated` or `failed`."""
    prompt: str
    text: str
    """Text of the root, all turns."""


class Tracker(Protocol):
    """Open destination of a run. Its methods are called in order, from one thread. If one raises, this call is lost."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a training step, or of an evaluation, which may arrive after later steps. A resumed run
        may repeat a step; the later values replace the earlier ones."""

    def rollouts(self, step: int, rows: Sequence[TrackedEpisode]) -> None:
        """Log episodes of a step, sorted by reward."""

    def alert(self, alert: AlertRaised) -> None:
        """Log an alert."""

    def close(self, reason: EndReason) -> None:
        """Close the destination; no call follows."""


@dataclass(frozen=True, kw_only=True)
class TrackerPlugin:
    """Base of every tracker's configuration."""

    package: ClassVar[str] = ""
    """Python package that it needs besides those of rlsys; the extra of the same name installs it."""

    def start(self, run: RunFacts) -> Tracker:
        """Open the destination for this run. May take long, and may raise."""
        raise NotImplementedError(f"{type(self).__name__} starts nothing: implement `start`")

    @property
    def name_set(self) -> NameSet:
        """Set of metric names that this tracker uses."""
        return "rlsys"

    def num_rows(self, step: int) -> int:
        """Most episodes of this step to pass to `rollouts`; 0: `rollouts` is not called."""
        return 0


@dataclass(frozen=True, kw_only=True)
class StepTracker(TrackerPlugin):
    """Base of trackers that show metrics by step, with rollouts."""

    names: NameSet = "rlsys"
    """Names of metrics: those of `rlsys/monitoring/metrics.md`, or those of verl or TRL for identical metrics, so that
    dashboards made for their runs still work."""
    rollouts_every: NonNegativeInt = 10
    """Steps between two tables of rollouts, out of the steps that `record.rollouts_every` writes; 0: none."""
    max_rollouts: PositiveInt = 64
    """Most episodes in one table, taken evenly from the lowest reward to the highest."""

    @property
    def name_set(self) -> NameSet:
        return self.names

    def num_rows(self, step: int) -> int:
        return self.max_rollouts if self.rollouts_every and step % self.rollouts_every == 0 else 0
