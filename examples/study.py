"""Studies of many training runs: a line of a file for each finished one, so that an interrupted study can continue."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.measure import ENV, marks_of, rows_of, train_command

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
"""Settings of a run; a frozen dataclass."""
F = TypeVar("F", bound="DataclassInstance")
"""Figures of a finished run."""


def finished(path: Path, runs: Iterable[R], outcome: type[F]) -> dict[R, F]:
    """Read the outcomes of those of the runs that are in the file, without an incomplete last line."""
    by_key = {_key(asdict(run)): run for run in runs}
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [row for row in map(json.loads, lines) if _key(row["run"]) in by_key]
    return {by_key[_key(row["run"])]: outcome(**row["outcome"]) for row in rows}


def _key(run: Mapping[str, Any]) -> str:
    """Text that identifies a run, also one read from a file."""
    return json.dumps(run, sort_keys=True)


def run_all(runs: Iterable[R], train: Callable[[R], F], outcome: type[F], path: Path, *, jobs: int = 1) -> dict[R, F]:
    """Return the outcome of each run. Missing runs are run, `jobs` at a time, in processes that last for the study."""
    asked = list(dict.fromkeys(runs))
    done = finished(path, asked, outcome)
    todo = [run for run in asked if run not in done]
    print(f"{len(todo)} runs to do, {len(done)} in the file", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(min(jobs, len(todo) or 1), get_context("spawn")) as pool:
        started = {pool.submit(train, run): run for run in todo}
        for count, future in enumerate(as_completed(started), 1):
            run = started[future]
            done[run] = future.result()
            append(path, run, done[run])
            print(f"{count}/{len(todo)}  {run}", file=sys.stderr, flush=True)
    return {run: done[run] for run in asked}


def append(path: Path, run: DataclassInstance, outcome: DataclassInstance) -> None:
    """Append a finished run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")


def trained(example: str, prepared: Path, num_rows: int, *overrides: str) -> tuple[list[dict[str, float]], float]:
    """Train by `examples/EXAMPLE/run.yaml`; return its first `num_rows` metrics or more, and CPU-seconds of all
    processes. Raises `RuntimeError` with the end of the output if training fails."""
    with tempfile.TemporaryDirectory(prefix="study_") as folder:
        command = train_command(prepared, Path(folder), *overrides, example=example)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        (end,) = marks_of(command, ENV, metrics, [num_rows])
        return rows_of(metrics), end.cpu_s


def study_parser(description: str | None, *, steps: int, out: Path) -> argparse.ArgumentParser:
    """Build a parser with `--seeds`, `--steps` and `--out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="of the warm start and of the run")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--out", type=Path, default=out, help="finished runs")
    return parser


def print_study(table: str, results: Mapping[R, F]) -> None:
    """Print the table, then all figures as one line of JSON."""
    print(table)
    print(json.dumps({"runs": [{"trial": asdict(run), **asdict(found)} for run, found in results.items()]}), flush=True)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def running_mean(values: Sequence[float], window: int = 10) -> list[float]:
    """Average each value with up to `window - 1` before it: `[1, 3, 5]` over 2 gives `[1, 2, 4]`."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
