"""`make demo-llm`: train SmolLM2-135M-Instruct on Ray to name the largest of three numbers."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path

from examples.curve import draw_curve, print_summary
from examples.smollm.prepare import Recipe, prepare
from rlsys import launch
from rlsys.config import Config

RUN = Path(__file__).with_name("run.yaml")
PREPARED = Path(".cache/smollm")


def main() -> None:
    """Prepare, train, summarise."""
    parser = argparse.ArgumentParser(description="Train SmolLM2 to name the largest of three numbers.")
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    began = time.perf_counter()
    print(f"model and tasks: {PREPARED}", file=sys.stderr, flush=True)
    figures = prepare(PREPARED, Recipe())
    prepare_s = time.perf_counter() - began

    name = f"smollm-seed{arguments.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    config = Config.load(RUN, [f"run.name={name}", f"run.seed={arguments.seed}", f"run.steps={arguments.steps}"])
    result = launch.train(config)
    result.seconds = {"prepare": prepare_s, **result.seconds}
    curve = draw_curve(config.run_dir, f"SmolLM2-135M, largest of three, seed {arguments.seed}")
    print_summary(result, figures, curve)


if __name__ == "__main__":
    main()
