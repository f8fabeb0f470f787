"""Samples and logs of a process: what they are of, and that their files stay small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlsys.monitoring.machine_samples import MOST_BYTES, last_sample
from workers.ray.vitals import Vitals


def test_a_worker_is_sampled_with_its_child_processes_and_the_driver_alone(tmp_path: Path) -> None:
    for folder in ("logs", "machine"):
        (tmp_path / folder).mkdir()
    command = [sys.executable, "-c", "memory = b'x' * 2**28; print('made', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        Vitals(tmp_path, "reward-0").sample()
        Vitals(tmp_path, "driver", has_children=False).sample()
        child.communicate(b"\n")
    worker, driver = (last_sample(tmp_path, name) for name in ("reward-0", "driver"))
    assert worker is not None
    assert driver is not None
    assert worker.memory - driver.memory > 2**27


def test_a_log_that_grows_too_large_begins_anew_for_its_open_writers(tmp_path: Path) -> None:
    for name in ("logs", "machine"):
        (tmp_path / name).mkdir()
    log = tmp_path / "logs" / "rollout-0.log"
    writer = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    vitals = Vitals(tmp_path, "rollout-0")
    os.write(writer, b"x" * (MOST_BYTES + 1))
    vitals.sample()
    os.write(writer, b"more\n")
    os.close(writer)
    Vitals(tmp_path, "rollout-0").sample()  # of a process that Ray has restarted
    sample = last_sample(tmp_path, "rollout-0")
    assert (log.read_text(), log.with_name("rollout-0.log.1").stat().st_size) == ("more\n", MOST_BYTES + 1)
    assert sample is not None and (sample.log_turn, sample.log_bytes) == (1, 5)
