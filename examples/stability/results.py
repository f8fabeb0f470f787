"""Runs that are done, one JSON object a line, so that a study can be interrupted and goes on."""

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
    """The file; each run in it has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Outcome]:
        """What was reported, by `Run.key`. Runs of another edition are left out, and so is a line that was cut off as
        it was written."""
        if not self._path.exists():
            return {}
        lines = self._path.read_text().split("\n")[:-1]
        rows = [row for line in lines if line and (row := json.loads(line))["run"].get("edition") == EDITION]
        return {json.dumps(row["run"], sort_keys=True): Outcome(**row["outcome"]) for row in rows}

    def add(self, run: Run, outcome: Outcome) -> None:
        """Write one more down."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")


def run_all(runs: Iterable[Run], results: Results, *, jobs: int) -> None:
    """Run what is not done yet, `jobs` at a time, each in a process of its own for the whole study."""
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
    """Those of these runs that are done."""
    return [done[run.key] for run in runs if run.key in done]
