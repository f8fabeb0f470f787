"""Tables and pictures of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure

from algorithms.gac import GAC
from examples.stability.lab import Outcome, Run
from examples.stability.quadratic import CONTROL, boundary_cosine, descend, growth, stability_limit
from examples.stability.studies import Row
from examples.study import markdown, running_mean

EARLY = 40
"""Number of first asynchronous steps whose mean is the early cosine."""
HEAD = (
    "batch", "algorithm", "staleness", "GAC", "final reward", "collapse at version",
    f"cosine, first {EARLY} asynchronous steps", "safe / projected / skipped", "update cosine",
)  # fmt: skip
COLOURS = ("#636363", "#9ecae1", "#d94801", "#08519c", "#31a354", "#756bb1", "#e7298a", "#000000")
AGES = (0, 1, 2, 4, 8, 16, 32)
"""Staleness of the descents on a quadratic."""
QUADRATIC = {
    "none": GAC(),
    "projection": replace(CONTROL, max_skips=0),
    "projection and skips": CONTROL,
    "calibrated, 100 steps": GAC(enabled=True, calibrate_steps=100, max_skips=1),
}


def table(rows: Sequence[Row], done: Mapping[Run, Outcome]) -> str:
    """Build a Markdown table: one line per row, medians over seeds."""
    return markdown(HEAD, [_cells(row, [done[run] for run in row.runs]) for row in rows])


def final_reward(row: Row, done: Mapping[Run, Outcome]) -> float:
    """Return the reward of the final weights on held-out tasks, median over seeds."""
    return median(done[run].final_reward for run in row.runs)


def learning_curve(run: Run, rewards: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the sampling versions and the mean reward of their samples; a stale run has none of its last versions."""
    by_version: dict[int, list[float]] = {}
    for step, reward in enumerate(rewards):
        by_version.setdefault(run.sampled_from(step), []).append(reward)
    return list(by_version), [fmean(values) for values in by_version.values()]


def collapse_version(run: Run, outcome: Outcome) -> int | None:
    """Return the version from which the mean reward of ten stays below half of its earlier peak; None without one."""
    versions, rewards = learning_curve(run, outcome.rewards)
    peak, fell = 0.0, None
    for version, mean in zip(versions, running_mean(rewards), strict=True):
        peak = max(peak, mean)
        if mean >= peak / 2:
            fell = None
        elif fell is None:
            fell = version
    return fell


def _cells(row: Row, outcomes: Sequence[Outcome]) -> Sequence[str]:
    run, finals = row.run, [o.final_reward for o in outcomes]
    collapses = [str(version) for o in outcomes if (version := collapse_version(run, o)) is not None]
    synchronous = run.gac.synchronous_steps
    start = max(1, synchronous)  # the first gradient has no previous one
    regimes = [value for o in outcomes for value in o.metrics["gac/regime"][synchronous:]]
    return (
        f"{run.groups} x {run.group_size}",
        run.algorithm + (f", {run.updates} updates a step" if run.updates > 1 else ""),
        str(run.staleness),
        row.label,
        f"{median(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})" if len(finals) > 1 else f"{finals[0]:.3f}",
        f"{', '.join(collapses)} ({len(collapses)} of {len(outcomes)})" if collapses else "none",
        f"{median(_mean(o.metrics['gac/cosine'][start : start + EARLY]) for o in outcomes):.2f}",
        " / ".join(f"{regimes.count(regime) / max(1, len(regimes)):.0%}" for regime in range(3)),
        f"{median(_mean(o.metrics['gac/update_cosine'][start:]) for o in outcomes):.2f}",
    )


def _mean(values: Sequence[float | None]) -> float:
    """Average over the steps with a value; 0 if none has."""
    given = [value for value in values if value is not None]
    return fmean(given) if given else 0.0


# ------------------------------------------------------------------------------------------------------------ pictures

REWARD = "reward of the version that sampled, mean of ten and of all seeds;\ndot: final weights on held-out tasks"
COSINE = "cosine of consecutive gradients,\nmean of ten steps and of all seeds"


def draw_grid(rows: Sequence[Row], done: Mapping[Run, Outcome], folder: Path) -> None:
    """Draw the grid as PNG files in `folder`: a panel for each algorithm and staleness, a line for each control."""
    lines = [(row.run.algorithm, f"GAC {row.label}", row) for row in rows]
    _draw_lines(lines, done, folder / "stability_reward.png", REWARD)
    _draw_lines(lines, done, folder / "stability_cosine.png", COSINE)
    draw_quadratic(folder / "stability_quadratic.png")


def draw_corrections(rows: Sequence[Row], done: Mapping[Run, Outcome], folder: Path) -> None:
    """Draw the comparison: a panel for each staleness, a line for each algorithm."""
    _draw_lines([("", row.run.algorithm, row) for row in rows], done, folder / "stability_corrections.png", REWARD)


def _draw_lines(lines: Sequence[tuple[str, str, Row]], done: Mapping[Run, Outcome], path: Path, what: str) -> None:
    """Draw lines of a panel's name, a label and a row: panels by name, downwards, and by staleness, to the right."""
    names, ages = list(dict.fromkeys(name for name, _, _ in lines)), sorted({row.run.staleness for _, _, row in lines})
    colours = dict(zip(dict.fromkeys(label for _, label, _ in lines), COLOURS, strict=False))
    figure = Figure(figsize=(3.2 * len(ages), 2.7 * len(names) + 0.5), layout="constrained")
    grid = figure.subplots(len(names), len(ages), sharex=True, sharey=True, squeeze=False)
    for name, label, row in lines:
        axes, outcomes = grid[names.index(name)][ages.index(row.run.staleness)], [done[run] for run in row.runs]
        if what == REWARD:
            curves = [learning_curve(row.run, outcome.rewards) for outcome in outcomes]
            versions, means = curves[0][0], [fmean(column) for column in zip(*(c[1] for c in curves), strict=True)]
            axes.plot(row.run.steps, fmean(o.final_reward for o in outcomes), "o", color=colours[label], markersize=4)
        else:
            means = [_mean(of_step) for of_step in zip(*(o.metrics["gac/cosine"] for o in outcomes), strict=True)]
            versions = list(range(1, len(means) + 1))
        axes.plot(versions, running_mean(means), color=colours[label], label=label)
    for (i, name), (j, staleness) in product(enumerate(names), enumerate(ages)):
        grid[i][j].set_title(f"staleness {staleness}{', ' if name else ''}{name}", fontsize=9)
        grid[i][j].grid(alpha=0.3)
    grid[0][-1].legend(fontsize=7)
    figure.supxlabel("version of the weights", fontsize=9)
    figure.suptitle(what, fontsize=10)
    figure.savefig(path, dpi=120)


def draw_quadratic(path: Path) -> None:
    """Draw the limit of stability, the cosine there, and noisy descent at staleness 16."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    limits, cosines, losses = figure.subplots(1, 3)
    for staleness, colour in zip((0, 4, 16), COLOURS[1:], strict=False):
        sizes = [0.01 * i for i in range(1, 221)]
        limits.plot(sizes, [growth(size, staleness) for size in sizes], color=colour, label=f"staleness {staleness}")
        limits.axvline(stability_limit(staleness), color=colour, linestyle=":")
    limits.axhline(1, color="black", linewidth=0.5)
    limits.set(xscale="log", ylim=(0.7, 1.5), xlabel="learning rate x curvature", title="growth of a step")
    cosines.plot(AGES, [boundary_cosine(s) for s in AGES], "o-", color=COLOURS[3])
    cosines.set(xlabel="staleness", title="cosine of gradients at the limit")
    for (label, control), colour in zip(QUADRATIC.items(), COLOURS[1:], strict=False):
        losses.plot(descend(16, control).losses, color=colour, label=label)
    losses.set(yscale="log", ylim=(0.1, 1e4), xlabel="step", title="loss, 200 noisy coordinates, staleness 16")
    for axes in (limits, cosines, losses):
        axes.grid(alpha=0.3)
    for axes in (limits, losses):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def quadratic_table() -> str:
    """Build a Markdown table: the closed form, and the mean loss and cosine of the last 100 steps of noisy descent."""
    rows = []
    for s in AGES:
        found = [descend(s, control) for control in QUADRATIC.values()]
        cells = [
            f"diverged at {len(d.losses)}" if d.has_diverged else f"{d.final():.3g}, {fmean(d.cosines[-100:]):.2f}"
            for d in found
        ]
        rows.append([str(s), f"{stability_limit(s):.3f}", f"{boundary_cosine(s):.3f}", *cells])
    controls = (f"{name}: loss, cosine" for name in QUADRATIC)
    return markdown(["staleness", "limit of η λ", "cosine there", *controls], rows)
