"""The benchmark of the dashboard goes on measuring what the documentation quotes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_the_dashboard_measures_every_page_and_what_a_run_pays() -> None:
    command = [sys.executable, "-m", "benchmarks.dashboard", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["open_s"]["median"] > 0
    assert {"run", "runs", "series", "groups", "group", "episode", "task", "cluster"} <= measured["page_ms"].keys()
    assert 0 < measured["live_latency_s"]["median"] < 10
    assert measured["emit_us"] > 0
