"""The tracker door: what takes a run's metrics to where people look at those of all their runs.

A plug-in is a frozen dataclass, its configuration, whose `start` opens the place to write to:

    tracking:
      - {type: wandb, project: sums, mode: offline}
      - tensorboard

Each runs in a thread of its own, see `rlsys.monitoring.trackers.tracker_thread`: it may be slow and may raise, and
training goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from pydantic import NonNegativeInt, PositiveInt

from rlsys.monitoring.events import AlertRaised

EndReason: TypeAlias = Literal["finished", "interrupted", "failed"]
NameSet: TypeAlias = Literal["rlsys", "verl", "trl"]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run that is tracked; of several policies, one of them is a run by itself."""

    run_dir: Path
    name: str
    """Of the run, `run.name`."""
    policy: str
    """Which policy of it; empty if it has one."""
    config: Mapping[str, Any]
    """Every key with its value, as `config.resolved.yaml` holds it."""
    first_step: int = 0
    """Step it goes on after; 0: it starts anew."""

    @property
    def folder(self) -> Path:
        """Where trackers keep what they need on disk."""
        return self.run_dir / "tracking"

    @property
    def title(self) -> str:
        """What people call it, e.g. `sums` or `sums/solver`."""
        return f"{self.name}/{self.policy}" if self.policy else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One episode in a table of rollouts."""

    step: int
    task_id: str
    group_id: int
    """Of its group."""
    episode: int
    reward: float | None
    """None: it failed, or has none."""
    advantage: float | None
    """Of its root; None: not trained, or each sample has its own."""
    num_tokens: int
    """Sampled, by all its agents."""
    outcome: str
    """`ok`, `truncated` or `failed`."""
    prompt: str
    text: str
    """What its root said, all turns."""


class Tracker(Protocol):
    """A place that is open. Its methods are called in order, all from one thread; whatever they raise ends it."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step: those of training, or those of an evaluation, which may come later than younger
        steps. A step may come again after a resume; then the later counts."""
        ...

    def rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Take episodes of a step, sorted by reward."""
        ...

    def alert(self, alert: AlertRaised) -> None:
        """Something looks wrong."""
        ...

    def close(self, reason: EndReason) -> None:
        """The run ended; nothing follows."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackerPlugin:
    """Base of every tracker's configuration."""

    package: ClassVar[str] = ""
    """Python package that it needs besides those of rlsys, which the extra of that name installs."""

    def start(self, run: RunFacts) -> Tracker:
        """Open the place for this run. It may take long, and may raise."""
        raise NotImplementedError(f"{type(self).__name__} starts nothing: implement `start`")

    @property
    def name_set(self) -> NameSet:
        """What metrics are called there."""
        return "rlsys"

    def num_rows(self, step: int) -> int:
        """Most episodes of this step that `rollouts` wants; 0: it is not called."""
        return 0


@dataclass(frozen=True, kw_only=True)
class StepTracker(TrackerPlugin):
    """Base of those that show numbers by step, and rollouts beside them."""

    names: NameSet = "rlsys"
    """What metrics are called: as `docs/metrics.md` says, or, where verl or TRL have the same figure, as they call it,
    so that pages made for their runs go on working."""
    rollouts_every: NonNegativeInt = 10
    """Steps between two whose rollouts go there, of those that `record.rollouts_every` writes; 0: none."""
    max_rollouts: PositiveInt = 64
    """Most episodes of such a step, taken evenly from the lowest reward to the highest."""

    @property
    def name_set(self) -> NameSet:
        return self.names

    def num_rows(self, step: int) -> int:
        return self.max_rollouts if self.rollouts_every and step % self.rollouts_every == 0 else 0
