"""Merged logs of workers, and their use of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.machine_use import MachineUse
from rlsys.dashboard.index.run_index import RunIndex
from rlsys.dashboard.index.sql_query import TableQuery
from rlsys.dashboard.query.queries import Readings
from rlsys.monitoring.machine_samples import MachineSample, described_end, last_lines
from tests.histories import BEGIN_S, History, Shape

SAMPLE = MachineSample(
    time_s=BEGIN_S,
    host="node-a",
    pid=7,
    cpu=0.5,
    memory=1000,
    gpu=None,
    gpu_memory=None,
    node_cpu=0.25,
    node_memory=0.5,
    node_shm=2000,
    node_sent=10.0,
    node_received=20.0,
    log_bytes=0,
    log_turn=0,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has begun."""
    history = History(tmp_path / "run", Shape())
    history.start()
    (history.folder / "machine").mkdir()
    (history.folder / "logs").mkdir()
    return history.folder


def sampled(run: Path, worker: str, *samples: MachineSample) -> None:
    with (run / "machine" / f"{worker}.jsonl").open("ab") as file:
        file.writelines(orjson.dumps(sample) + b"\n" for sample in samples)


def logged(run: Path, worker: str, *texts: str) -> int:
    """Write a log, and return its size."""
    path = run / "logs" / f"{worker}.log"
    path.write_text("".join(f"{text}\n" for text in texts))
    return path.stat().st_size


def lines(run: Path, where: str = "") -> Sequence[Mapping[str, Any]]:
    """Lines of the logs of workers, newest first."""
    index = RunIndex(RunFolder(run.parent, run.name))
    while not index.update(10.0):
        pass
    condition = f"kind = 'line' and ({where})" if where else "kind = 'line'"
    return index.page(TableQuery(table="logs", filter=condition), None).rows


def texts(run: Path, where: str = "") -> list[str]:
    return [line["text"] for line in lines(run, where)]


def test_lines_of_all_workers_are_merged_by_the_times_of_samples(run: Path) -> None:
    first = logged(run, "rollout-0", "one")
    both = logged(run, "rollout-0", "one", "three")
    only = logged(run, "reward-0", "two")
    later = [replace(SAMPLE, time_s=BEGIN_S + s, log_bytes=size) for s, size in ((5, first), (10, first), (15, both))]
    sampled(run, "rollout-0", SAMPLE, *later)
    sampled(run, "reward-0", SAMPLE, replace(SAMPLE, time_s=BEGIN_S + 10, log_bytes=only))
    assert [(line["time_s"] - BEGIN_S, line["worker"], line["text"]) for line in lines(run)] == [
        (15, "rollout-0", "three"),
        (10, "reward-0", "two"),
        (5, "rollout-0", "one"),
    ]


def test_a_log_that_began_anew_is_read_with_the_part_before(run: Path) -> None:
    (run / "logs" / "actor-0.log.1").write_text("before\n")
    size = logged(run, "actor-0", "after")
    turns = [(5, 0, len("before\n")), (10, 1, 0), (15, 1, size)]
    sampled(run, "actor-0", *(replace(SAMPLE, time_s=BEGIN_S + s, log_turn=t, log_bytes=n) for s, t, n in turns))
    assert [(line["text"], line["time_s"] - BEGIN_S) for line in lines(run)] == [("after", 15), ("before", 5)]


def test_lines_are_filtered_by_worker_level_and_expression(run: Path) -> None:
    logged(run, "rollout-0", "INFO started", "WARNING 09-12 slow", "Traceback (most recent call last):", "  File x")
    logged(run, "actor-0", "torch.OutOfMemoryError: CUDA", "\x1b[31mplain\x1b[0m")
    bad = {"  File x", "Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA"}
    assert set(texts(run, "level = 'error'")) == bad
    assert texts(run, "worker = 'rollout-0' and level in ('warning', 'error')")[-1] == "WARNING 09-12 slow"
    assert set(texts(run, "text regexp '^(info|plain)'")) == {"INFO started", "plain"}


def test_of_very_many_samples_older_ones_are_forgotten_and_the_last_stays(run: Path) -> None:
    sampled(run, "rollout-0", *(replace(SAMPLE, time_s=BEGIN_S + n) for n in range(50_001)))
    machine = MachineUse(RunFolder(run.parent, run.name))
    machine.look()
    for series in machine.answer(points=10**6).series:
        assert len(series.times_s) == 25_001
        assert series.times_s[-1] == BEGIN_S + 50_000


def test_links_out_of_the_run_are_no_logs(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (run / "logs" / "other.log").symlink_to(tmp_path / "secret")
    assert texts(run) == []


def test_use_of_the_machine_is_a_series_per_worker_and_node(run: Path) -> None:
    sampled(run, "rollout-0", SAMPLE)
    readings = Readings(run.parent)
    assert readings.machine("run").workers[0].cpu == 0.5
    sampled(run, "rollout-0", replace(SAMPLE, time_s=BEGIN_S + 5, cpu=1.5))
    (run / "machine" / "rollout-0.jsonl").open("ab").write(b'{"time_s": "damaged"}\n')
    sampled(run, "reward-0", replace(SAMPLE, host="node-b", node_cpu=1.0))
    answer = readings.machine("run")
    assert [(row.worker, row.host, row.cpu) for row in answer.workers] == [
        ("reward-0", "node-b", 0.5),
        ("rollout-0", "node-a", 1.5),
    ]
    series = {one.name: (one.unit, list(one.times_s), list(one.values)) for one in answer.series}
    assert series["machine/rollout-0/cpu"] == ("cores", [BEGIN_S, BEGIN_S + 5], [0.5, 1.5])
    assert series["node/node-b/cpu"] == ("share", [BEGIN_S], [1.0])
    assert "machine/rollout-0/gpu" not in series


def test_a_run_of_an_older_version_has_neither_logs_nor_samples(run: Path) -> None:
    for name in ("machine", "logs"):
        (run / name).rmdir()
    readings = Readings(run.parent)
    assert (readings.machine("run").series, texts(run)) == ([], [])


def test_of_a_progress_bar_the_last_state_is_shown(run: Path) -> None:
    (run / "logs" / "rollout-0.log").write_bytes(b"load:   0%\rload:  50%\rload: 100%\nwindows\r\nlast")
    assert last_lines(run, "rollout-0") == ["load: 100%", "windows", "last"]
    assert set(texts(run)) == {"load: 100%", "windows"}, "a line is indexed once it is whole"


def test_the_end_of_a_process_is_described() -> None:
    assert described_end(-9) == "was killed by SIGKILL"
    assert described_end(-40) == "was killed by signal 40"
    assert described_end(3) == "ended with exit code 3"


def test_the_last_lines_of_a_log_are_cut_and_not_empty(run: Path) -> None:
    logged(run, "rollout-0", *map(str, range(9)), "", "x" * 1000)
    assert last_lines(run, "rollout-0") == ["5", "6", "7", "8", "x" * 300]
    assert last_lines(run, "nobody") == []
