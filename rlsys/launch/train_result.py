"""Result of a run, collected from its events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean

from rlsys.monitoring.events import Event, Events, PhaseDone, RunStarted, StepDone

SMOOTHED_STEPS = 10
"""Number of steps averaged in `reward_first` and `reward_last`."""


@dataclass
class TrainResult:
    """Result of a run, collected from its events."""

    run_dir: str
    steps: int = 0
    """Optimizer steps behind the final weights."""
    reward_first: float | None = None
    """Mean reward of the first 10 steps of this session; None if it took none."""
    reward_last: float | None = None
    """Mean reward of the last 10 steps."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: start-up phases by name, then the sum of each `time/*` metric over the steps."""
    policies: dict[str, TrainResult] = field(default_factory=dict)
    """Results by name, for several policies. `steps` is then their minimum, and only the policies have rewards."""

    def as_json(self) -> dict[str, object]:
        """Result as JSON, as the command line prints it."""
        return {
            "run_dir": self.run_dir,
            "steps": self.steps,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "seconds": {phase: round(s, 3) for phase, s in self.seconds.items()},
            **(
                {"policies": {name: result.as_json() for name, result in self.policies.items()}}
                if self.policies
                else {}
            ),
        }


class Summary:
    """Sink that fills a `TrainResult`."""

    def __init__(self, result: TrainResult) -> None:
        self._result = result
        self._rewards: list[float] = []

    def handle(self, event: Event, time_s: float) -> None:
        seconds = self._result.seconds
        if isinstance(event, PhaseDone):
            seconds[event.phase] = event.seconds
        elif isinstance(event, RunStarted):
            self._result.steps = event.first_step
        elif isinstance(event, StepDone):
            self._result.steps = event.step
            self._rewards.append(event.metrics["reward/mean"])
            self._result.reward_first = fmean(self._rewards[:SMOOTHED_STEPS])
            self._result.reward_last = fmean(self._rewards[-SMOOTHED_STEPS:])
            for name, value in event.metrics.items():
                if name.startswith("time/"):
                    seconds[name.removeprefix("time/")] = seconds.get(name.removeprefix("time/"), 0.0) + value

    def close(self) -> None: ...


class FirstStep:
    """Sink that measures the time from the command to the end of the first step."""

    def __init__(self, events: Events, began: float) -> None:
        self._events, self._began, self._is_over = events, began, False

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone) and not self._is_over:
            self._is_over = True
            self._events.emit(PhaseDone("first_step", time.monotonic() - self._began))

    def close(self) -> None: ...
