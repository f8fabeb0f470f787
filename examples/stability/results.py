"""Finished runs, one JSON object a line, so that an interrupted study can continue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from examples.stability.lab import EDITION, Outcome, Run, train


class Results:
    """File of finished runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Outcome]:
        """Read the outcomes, by `Run.key`, without runs of another edition and without an incomplete last line."""
        if not self._path.exists():
            return {}
        lines = self._path.read_text().split("\n")[:-1]
        rows = [row for line in lines if line and (row := json.loads(line))["run"].get("edition") == EDITION]
        return {json.dumps(row["run"], sort_keys=True): Outcome(**row["outcome"]) for row in rows}

    def add(self, run: Run, outcome: Outcome) -> None:
        """Append a run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")


def run_all(runs: Iterable[Run], results: Results, *, jobs: int) -> None:
    """Run the missing runs, `jobs` at a time, in `jobs` processes that last for the whole study."""
    done = results.read()
    todo = [run for run in dict.fromkeys(runs) if run.key not in done]
    print(f"{len(todo)} runs to do, {len(done)} in the file", file=sys.stderr, flush=True)
    if not todo:
        return
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn")) as pool:
        started = {pool.submit(train, run): run for run in todo}
        for count, future in enumerate(as_completed(started), 1):
            run, outcome = started[future], future.result()
            results.add(run, outcome)
            figures = f"{outcome.final_reward:.3f}  {outcome.cpu_s:.0f} CPU-s"
            print(f"{count}/{len(todo)}  {figures}  {run}", file=sys.stderr, flush=True)


def outcomes_of(runs: Sequence[Run], done: dict[str, Outcome]) -> list[Outcome]:
    """Return the outcomes of the finished ones of these runs."""
    return [done[run.key] for run in runs if run.key in done]
