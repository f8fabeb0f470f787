"""Metrics of machines from the last samples of workers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import orjson

from rlsys.monitoring.machine_metrics import GONE_S, MachineMetrics, machine_metrics
from rlsys.monitoring.machine_samples import MachineSample
from rlsys.monitoring.metric_catalog import undocumented_names

NOW_S = 1767225600.0
SAMPLE = MachineSample(
    time_s=NOW_S, host="a", pid=7, cpu=1.5, memory=100, gpu=None, gpu_memory=None, node_cpu=0.5, node_memory=0.25,
    node_shm=64, node_sent=10.0, node_received=20.0, log_bytes=0, log_turn=0,
)  # fmt: skip


def write(run_dir: Path, worker: str, *samples: MachineSample) -> None:
    folder = run_dir / "machine"
    folder.mkdir(exist_ok=True)
    (folder / f"{worker}.jsonl").write_bytes(b"".join(orjson.dumps(sample) + b"\n" for sample in samples))


def test_the_last_sample_of_each_worker_and_the_newest_of_each_node_count(tmp_path: Path) -> None:
    write(tmp_path, "driver", replace(SAMPLE, cpu=9.0), SAMPLE)
    write(tmp_path, "rollout-0", replace(SAMPLE, time_s=NOW_S + 1, cpu=0.5, gpu=0.75, gpu_memory=8, node_memory=0.3))
    write(tmp_path, "rollout-1", replace(SAMPLE, time_s=NOW_S - 1, host="b", node_sent=11.0))
    found = machine_metrics(tmp_path, NOW_S)
    assert {name: value for name, value in found.items() if name.startswith("machine/")} == {
        "machine/driver/cpu": 1.5,
        "machine/driver/memory": 100,
        "machine/rollout-0/cpu": 0.5,
        "machine/rollout-0/memory": 100,
        "machine/rollout-0/gpu": 0.75,
        "machine/rollout-0/gpu_memory": 8,
        "machine/rollout-1/cpu": 1.5,
        "machine/rollout-1/memory": 100,
    }
    assert {name: value for name, value in found.items() if name.startswith("node/a/")} == {
        "node/a/cpu": 0.5,
        "node/a/memory": 0.3,
        "node/a/shm": 64,
        "node/a/sent": 10.0,
        "node/a/received": 20.0,
    }
    assert found["node/b/sent"] == 11.0
    assert undocumented_names(found) == []


def test_a_worker_of_an_earlier_session_has_no_metrics(tmp_path: Path) -> None:
    write(tmp_path, "rollout-0", SAMPLE)
    assert "machine/rollout-0/cpu" in machine_metrics(tmp_path, NOW_S + GONE_S)
    assert machine_metrics(tmp_path, NOW_S + GONE_S + 1) == {}


def test_damaged_and_missing_samples_are_left_out(tmp_path: Path) -> None:
    assert machine_metrics(tmp_path, NOW_S) == {}
    write(tmp_path, "rollout-0")
    (tmp_path / "machine" / "rollout-1.jsonl").write_bytes(b'{"time_s": 17672\n')
    assert machine_metrics(tmp_path, NOW_S) == {}


def test_a_thread_looks_at_once_and_ends_when_closed(tmp_path: Path) -> None:
    write(tmp_path, "rollout-0", replace(SAMPLE, time_s=time.time()))
    machines = MachineMetrics(tmp_path)
    assert machines.newest() == {}
    machines.start()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "machine-metrics")
    machines.close()
    thread.join(10)
    assert not thread.is_alive()
    assert machines.newest()["machine/rollout-0/cpu"] == SAMPLE.cpu
