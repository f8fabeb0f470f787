"""Common parts of benchmarks: arguments, runs of the tiny job, CPU time of process trees, medians, the result line.

Every benchmark shows its progress on stderr, and prints one JSON object as the last line of stdout.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

if TYPE_CHECKING:
    from rlsys.types import Episode, Group

Size: TypeAlias = Literal["full", "quick", "short"]
"""Duration of a benchmark. A short one only shows that the benchmark works; its figures mean nothing."""
ENV = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Mark:
    """Measurement at the end of a step."""

    step: int
    cpu_s: float
    """CPU time so far of the process and all its descendants, ended ones included."""
    wall_s: float


def marks_of(command: Sequence[str], env: Mapping[str, str], metrics: Path, steps: Sequence[int]) -> list[Mark]:
    """Run a command that appends a row to `metrics` after each step; return a mark at the end of each of `steps`.

    Waits for rows by polling, because neither peer can notify us; a poll misses a step's end by at most `POLL_S`.
    Raises `RuntimeError` with the end of its output if the command fails.
    """
    _adopt_orphans()
    metrics.parent.mkdir(parents=True, exist_ok=True)
    log_path = metrics.with_suffix(".log")
    marks: list[Mark] = []
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if len(marks) < len(steps) and _num_rows(metrics) >= steps[len(marks)]:
                    marks.append(Mark(_num_rows(metrics), _tree_cpu_s(process.pid), time.perf_counter()))
                time.sleep(POLL_S)
        finally:
            _end_descendants()
    if process.returncode or len(marks) < len(steps):
        tail = "\n".join(log_path.read_text().splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode} after {len(marks)} marks\n{tail}")
    return marks


def parser_of(description: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """Build a parser with `--short` and, given its help text `quick`, `--quick`; both set `size`, a `Size`."""
    output = "Progress goes to stderr, and one JSON object to the last line of stdout."
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=output, formatter_class=style)
    parser.set_defaults(size="full")
    sizes = parser.add_mutually_exclusive_group()
    if quick:
        sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help=quick)
    told = "a few seconds, to see that it works; its figures mean nothing"
    sizes.add_argument("--short", dest="size", action="store_const", const="short", help=told)
    return parser


def sorter(size: Size, seed: int = 0) -> Path:
    """Return the folder of the policy and tasks of `examples.sort`, untrained in a short benchmark."""
    from examples.sort.prepare import Recipe, prepare

    is_short = size == "short"
    folder = Path(f".cache/sort/{'short' if is_short else 'seed'}{seed}")
    prepare(folder, Recipe(seed=seed, steps=2, num_train=256, num_eval=16) if is_short else Recipe(seed=seed))
    return folder


def train_command(prepared: Path, folder: Path, *overrides: str, example: str = "sort") -> list[str]:
    """Build the command that trains a prepared policy in `folder`/run by `examples/EXAMPLE/run.yaml`."""
    command = [sys.executable, "-m", "rlsys.cli", "train", f"examples/{example}/run.yaml", "--json"]
    command += [f"run.folder={folder}", "run.name=run"]
    command += [f"model.path={prepared / 'model'}", f"data.path={prepared / 'train.jsonl'}"]
    return [*command, f"eval.data.held_out={prepared / 'eval.jsonl'}", *overrides]


def train(prepared: Path, *overrides: str) -> tuple[list[dict[str, float]], Mapping[str, Any]]:
    """Train the policy of `sorter`; return its metrics by step, and the JSON that `--json` prints."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        fixed = ("record.rollouts_every=0", "checkpoint.every=0")
        result = answer_of(train_command(prepared, Path(folder), *fixed, *overrides))
        return rows_of(Path(folder) / "run" / "metrics.jsonl"), result


def answer_of(command: Sequence[str], text: str | None = None, **env: str) -> Any:  # noqa: ANN401  (JSON)
    """Run a command; return the JSON of its last line. Raises `RuntimeError` with the end of its stderr."""
    done = subprocess.run(command, env=ENV | env, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_python(folder: Path, requirements: Sequence[str], size: Size) -> str:
    """Return the Python of a separate environment, made on first use except in a short benchmark.

    Exits with code 2 and the remedy if there is no such environment.
    """
    mark, wanted, python = folder / "installed.txt", "\n".join(requirements), folder / "bin" / "python"
    if mark.exists() and mark.read_text() == wanted:
        return str(python)
    if size == "short":
        _end(f"{folder} lacks {', '.join(requirements)}; remedy: run this benchmark once without --short")
    progress(f"installing {', '.join(requirements)} into {folder}, once")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    if subprocess.run(install, check=False, stdout=sys.stderr).returncode:
        _end(f"pip could not install {', '.join(requirements)}; remedy: set PIP_EXTRA_INDEX_URL to an index with them")
    mark.write_text(wanted)
    return str(python)


def _end(message: str) -> NoReturn:
    progress(message)
    sys.exit(2)


def group_of(group_id: int, episodes: tuple[Episode, ...]) -> Group:
    """Build a group sampled at version 0, with its payload."""
    from rlsys.batch.samples import meta_of, versions_of
    from rlsys.types import Group

    return Group(
        group_id=group_id, task_id=f"task-{group_id}", permit_version=0, replica="rollout-0",
        episodes=meta_of(episodes), versions=versions_of(episodes), weights=(), payload=episodes,
    )  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Summarise repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | int]]:
    """Summarise every figure over all repeats."""
    return {name: spread([run[name] for run in runs]) for name in runs[0]}


def progress(*what: object) -> None:
    """Report progress on stderr."""
    print(*what, file=sys.stderr, flush=True)


def print_result(figures: Mapping[str, object]) -> None:
    """Print the result line of every benchmark: one JSON object on stdout, with its command."""
    command = f"python -m {Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}"
    print(json.dumps({**figures, "command": command.strip()}), flush=True)


def _num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _adopt_orphans() -> None:
    """Adopt daemons whose parent ends, so that their CPU time is still counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _tree_cpu_s(root: int) -> float:
    """Sum the CPU seconds of a process and its descendants, adopted and ended ones included, without this process."""
    table = _processes()
    pids = _below(os.getpid(), table)
    assert root in pids
    return sum(table[pid][1] for pid in pids) / TICKS_PER_S


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent of every process, and its CPU ticks with those of its ended and awaited children."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    return table


def _below(root: int, table: Mapping[int, tuple[int, int]]) -> list[int]:
    found: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, (parent, _) in table.items() if parent in frontier}
        found += frontier
    return found


def _end_descendants() -> None:
    for pid in _below(os.getpid(), _processes()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
