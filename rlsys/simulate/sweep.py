"""Simulations of one profile for several values of one key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rlsys.errors import ConfigError
from rlsys.simulate.profile import Profile
from rlsys.simulate.sim_report import Report
from rlsys.simulate.simulation import Simulation

DEFAULT_STEPS = 12
"""Steps after which throughput is stable within a few percent at a moderate `max_staleness`."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Key of a profile, and its values."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Parse a text such as `max_staleness=0,1,2`. Raises `ConfigError`."""
        key, equals, listed = text.partition("=")
        values = tuple(value.strip() for value in listed.split(","))
        if not equals or not key:
            raise ConfigError(f"--sweep {text}: give KEY=VALUE,VALUE,... as in max_staleness=0,1,2")
        if wrong := [value for value in values if not _is_number(value)]:
            raise ConfigError(
                f"--sweep {key}: {', '.join(map(repr, wrong))}: only numbers can be swept; give others as {key}=VALUE"
            )
        if len(set(values)) < len(values):
            raise ConfigError(f"--sweep {key}: {listed} names a value twice")
        return cls(key, values)


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """Reports of a simulation or of a sweep."""

    profile: str
    key: str
    """Swept key; empty for a single run."""
    runs: Mapping[str, Report]
    """Reports by swept value; a single run has an empty one."""

    @property
    def baseline(self) -> str:
        """Baseline value for comparisons: 0 if present, else the first."""
        return next((value for value in self.runs if _is_number(value) and float(value) == 0), next(iter(self.runs)))

    @property
    def speedup(self) -> dict[str, float]:
        """Throughput in trained tokens over that of the baseline, by value."""
        base = self.runs[self.baseline].tokens_per_s
        return {value: report.tokens_per_s / base for value, report in self.runs.items()}

    def as_json(self) -> dict[str, Any]:
        """Convert to a line of JSON."""
        if not self.key:
            return {"profile": self.profile, **self.runs[""].as_json()}
        runs = {value: report.as_json() for value, report in self.runs.items()}
        return {
            "profile": self.profile,
            "sweep": self.key,
            "baseline": self.baseline,
            "speedup": self.speedup,
            "runs": runs,
        }


def simulate(
    name: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: int = DEFAULT_STEPS,
    sweep: Sweep | None = None,
    on_run: Callable[[str, Report], None] = lambda value, report: None,
) -> SweepOutcome:
    """Simulate a profile, once for each value of the sweep; call `on_run` as each run ends.

    Raises `ConfigError` before the first run if any value is not possible.
    """
    values = sweep.values if sweep else ("",)
    profiles = {v: Profile.load(name, [*overrides, *([f"{sweep.key}={v}"] if sweep else [])]) for v in values}
    runs: dict[str, Report] = {}
    for value, profile in profiles.items():
        runs[value] = Simulation(profile, steps).run()
        on_run(value, runs[value])
    return SweepOutcome(str(name), sweep.key if sweep else "", runs)


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False
