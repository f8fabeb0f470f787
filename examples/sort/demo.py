"""Demo of `make demo`: make a tiny policy, train it on Ray, show its improvement."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path

from examples.curve import draw_curve, print_summary
from examples.sort.prepare import Recipe, prepare
from rlsys import launch
from rlsys.config import Config

RUN = Path(__file__).with_name("run.yaml")


def main() -> None:
    """Warm-start, train, summarise."""
    parser = argparse.ArgumentParser(description="Train the tiny policy to sort six digits.")
    parser.add_argument("--seed", type=int, default=0, help="of the warm start and of the run")
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()

    began = time.perf_counter()
    prepared = Path(".cache/sort") / f"seed{arguments.seed}"
    print(f"warm start: {prepared}", file=sys.stderr, flush=True)
    figures = prepare(prepared, Recipe(seed=arguments.seed))
    warm_start_s = time.perf_counter() - began

    config = Config.load(
        RUN,
        [
            f"run.name=sort-seed{arguments.seed}-{datetime.now():%Y%m%d-%H%M%S}",
            f"run.seed={arguments.seed}",
            f"run.steps={arguments.steps}",
            f"model.path={prepared / 'model'}",
            f"data.path={prepared / 'train.jsonl'}",
            f"eval.data.held_out={prepared / 'eval.jsonl'}",
        ],
    )
    result = launch.train(config)
    result.seconds = {"warm_start": warm_start_s, **result.seconds}
    curve = draw_curve(config.run_dir, f"sort six digits, seed {arguments.seed}")
    print_summary(result, figures, curve)


if __name__ == "__main__":
    main()
