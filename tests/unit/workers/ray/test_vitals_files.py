"""Files of samples and logs stay small."""

from __future__ import annotations

import os
from pathlib import Path

from rlsys.monitoring.machine_samples import MOST_BYTES, last_sample
from workers.ray.vitals import Vitals


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
