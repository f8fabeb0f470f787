"""Tracker `wandb`: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, ClassVar, Literal

from rlsys.monitoring.events import AlertRaised
from rlsys.monitoring.metric_catalog import alias
from rlsys.monitoring.tracker import EndReason, RunFacts, StepTracker, TrackedEpisode

if TYPE_CHECKING:
    import wandb

_FINISH_S = 8.0
"""Most seconds for sending the rest when a run ends. Without a limit, an unreachable server would keep the process and
its machines for hours; `wandb sync` sends what is on disk."""


@dataclass(frozen=True, kw_only=True)
class WandB(StepTracker):
    """Weights & Biases, online or offline; a resumed run continues under the same id."""

    package: ClassVar[str] = "wandb"
    project: str = "rlsys"
    """Project of the run."""
    entity: str | None = None
    """User or team; None: the default of the API key."""
    name: str | None = None
    """Name of the run there; None: `run.name`."""
    group: str | None = None
    """Group of runs; None: none, or the run of several policies."""
    tags: tuple[str, ...] = ()
    """Tags, e.g. `[sums, grpo]`."""
    notes: str | None = None
    """Description of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline: write to `RUN/tracking/wandb`, for a later `wandb sync`. None: the value of the variable WANDB_MODE,
    else online."""

    def start(self, run: RunFacts) -> WandBRun:
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # without this it asks for the key on the terminal, from this thread
        identity = run.kept_id("wandb", lambda: token_hex(4))
        opened = wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.title if self.name is None else run.title.replace(run.name, self.name, 1),
            group=self.group or (run.name if run.policy else None),
            tags=self.tags or None,
            notes=self.notes,
            id=identity,
            resume="allow",
            mode=self.mode,
            dir=run.folder,
            config=dict(run.config),
            reinit="create_new",  # several policies are several runs there, at the same time
            settings=wandb.Settings(console="off", silent=True, finish_timeout=_FINISH_S, finish_timeout_raises=True),
        )
        return WandBRun(opened, alias("step", self.names))


class WandBRun:
    """Open run in W&B. Its x axis is the metric `step`, not the number of the call, because evaluations end late and a
    resumed run repeats steps."""

    def __init__(self, run: wandb.Run, step_name: str) -> None:
        self._run, self._step_name = run, step_name
        run.define_metric(step_name)
        run.define_metric("*", step_metric=step_name)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log one row of the history."""
        self._run.log({**values, self._step_name: step})

    def rollouts(self, step: int, rows: Sequence[TrackedEpisode]) -> None:
        """Log a table, `rollouts`."""
        import wandb

        table = wandb.Table(columns=[*TrackedEpisode._fields], data=[list(row) for row in rows])
        self._run.log({"rollouts": table, self._step_name: step})

    def alert(self, alert: AlertRaised) -> None:
        """Send an alert, which W&B also mails if the user enabled that."""
        self._run.alert(title=alert.alert, text=f"Step {alert.step}: {alert.sentence}", level="WARN")

    def close(self, reason: EndReason) -> None:
        """Mark the run as finished, killed or failed, and wait until all data is sent or written. Raises `TimeoutError`
        if that takes too long."""
        try:
            self._run.finish(exit_code={"finished": 0, "interrupted": 130, "failed": 1}[reason])
        except TimeoutError:
            remedy = f"send it by `wandb sync {self._run.settings.sync_dir}`"
            raise TimeoutError(f"the server did not take the rest within {_FINISH_S:g} s; {remedy}") from None
