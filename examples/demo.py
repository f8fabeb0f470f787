"""Demo of an example: prepare, train on Ray, draw the reward curve, and print its figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measure import rows_of
from examples.study import running_mean
from rlsys import launch
from rlsys.config import Config


def train_and_show(
    name: str, title: str, steps: int, prepare: Callable[[int], tuple[Path, Mapping[str, float]]]
) -> None:
    """Train `examples/NAME/run.yaml` with the seed and the steps of the command line.

    `prepare` fills the folder of a seed, and returns it with the figures of the model before training: `sampled` or
    `greedy` accuracy, or both. The last line on stdout is the result as JSON.
    """
    parser = argparse.ArgumentParser(description=f"Train the example `{name}`: {title}.")
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--steps", type=int, default=steps)
    arguments = parser.parse_args()

    began = time.perf_counter()
    print("preparing model and tasks", file=sys.stderr, flush=True)
    prepared, before = prepare(arguments.seed)
    prepare_s = time.perf_counter() - began

    config = Config.load(
        Path("examples") / name / "run.yaml",
        [
            f"run.name={name}-seed{arguments.seed}-{datetime.now():%Y%m%d-%H%M%S}",
            f"run.seed={arguments.seed}",
            f"run.steps={arguments.steps}",
            f"model.path={prepared / 'model'}",
            f"data.path={prepared / 'train.jsonl'}",
            f"eval.data.held_out={prepared / 'eval.jsonl'}",
        ],
    )
    result = launch.train(config)
    result.seconds = {"prepare": prepare_s, **result.seconds}
    curve = draw_curve(config.run_dir, f"{title}, seed {arguments.seed}")
    measured = ", ".join(f"{kind} accuracy {before[kind]:.3f}" for kind in ("sampled", "greedy") if kind in before)
    print(f"before training   {measured}")
    print(f"reward            {result.reward_first:.3f} -> {result.reward_last:.3f} in {result.steps} steps")
    print(f"reward curve      {curve}")
    print(f"run directory     {result.run_dir}")
    print(f"evaluate it       rlsys eval {result.run_dir}")
    print(json.dumps(result.as_json()), flush=True)


def draw_curve(run_dir: Path, title: str) -> Path:
    """Draw reward against step into `reward.png` in the run directory; return its path."""
    rows = [row for row in rows_of(run_dir / "metrics.jsonl") if "reward/mean" in row]  # others are evaluations
    steps, rewards = [row["step"] for row in rows], [row["reward/mean"] for row in rows]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="mean of the step's samples")
    axes.plot(steps, running_mean(rewards), color="#08519c", linewidth=2, label="mean of 10 steps")
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    return path
