"""Cost of monitoring: opening a long run, serving its pages, showing a step live, and the overhead in the run.

    python -m benchmarks.dashboard [--quick | --short]

A synthetic run of 1,000,000 events and 100,000 episodes (`tests.histories.big_run`; nine in ten events are
`worker_busy`) is opened and then queried through HTTP, from a separate `rlsys dashboard` process:

- `open_s`: from `Readings(root)` in a fresh process to the answers of run, series (8 charts), groups, cluster, ledger,
  alerts. `reader_mb`: memory growth of that process.
- `index_s`, `index_mb`: building the index of the run in a fresh process, and the index on disk.
- `sort_s`, `search_s`: of tables over HTTP, the slowest of several orders, and of several filters and texts, with what
  each took in `table_ms`. `zoom_s`: 8 charts over HTTP for the 100 steps in the middle.
- `page_ms`: of each page over HTTP, median and greatest; `whole_run_ms` is the first view of the swim-lanes of the
  whole run, right after opening, before they are aggregated.
- `live_latency_s`: from the write of a step's line by another process until a page that follows the run has its value.
- `emit_us`: one event through the bus with the sinks every run has (jsonl, console, alerts), mean over the events of a
  step of 16 groups on 4 replicas; `emit_share`: all of them, of a very short step of 0.25 s.
- `day_growth_mb`: resident memory that those sinks and a TensorBoard tracker took between the first tenth and the end
  of 864,000 events, which is a day at 10 a second.
"""

from __future__ import annotations

import gc
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import psutil

from benchmarks.measure import (
    Size,
    fresh_command,
    in_fresh_process,
    parser_of,
    print_result,
    progress,
    rows_of,
    spread,
    spreads,
    timed,
)
from rlsys.monitoring.alerts import AlertSink
from rlsys.monitoring.events import Events, RunStarted, Sink, StepDone
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.jsonl import JsonlSink
from tests.histories import big_run, busy_step, small_run

CHARTS = (
    "reward/*", "policy/entropy", "policy/kl_ref", "completions/*", "optim/grad_norm", "async/*", "perf/tokens_per_s",
    "time/*",
)  # fmt: skip
SORTS = {
    "episodes by length": {"table": "episodes", "order": "length desc"},
    "episodes by reward, far page": {"table": "episodes", "order": "reward, length desc", "offset": 90_000},
    "episodes by task": {"table": "episodes", "order": "task"},
    "groups by spread": {"table": "groups", "order": "reward_max desc, reward_min"},
    "tasks by change": {"table": "tasks", "order": "change"},
    "tasks by change of 50 steps": {"table": "tasks", "order": "change", "from": 50, "to": 100},
    "steps by a metric": {"table": "steps", "order": "policy/entropy"},
    "episodes by outcome": {"table": "episodes", "group": "outcome"},
}
SEARCHES = {
    "a rare text": {"table": "episodes", "filter": "answer like '%answer is 4711%'"},
    "a text of every answer": {"table": "episodes", "filter": "answer like '%adding zero%'", "order": "length"},
    "two letters": {"table": "episodes", "filter": "answer like '%47%'"},
    "in all texts": {"table": "episodes", "search": "is 4711 plus"},
    "a regular expression": {"table": "episodes", "filter": "answer regexp 'is 4[78]11$'"},
    "reward and text": {"table": "episodes", "filter": "reward < 0.1 and step > 100 and answer like '%is 12%'"},
    "truncated": {"table": "episodes", "filter": "truncated", "order": "length desc"},
    "a task": {"table": "groups", "filter": "task = 'task-7'", "order": "reward"},
    "equal rewards": {"table": "groups", "filter": "equal and staleness > 0"},
    "in the log": {"table": "logs", "filter": "level = 'error' or text like '%sigkill%'"},
}
STEP_S = 0.25
GROUPS = 16


class Scale(NamedTuple):
    """Size of each measurement."""

    events: int
    episodes: int
    opens: int
    pages: int
    live_steps: int
    emit_steps: int
    day_events: int


SCALES: Mapping[Size, Scale] = {
    "full": Scale(1_000_000, 100_000, 3, 10, 30, 2_000, 24 * 3600 * 10),
    "quick": Scale(50_000, 5_000, 3, 3, 5, 200, 20_000),
    "short": Scale(2_000, 200, 1, 1, 2, 10, 2_000),
}


def main() -> None:
    """Measure everything and print the result line."""
    parser = parser_of(__doc__, quick="a small run and a short day; under a minute")
    scale = SCALES[parser.parse_args().size]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        big_run(folder / "runs" / "big", num_events=scale.events, num_episodes=scale.episodes)
        with (folder / "runs" / "big" / "events.jsonl").open() as file:
            kinds = Counter(json.loads(line)["kind"] for line in file)
        progress(f"the run is written: {kinds}")
        opened = [in_fresh_process("benchmarks.dashboard:open_run", str(folder / "runs")) for _ in range(scale.opens)]
        progress(f"opened: {opened}")
        indexed = in_fresh_process("benchmarks.dashboard:index_run", str(folder / "runs"))
        progress(f"indexed: {indexed}")
        tables = table_ms(folder / "runs", scale.pages)
        progress(f"tables: {tables}")
        pages = page_ms(folder / "runs", scale.pages)
        progress(f"pages: {pages}")
        live = live_latency_s(folder / "live", scale.live_steps)
        progress(f"live: {live}")
        emitted = in_fresh_process("benchmarks.dashboard:emit_steps", str(folder / "emit"), scale.emit_steps)
        day = in_fresh_process("benchmarks.dashboard:emit_day", str(folder / "day"), scale.day_events)
    opened = spreads(opened)
    print_result(
        {
            "open_s": opened["open_s"],
            "reader_mb": opened["mb"]["median"],
            "whole_run_ms": opened["whole_run_ms"],
            **indexed,
            "sort_s": max(tables[name]["median"] for name in SORTS) / 1000,
            "search_s": max(tables[name]["median"] for name in SEARCHES) / 1000,
            "zoom_s": tables["zoom"]["median"] / 1000,
            "table_ms": tables,
            "page_ms": pages,
            "page_ms_worst": max(row["max"] for row in pages.values()),
            "live_latency_s": live,
            **emitted,
            **day,
            "events": {"all": kinds.total(), **kinds},
        }
    )


def open_run(root: str) -> dict[str, float]:
    """Open a run as the overview, groups, cluster, ledger and alerts pages do, one after the other."""
    from rlsys.dashboard.query.queries import Readings

    before_mb, seconds = _resident_mb(), []
    with timed(seconds):
        readings = Readings(Path(root))
        readings.run("big")
        readings.series("big", CHARTS)
        readings.rollouts.groups("big")
        cluster = readings.cluster("big")
        readings.ledger("big")
        readings.alerts("big")
    with timed(seconds):
        readings.cluster("big", cluster.begin_s, cluster.end_s)
    return {"open_s": seconds[0], "whole_run_ms": 1000 * seconds[1], "mb": _resident_mb() - before_mb}


def index_run(root: str) -> dict[str, float]:
    """Build the index of a run, as `rlsys dashboard` does in the background."""
    from rlsys.dashboard.index.folders import RunFolder
    from rlsys.dashboard.index.run_index import RunIndex

    index, seconds = RunIndex(RunFolder(Path(root).resolve(), "big")), []
    with timed(seconds):
        while not index.update(0.5):
            pass
    return {"index_s": seconds[0], "index_mb": index.path.stat().st_size / 2**20}


def table_ms(root: Path, repeats: int) -> dict[str, dict[str, float | int]]:
    """Request tables in several orders and with several filters, and charts of a part, over HTTP."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with _served(root) as get:
        last = get("run", run="big")["summary"]["step"]
        zoom = {"x": "step", "from": last // 2 - 50, "to": last // 2 + 50}
        asked: dict[str, tuple[str, Mapping[str, object]]] = {
            name: ("table", parameters) for name, parameters in (SORTS | SEARCHES).items()
        }
        asked["zoom"] = ("series", {"name": CHARTS, **zoom})
        for _ in range(repeats):
            for name, (page, parameters) in asked.items():
                with timed(seconds[name]):
                    get(page, run="big", **parameters)
    return {name: spread([1000 * s for s in values]) for name, values in seconds.items()}


def page_ms(root: Path, repeats: int) -> dict[str, dict[str, float | int]]:
    """Request every page over HTTP, after the run was opened."""
    with _served(root) as get:
        get("run", run="big")
        cluster = get("cluster", run="big")
        get("cluster", run="big", **{"from": cluster["begin_s"], "to": cluster["end_s"]})
        last = get("groups", run="big")["last_step"]
        seconds: dict[str, list[float]] = defaultdict(list)
        for repeat in range(repeats):
            for name, parameters in _pages(get, cluster, 1 + repeat * (last - 1) // repeats):
                with timed(seconds[name]):
                    get(name.partition(" ")[0], **parameters)
    return {name: spread([1000 * s for s in values]) for name, values in seconds.items()}


def _pages(get: _Get, cluster: Mapping[str, float], step: int) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each page and its parameters, with one choice of step, group and time."""
    run = {"run": "big"}
    group = get("groups", **run, step=step)["groups"][0]
    of_group = {**run, "step": step, "group_id": group["group_id"]}
    middle_s = cluster["begin_s"] + (cluster["end_s"] - cluster["begin_s"]) * 0.5
    yield from ((name, run) for name in ("run", "metrics", "alerts", "ledger", "cluster"))
    yield "runs", {}
    yield "series", {**run, "name": CHARTS}
    yield "groups", {**run, "step": step}
    yield "group", of_group
    yield "episode", {**of_group, "episode": 3}
    yield "task", {**run, "task": group["task_id"]}
    yield "table of tasks", {**run, "table": "tasks", "order": "reward"}
    yield "table of logs", {**run, "table": "logs", "limit": 200}
    yield "cluster of all the run", {**run, "from": cluster["begin_s"], "to": cluster["end_s"]}
    yield "cluster of 2 minutes", {**run, "from": middle_s, "to": middle_s + 120}
    yield "compare", {"run": ["big", "big"]}


def live_latency_s(folder: Path, steps: int) -> dict[str, float | int]:
    """Follow, as a page does, a run that another process writes."""
    (folder / "run").mkdir(parents=True)
    JsonlSink(folder / "run").close()
    seen_s: dict[int, float] = {}
    with _served(folder) as get:
        writer = subprocess.Popen(fresh_command("benchmarks.dashboard:write_run", str(folder / "run")))
        try:
            for _ in get.changes(run="run"):
                for step in (row for s in get("series", run="run", name="loss")["series"] for row in s["steps"]):
                    seen_s.setdefault(step, time.time())
                if len(seen_s) >= steps:
                    break
        finally:
            writer.kill()
            writer.wait()
    written_s = {row["step"]: row["time_s"] for row in rows_of(folder / "run" / "metrics.jsonl")}
    return spread([seen_s[step] - written_s[step] for step in sorted(seen_s)])


def write_run(run_dir: str) -> None:
    """Write a run until killed; steps take from 0.3 to 0.7 s, so that they meet every phase of a poll."""
    events = Events([JsonlSink(Path(run_dir))])
    for step in count(1):
        events.emit(StepDone(step, {"loss": 1.0 / step, "time/step": 0.5}))
        time.sleep(0.3 + 0.4 * (step * 0.618 % 1))


def emit_steps(run_dir: str, steps: int) -> dict[str, float]:
    """Time the bus with the sinks that every run has."""
    folder = Path(run_dir)
    events = _bus(folder)
    times_s, told = [], []
    for step in range(1, steps + 1):
        told = busy_step(step, GROUPS, folder)
        with timed(times_s):
            for event in told:
                events.emit(event)
    return {
        "emit_us": 1e6 * median(times_s) / len(told),
        "emit_share": median(times_s) / STEP_S,
        "events_per_step": len(told),
        "groups_per_step": GROUPS,
    }


def emit_day(run_dir: str, num_events: int) -> dict[str, float]:
    """Send a day of events through the sinks of a run and a tracker."""
    from rlsys.monitoring.tracker import RunFacts
    from rlsys.monitoring.trackers.tensorboard import TensorBoard
    from rlsys.monitoring.trackers.tracker_thread import InThread

    folder = Path(run_dir)
    rollouts = small_run(folder / "small") / "rollouts" / "step_000001.parquet"
    facts = RunFacts(run_dir=folder, name="day", policy="", config={})
    events = _bus(folder, InThread(TensorBoard(), facts))
    events.emit(RunStarted(str(folder), 0, 10**6))
    per_step = len(busy_step(1, GROUPS, rollouts))
    num_steps = ceil(num_events / per_step)
    begin_mb = 0.0
    for step in range(1, num_steps + 1):
        for event in busy_step(step, GROUPS, rollouts):
            events.emit(event)
        if step == num_steps // 10:
            begin_mb = _resident_mb()
    end_mb = _resident_mb()
    events.close()
    return {"day_growth_mb": end_mb - begin_mb, "day_events": num_steps * per_step, "day_steps": num_steps}


def _bus(folder: Path, *more: Sink) -> Events:
    """Build the bus of a run, with the sinks that every run has and `more`."""
    events = Events([JsonlSink(folder), ConsoleSink(0, Path("/dev/null").open("w")), *more])  # noqa: SIM115
    events.attach(AlertSink(events, {}))
    return events


class _Get:
    """Browser-like requests to a dashboard, over one connection."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._address, timeout=60)

    def __call__(self, page: str, /, **parameters: object):  # noqa: ANN204  (JSON)
        """Return the JSON answer of a page."""
        self._connection.request("GET", f"/api/{page}?{urlencode(parameters, doseq=True)}")
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"{page} {parameters}: {response.status} {body[:500]!r}")
        return json.loads(body)

    def changes(self, run: str) -> Iterator[None]:
        """Yield at every change that the server reports; ends with the connection."""
        with urlopen(f"http://{self._address}/api/stream?run={run}", timeout=60) as lines:
            yield from (None for line in lines if line.startswith(b"data:"))


@contextmanager
def _served(root: Path) -> Iterator[_Get]:
    """Run `rlsys dashboard` on a folder."""
    command = [sys.executable, "-m", "rlsys.cli", "dashboard", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
        yield _Get(url)
    finally:
        process.terminate()
        process.wait()


def _resident_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


if __name__ == "__main__":
    main()
