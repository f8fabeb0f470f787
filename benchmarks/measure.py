"""Common parts of benchmarks: arguments, runs of the tiny job, CPU time of process trees, medians, the result line.

Every benchmark shows its progress on stderr, and prints one JSON object as the last line of stdout. A part that needs a
fresh process is a function, which `in_fresh_process` calls: `python -m benchmarks.measure MODULE:FUNCTION ARGUMENTS`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypeVar

from rlsys.types import GroupKey
from workers.ray import fork_client

if TYPE_CHECKING:
    from ray._private.node import Node

    from rlsys.types import Episode, Group
    from workers.engines.engine import EngineName, EngineSpec

Dtype: TypeAlias = Literal["float32", "bfloat16"]
C = TypeVar("C")
F = TypeVar("F")

Size: TypeAlias = Literal["full", "quick", "short"]
"""Duration of a benchmark. A short one only shows that the benchmark works; its figures mean nothing."""
ENV = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
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
    adopt_orphans()  # their CPU time counts
    before_s = _children_cpu_s()
    metrics.parent.mkdir(parents=True, exist_ok=True)
    log_path = metrics.with_suffix(".log")
    marks: list[Mark] = []
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=log)
        try:
            while process.poll() is None:
                if len(marks) < len(steps) and num_rows(metrics) >= steps[len(marks)]:
                    marks.append(Mark(num_rows(metrics), _children_cpu_s() - before_s, time.perf_counter()))
                time.sleep(POLL_S)
        finally:
            _end_children()
    if process.returncode or len(marks) < len(steps):
        tail = "\n".join(log_path.read_text().splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode} after {len(marks)} marks\n{tail}")
    return marks


def adopt_orphans() -> None:
    """Let descendants whose parent ends become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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


def smollm() -> Path:
    """Return the folder of the policy and tasks of `examples.smollm`."""
    from examples.smollm.prepare import Recipe, prepare

    folder = Path(".cache/smollm")
    prepare(folder, Recipe())
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


def fresh_command(function: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """Build the command that calls `module:name` and prints what it returns; arguments and result are JSON.

    Where there is a server of `workers.ray.fork_server`, as in tests, it forks the process.
    """
    command = ["-m", "benchmarks.measure", function, json.dumps(arguments)]
    if python == sys.executable and fork_client.SERVER in os.environ:
        return [python, "-I", "-S", fork_client.__file__, *command]
    return [python, *command]


def in_fresh_process(function: str, *arguments: object) -> Any:  # noqa: ANN401  (JSON)
    """Call `module:name` in a fresh process; return what it returns."""
    return answer_of(fresh_command(function, *arguments))


def in_turn(repeats: int, cases: Iterable[C], run: Callable[[int, C], F]) -> dict[C, list[F]]:
    """Call `run` with each repeat and case, all cases before the next repeat: what disturbs one disturbs all."""
    runs: dict[C, list[F]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for case, results in runs.items():
            results.append(run(repeat, case))
            progress(f"{repeat + 1} of {repeats}, {case}: {results[-1]}")
    return runs


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


@contextmanager
def raylets(num_nodes: int, num_cpus: int, store_bytes: int) -> Iterator[Raylets]:
    """Start a cluster of raylets on this machine, with so much each."""
    import ray

    cluster = Raylets(num_cpus, store_bytes)
    for _ in range(num_nodes):
        cluster.add()
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.cluster.shutdown()


class Raylets:
    """Raylets of equal size on this machine. The first is the head."""

    def __init__(self, num_cpus: int, store_bytes: int) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self._size = {"num_cpus": num_cpus, "object_store_memory": store_bytes}

    @property
    def address(self) -> str:
        """Address for the key `ray`."""
        assert self.cluster.address is not None
        return self.cluster.address

    def add(self) -> None:
        """Start another raylet."""
        unused: dict[str, bool] = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        self.cluster.add_node(**self._size, **unused)

    def lose_head(self) -> None:
        """Kill the head's cluster state service (GCS), without which no raylet lives long."""
        self._head.kill_gcs_server(check_alive=False)

    def replace_dead(self) -> bool:
        """Replace raylets that have ended; return True if one of them is the head, which stays as it is."""
        for node in [node for node in self.cluster.worker_nodes if not node.remaining_processes_alive()]:
            self.cluster.remove_node(node, allow_graceful=False)
            self.add()
        return not self._head.remaining_processes_alive()

    @property
    def _head(self) -> Node:
        assert self.cluster.head_node is not None
        return self.cluster.head_node

    def start_again(self) -> None:
        """Replace all raylets by as many of a new cluster, which has another address."""
        count = len(self.cluster.list_all_nodes())
        self.cluster.shutdown()
        self.cluster = type(self.cluster)()
        for _ in range(count):
            self.add()

    def kill(self, chance: random.Random) -> None:
        """Kill one raylet that is not the head, with its processes."""
        nodes = sorted(self.cluster.worker_nodes, key=lambda node: node.node_id)
        self.cluster.remove_node(chance.choice(nodes), allow_graceful=False)


def engine_spec(engine: EngineName, path: str, dtype: Dtype, slots: int = 64, max_context: int = 512) -> EngineSpec:
    """Describe an engine as in a run."""
    from workers.engines.engine import EngineSpec

    return EngineSpec(
        engine=engine, model_path=str(Path(path).resolve()), dtype=dtype, slots=slots, max_context=max_context,
        kv_cache="keep", tensor_parallel=1, step_s=120.0, load_s=120.0,
    )  # fmt: skip


def group_of(group_id: int, episodes: tuple[Episode, ...]) -> Group:
    """Build a group sampled at version 0, with its payload."""
    from rlsys.batch.samples import meta_of, versions_of
    from rlsys.types import Group

    return Group(
        key=GroupKey(group_id, 1), task_id=f"task-{group_id}", permit_version=0, replica="rollout-0",
        episodes=meta_of(episodes), versions=versions_of(episodes), weights=(), payload=episodes,
    )  # fmt: skip


@contextmanager
def timed(seconds: list[float], clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Append the seconds spent in this context."""
    began = clock()
    yield
    seconds.append(clock() - began)


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Summarise repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | int]]:
    """Summarise every figure over all repeats."""
    return {name: spread([run[name] for run in runs]) for name in runs[0]}


def ratios(
    over: Sequence[Mapping[str, float]], under: Sequence[Mapping[str, float]], what: str
) -> dict[str, float | int]:
    """Summarise the ratios of one figure, repeat by repeat."""
    return spread([a[what] / b[what] for a, b in zip(over, under, strict=True)])


def progress(*what: object) -> None:
    """Report progress on stderr."""
    print(*what, file=sys.stderr, flush=True)


def print_result(figures: Mapping[str, object]) -> None:
    """Print the result line of every benchmark: one JSON object on stdout, with its command."""
    command = f"python -m {Path(sys.argv[0]).parent.name}.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}"
    print(json.dumps({**figures, "command": command.strip()}), flush=True)


def num_rows(path: Path) -> int:
    """Return the number of whole lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _children_cpu_s() -> float:
    """Sum the CPU seconds of all processes below this one, with those of their ended and awaited children."""
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _end_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(*json.loads(sys.argv[2]))), flush=True)
