"""Reward curve of a run as a picture, and its figures, for both demos."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlsys.launch import TrainResult

WINDOW = 10
"""Steps of the running mean."""


def read_rewards(run_dir: Path) -> list[tuple[int, float]]:
    """Read step and mean reward of every step from a run's `metrics.jsonl`; its other rows are evaluations."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Average each value with up to `window - 1` before it: `[1, 3, 5]` over 2 gives `[1, 2, 4]`."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


def draw_curve(run_dir: Path, title: str) -> Path:
    """Draw reward against step into `reward.png` in the run directory; return its path."""
    steps, rewards = zip(*read_rewards(run_dir), strict=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="mean of the step's samples")
    axes.plot(steps, running_mean(rewards), color="#08519c", linewidth=2, label=f"mean of {WINDOW} steps")
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path


def print_summary(result: TrainResult, before: Mapping[str, float], curve: Path) -> None:
    """Print the paths and figures, then the result as one line of JSON, the last on stdout.

    `before` are the figures of the model before training, `sampled` or `greedy` accuracy or both.
    """
    measured = ", ".join(f"{name} accuracy {before[name]:.3f}" for name in ("sampled", "greedy") if name in before)
    print(f"before training   {measured}")
    print(f"reward            {result.reward_first:.3f} -> {result.reward_last:.3f} in {result.steps} steps")
    print(f"reward curve      {curve}")
    print(f"run directory     {result.run_dir}")
    print(f"evaluate it       rlsys eval {result.run_dir}")
    print(json.dumps(result.as_json()), flush=True)
