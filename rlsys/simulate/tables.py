"""Readable outcome of a simulation: a table and a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rlsys.errors import ConfigError
from rlsys.simulate.sim_report import Report
from rlsys.simulate.sweep import SweepOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    throughput, staleness, idle = figure.subplots(1, 3)
    _plot_throughput(throughput, outcome)
    _plot_staleness(staleness, outcome)
    _plot_idle(idle, outcome)
    steps = next(iter(outcome.runs.values())).measured
    figure.suptitle(f"{outcome.profile}, simulated, means over {steps} steps")
    figure.savefig(path, dpi=150)


def _plot_throughput(axes: Axes, outcome: SweepOutcome) -> None:
    rates = [report.tokens_per_s / 1000 for report in outcome.runs.values()]
    axes.bar(_labels(outcome), rates, color="tab:blue", width=0.6)
    for x, (rate, ratio) in enumerate(zip(rates, outcome.speedup.values(), strict=True)):
        axes.annotate(f"{rate:,.3g}\n{ratio:.2f}x", (x, rate), ha="center", va="bottom", fontsize=8)
    axes.margins(y=0.15)
    axes.set(title="throughput", xlabel=outcome.key, ylabel="1,000 trained tokens/s")


def _plot_staleness(axes: Axes, outcome: SweepOutcome) -> None:
    """Stack the shares, one colour for each number of versions."""
    from matplotlib import colormaps

    every = sorted({int(v) for report in outcome.runs.values() for v in report.staleness})
    below = [0.0] * len(outcome.runs)
    for versions in every:
        shares = [report.staleness.get(str(versions), 0.0) for report in outcome.runs.values()]
        color = colormaps["viridis"](versions / max(1, every[-1]))
        label = str(versions) if len(every) <= 8 or versions % 4 == 0 or versions == every[-1] else None
        axes.bar(_labels(outcome), shares, bottom=below, color=color, width=0.6, label=label)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axes.set(title="staleness of trained tokens", xlabel=outcome.key, ylabel="share of tokens")
    axes.legend(title="versions", fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plot_idle(axes: Axes, outcome: SweepOutcome) -> None:
    places, width = range(len(outcome.runs)), 0.38
    reports = outcome.runs.values()
    axes.bar([x - width / 2 for x in places], [100 * r.rollouts_idle for r in reports], width, label="rollouts")
    axes.bar([x + width / 2 for x in places], [100 * r.trainer_idle for r in reports], width, label="trainer")
    axes.set(title="idle", xlabel=outcome.key, ylabel="% of time", ylim=(0, 100))
    axes.set_xticks(list(places), _labels(outcome))
    axes.legend()


def _labels(outcome: SweepOutcome) -> list[str]:
    return [value or outcome.profile for value in outcome.runs]
