"""Simulations of one profile for several values of one key, and their table and plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rlsys.errors import ConfigError
from rlsys.simulate.profile import Profile
from rlsys.simulate.simulation import Report, Simulation


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
        runs = {value: report.as_json() for value, report in self.runs.items()}
        swept = {"sweep": self.key, "baseline": self.baseline, "speedup": self.speedup, "runs": runs}
        return {"profile": self.profile, **(swept if self.key else runs[""])}


def simulate(
    name: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: int = 12,
    sweep: Sweep | None = None,
) -> SweepOutcome:
    """Simulate a profile, once for each value of the sweep. Raises `ConfigError` before the first run if any value is
    not possible.

    Throughput is stable within a few percent after 12 steps at a moderate `max_staleness`.
    """
    values = sweep.values if sweep else ("",)
    profiles = {v: Profile.load(name, [*overrides, *([f"{sweep.key}={v}"] if sweep else [])]) for v in values}
    runs = {value: Simulation(profile, steps).run() for value, profile in profiles.items()}
    return SweepOutcome(str(name), sweep.key if sweep else "", runs)


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


ROWS: tuple[tuple[str, str, Callable[[Report], str]], ...] = (
    ("trained", "tokens/s", lambda r: f"{r.tokens_per_s:,.0f}"),
    ("trained", "samples/s", lambda r: f"{r.samples_per_s:,.2f}"),
    ("sampled", "tokens/s", lambda r: f"{r.generated_tokens_per_s:,.0f}"),
    ("step", "s", lambda r: f"{r.step_s:,.1f}"),
    ("  of it training", "s", lambda r: f"{r.train_s:,.1f}"),
    ("idle rollouts", "share", lambda r: f"{r.rollouts_idle:.0%}"),
    ("idle trainer", "share", lambda r: f"{r.trainer_idle:.0%}"),
    ("rollout halted by weights", "s/step", lambda r: f"{r.weights_exposed_s:.2f}"),
    ("trainer halted by publish", "s/step", lambda r: f"{r.publish_stall_s:.2f}"),
    ("weights at every relay after", "s", lambda r: f"{r.broadcast_s:.2f}"),
    ("weights in every replica after", "s", lambda r: "-" if r.freshness_s is None else f"{r.freshness_s:.2f}"),
    ("cache in use", "share", lambda r: f"{r.kv_used:.0%}"),
    ("context found cached", "share", lambda r: f"{r.cached_share:.0%}"),
    ("environments at work", "", lambda r: f"{r.environments_busy:,.1f}"),
    ("groups moved", "1/step", lambda r: f"{r.moved_groups:.1f}"),
    ("staleness, mean", "versions", lambda r: f"{r.staleness_mean:.2f}"),
    ("staleness, most of bound", "versions", lambda r: f"{r.staleness_max} of {r.staleness_bound}"),
    ("groups dropped", "", lambda r: str(r.dropped)),
)
"""Label, unit, and text of a report's value."""


def table_of(outcome: SweepOutcome) -> Table:
    """Build a table with one column for each swept value."""
    measured = next(iter(outcome.runs.values())).measured
    title = f"{outcome.profile}, means over the last {measured} steps"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column(outcome.key, no_wrap=True)
    table.add_column("", no_wrap=True)
    for value in outcome.runs:
        table.add_column(value, justify="right", no_wrap=True)
    if outcome.key:
        table.add_row(
            f"throughput over that of {outcome.baseline}", "ratio", *(f"{x:.2f}" for x in outcome.speedup.values())
        )
    for label, unit, text in ROWS:
        table.add_row(label, unit, *(text(report) for report in outcome.runs.values()))
    for versions in sorted({v for r in outcome.runs.values() for v in r.staleness}, key=int):
        shares = (f"{r.staleness.get(versions, 0.0):.0%}" for r in outcome.runs.values())
        table.add_row(f"  {versions} behind", "tokens", *shares)
    return table


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if a plot cannot be written there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'rlsys[examples]', or leave --plot out") from None
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.resolve().parent}")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: should end in .png, .svg or .pdf")


def plot(outcome: SweepOutcome, path: Path) -> None:
    """Plot throughput, staleness and idle time against the swept value."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    throughput, staleness, idle = figure.subplots(1, 3)
    reports, labels = outcome.runs.values(), [value or outcome.profile for value in outcome.runs]

    rates = [report.tokens_per_s / 1000 for report in reports]
    throughput.bar(labels, rates, color="tab:blue", width=0.6)
    for x, (rate, ratio) in enumerate(zip(rates, outcome.speedup.values(), strict=True)):
        throughput.annotate(f"{rate:,.3g}\n{ratio:.2f}x", (x, rate), ha="center", va="bottom", fontsize=8)
    throughput.margins(y=0.15)
    throughput.set(title="throughput", xlabel=outcome.key, ylabel="1,000 trained tokens/s")

    every = sorted({int(v) for report in reports for v in report.staleness})
    below = [0.0] * len(labels)
    for versions in every:
        shares = [report.staleness.get(str(versions), 0.0) for report in reports]
        color = colormaps["viridis"](versions / max(1, every[-1]))
        label = str(versions) if len(every) <= 8 or versions % 4 == 0 or versions == every[-1] else None
        staleness.bar(labels, shares, bottom=below, color=color, width=0.6, label=label)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    staleness.set(title="staleness of trained tokens", xlabel=outcome.key, ylabel="share of tokens")
    staleness.legend(title="versions", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    places, width = range(len(labels)), 0.38
    idle.bar([x - width / 2 for x in places], [100 * r.rollouts_idle for r in reports], width, label="rollouts")
    idle.bar([x + width / 2 for x in places], [100 * r.trainer_idle for r in reports], width, label="trainer")
    idle.set(title="idle", xlabel=outcome.key, ylabel="% of time", ylim=(0, 100))
    idle.set_xticks(list(places), labels)
    idle.legend()

    figure.suptitle(f"{outcome.profile}, simulated, means over {next(iter(reports)).measured} steps")
    figure.savefig(path, dpi=150)
