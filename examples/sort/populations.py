"""Search for a learning rate by population, with early ends, and at random, in as many steps; print a table.

    python -m examples.sort.populations --seeds 0,1,2

Each search is `rlsys population` on `examples/sort/run.yaml`, with the model and data of the seed and one replica for
each run. The learning rate is drawn from 1e-5 to 3e-2. Early ends begin with twice as many runs; a half of them ends at
a quarter of the steps, another half at a half. Finished searches are lines of the file `--out` and not run again; all
figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import ENV
from examples.sort.prepare import prepare_seed
from examples.study import markdown, run_all

SEARCHES: Mapping[str, Mapping[str, object]] = {
    "random": {"members": 4, "search": "random"},
    "pbt": {"members": 4, "search": "pbt", "share": 0.25},
    "asha": {"members": 8, "search": "asha", "share": 0.5},
}
RANGE = {"low": 1e-5, "high": 3e-2}


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of one search."""

    search: str
    seed: int
    steps: int
    """Of a run that goes to its end."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    rewards: list[float]
    """Mean reward of each run over its last steps, best first."""
    lr: float
    """Learning rate of the best run at its end."""
    num_steps: int
    """Steps of all runs together."""
    seconds: float


def search(run: Search) -> Found:
    """Run one search. Raises `RuntimeError` with the end of its output if it fails."""
    prepared, _ = prepare_seed(run.seed)
    every = run.steps // 5 if run.search == "pbt" else run.steps // 4
    settings = {"config": ["examples/sort/run.yaml"], "every": every, "seed": run.seed, "keys": {"train.lr": RANGE}}
    with tempfile.TemporaryDirectory(prefix="populations_") as name:
        file = Path(name) / "population.yaml"
        file.write_text(json.dumps({**settings, **SEARCHES[run.search]}))
        overrides = [
            f"model.path={prepared / 'model'}",
            f"data.path={prepared / 'train.jsonl'}",
            f"eval.data={{held_out: {prepared / 'eval.jsonl'}}}",
            f"run.folder={name}",
            f"run.seed={run.seed}",
            f"run.steps={run.steps}",
            "rollout.replicas=1",
            "record.rollouts_every=0",
        ]
        command = [sys.executable, "-m", "rlsys.cli", "population", str(file), *overrides, "--json"]
        began = time.monotonic()
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the search failed: {done.stderr[-2000:]}")
        seconds = time.monotonic() - began
        told = json.loads(done.stdout.splitlines()[-1])
        num_steps = sum(len(_rewards(Path(member["run_dir"]))) for member in told["members"])
    ranked = sorted(told["members"], key=lambda member: -(member["score"] or 0.0))
    best = told["members"][told["best"]]
    return Found([member["score"] or 0.0 for member in ranked], best["values"]["train.lr"], num_steps, seconds)


def _rewards(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def main() -> None:
    """Run what is missing; print the table, then JSON in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="of the warm start, the runs and the search")
    parser.add_argument("--steps", type=int, default=100, help="of a run that goes to its end")
    parser.add_argument("--out", type=Path, default=Path(".cache/sort/populations.jsonl"), help="finished searches")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    asked = [Search(name, seed, options.steps) for seed in seeds for name in SEARCHES]
    found = run_all(asked, search, Found, options.out)
    rows = []
    for name in SEARCHES:
        each = [found[Search(name, seed, options.steps)] for seed in seeds]
        columns = (
            [f"{f.rewards[0]:.3f}" for f in each],
            [f"{f.lr:.1e}" for f in each],
            [str(f.num_steps) for f in each],
            [f"{f.seconds:.0f}" for f in each],
        )
        rows.append([name, " / ".join(map(str, seeds)), *(" / ".join(column) for column in columns)])
    head = ["search", "seeds", "reward of the best run, last steps", "its learning rate", "steps of all runs", "s"]
    print(markdown(head, rows))
    print(json.dumps({"runs": [{"run": asdict(run), **asdict(each)} for run, each in found.items()]}), flush=True)


if __name__ == "__main__":
    main()
