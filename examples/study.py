"""Studies of many training runs: a line of a file for each finished one, so that an interrupted study can continue."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from benchmarks.measure import ENV, marks_of, rows_of, train_command

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
"""Settings of a run; a frozen dataclass."""
PREPARED = "<prepared>"
"""Stands for the folder of the seed in an override."""
F = TypeVar("F", bound="DataclassInstance")
"""Figures of a finished run."""
Row: TypeAlias = "dict[str, float | None]"
"""Figures by name."""


def finished(path: Path, runs: Iterable[R], outcome: type[F]) -> dict[R, F]:
    """Read the outcomes of those of the runs that are in the file, without an incomplete last line."""
    by_text = {json.dumps(asdict(run), sort_keys=True): run for run in runs}
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = ((by_text.get(json.dumps(row["run"], sort_keys=True)), row) for row in map(json.loads, lines))
    return {run: outcome(**row["outcome"]) for run, row in found if run is not None}


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


# ----------------------------------------------------------------------------------- the same example in several cases


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of one run of an example."""

    example: str
    overrides: tuple[str, ...]
    seed: int
    steps: int


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run of an example."""

    figures: Row
    """By name; `cpu_s` are the CPU-seconds of all processes, from the command to the last row of metrics."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of cases of an example, over seeds."""

    example: str
    prepare_seed: Callable[[int], tuple[Path, object]]
    """Fills the folder of a seed, and returns it first."""
    figures_of: Callable[[Sequence[Mapping[str, float]]], Row]
    """Extracts the figures of a run from its rows of metrics."""
    head: tuple[str, ...]
    """Names of the columns that name a case."""
    columns: Mapping[str, tuple[str, str, str]]
    """Name, format and replacement for None of each figure shown, by the head of its column."""
    is_evaluated: bool = False
    """True to evaluate each run before its first and after its last step."""

    def train(self, trial: Trial) -> Result:
        """Train the policy of the seed. Raises `RuntimeError` with the end of the output if training fails."""
        prepared, _ = self.prepare_seed(trial.seed)
        own = (override.replace(PREPARED, str(prepared)) for override in trial.overrides)
        overrides = [f"run.seed={trial.seed}", f"run.steps={trial.steps}", *own]
        overrides += [f"eval.every={trial.steps}"] if self.is_evaluated else []
        num_rows = trial.steps + 2 * self.is_evaluated
        with tempfile.TemporaryDirectory(prefix="study_") as folder:
            command = train_command(prepared, Path(folder), *overrides, example=self.example)
            metrics = Path(folder) / "run" / "metrics.jsonl"
            (end,) = marks_of(command, ENV, metrics, [num_rows])
            return Result({**self.figures_of(rows_of(metrics)), "cpu_s": end.cpu_s})

    def parser(self, description: str | None, *, steps: int) -> argparse.ArgumentParser:
        """Build a parser with `--seeds`, `--steps` and `--out`."""
        style = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=style)
        parser.add_argument("--seeds", default="0,1,2", help="of the warm start and of the run")
        parser.add_argument("--steps", type=int, default=steps)
        out = Path(".cache") / self.example / "comparison.jsonl"
        parser.add_argument("--out", type=Path, default=out, help="finished runs")
        return parser

    def show(self, cases: Mapping[tuple[str, ...], tuple[str, ...]], options: argparse.Namespace) -> None:
        """Run the missing trials of the cases, which have overrides by name; print the table, then JSON in one line."""
        seeds = [int(seed) for seed in options.seeds.split(",")]
        trials = {c: [Trial(self.example, o, seed, options.steps) for seed in seeds] for c, o in cases.items()}
        results = run_all((trial for each in trials.values() for trial in each), self.train, Result, options.out)
        print(self.table({case: {t.seed: results[t] for t in each} for case, each in trials.items()}))
        print(json.dumps({"runs": [{"trial": asdict(t), **found.figures} for t, found in results.items()]}), flush=True)

    def table(self, results: Mapping[tuple[str, ...], Mapping[int, Result]]) -> str:
        """Build a Markdown table: a row for each case, the seeds side by side."""
        rows = []
        for case, by_seed in results.items():
            cells = [" / ".join(map(str, by_seed))]
            for name, spec, none in self.columns.values():
                values = [result.figures[name] for result in by_seed.values()]
                cells.append(" / ".join(none if value is None else format(value, spec) for value in values))
            rows.append([*case, *cells])
        return markdown([*self.head, "seeds", *self.columns], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Build a Markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def running_mean(values: Sequence[float], window: int = 10) -> list[float]:
    """Average each value with up to `window - 1` before it: `[1, 3, 5]` over 2 gives `[1, 2, 4]`."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
