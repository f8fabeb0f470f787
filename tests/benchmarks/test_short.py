"""Every benchmark: its parser by day, its short form in `make nightly`, and its error where its peer is missing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import raylets
from tests.processes import forks_with_imports, run_module

ROOT = Path(__file__).parents[2]
PAYLOADS = {
    "payload_pickle_over_numpy", "payload_us", "record_stall", "record_s", "record_bytes_per_token", "chunks_growth",
    "chunks_us_per_token",
}  # fmt: skip
KEYS = {
    "agents": {
        "speedup_batch", "speedup_lock_step", "streamed", "by_batch", "lock_step", "subagents", "routing", "prefix",
        "gateway_ms", "gateway_p95_ms", "session_ms", "openai_client_ms",
    },
    "agreement": {"agreement", "experts"},
    "async_vs_sync": {
        "speedup_at_4", "speedup", "reward", "seconds_per_step", "staleness", "staleness_max", "wait_batch_share",
        "steps", "correction",
    },
    "chaos": {"broken", "faults", "held_up_s", "signal_answered_s", "loss_named_s", "steps", "seconds"},
    "checkpoint": {
        "copy_s", "first_copy_s", "last_phases_s", "resume_s", "save_s", "stall_s", "stall_share", "state_mb",
    },
    "compiled": {"sort"},
    "cpu_split": {"sort"},
    "damage": {"configs", "rows", "gateway", "folders"},
    "dashboard": {
        "open_s", "reader_mb", "whole_run_ms", "index_s", "index_mb", "sort_s", "search_s", "zoom_s", "table_ms",
        "page_ms", "page_ms_worst", "live_latency_s", "emit_us", "emit_share", "events_per_step", "groups_per_step",
        "day_growth_mb", "day_events", "day_steps", "events",
    },
    "engines": {
        "tokens_per_s", "wrapper_cost", "wrapper_cost_median", "overlapping_over_plain", "weight_change",
        "pause_over_memcpy", "pause_tp2_over_memcpy", "checksum_s", "start_up_s",
    },
    "families": {"cells"},
    "fresh_weights": {"measured_over_simulated", "link_latency_s", "rows"},
    "gac": {"sorter, 0.44 M"},
    "losses": {"1k"},
    "outages": {"relay alone cut, 10 s"},
    "overhead": {
        "ms_per_step", "ms_per_group", "overhead_ms", "driver_cpu_share", "driver_groups_per_s",
        "start_up_s", "start_up_breakdown_s", *PAYLOADS,
    },
    "payloads": PAYLOADS,
    "placement": {
        "together_over_split", "wake_over_memcpy", "wake_over_clone", "resident_over_larger", "moved_mb", "join_s",
        "rows",
    },
    "recovery": {"recovery_s", "step_s", "interrupt_s"},
    "road": {
        "identity_types", "identity_beside", "files", "lines", "of_files", "page_files", "page_lines", "not_on_page",
        "page_not_called", "weights_files", "not_counted", "public_methods", "gone_names_found",
    },
    "relay": {"stall_over_memcpy", "stall_2_over_1", "freshness_s", "left_out", "deltas", "rows"},
    "session_workers": {"beside_s", "apart_s", "speedup"},
    "soak": {"broken", "left_behind", "growth", "last", "groups", "samples", "seconds"},
    "trainer": {
        "checkpointing", "over_none", "positions", "packed_over_padded", "over_bare",
        "load_peak_over_shard", "plan_error", "all_gathers", "reduce_scatters", "lora",
        "lora_over_full",
    },
    "schedules": {"schedules", "seconds", "broken", "groups_issued_again", "largest_staleness"},
}  # fmt: skip
"""Of the closing line, by benchmark."""
PEERS = {"peer_trl": ".cache/peer_trl/venv", "group_queue": ".cache/queue/venv"}
"""Benchmarks that need an environment of their own, and where that is."""
LOADS = [
    {"tokens": 1024, "groups": 16, "interval_s": 0.0},
    {"tokens": 1024, "groups": 4, "interval_s": 0.01},
]


@pytest.fixture(scope="module")
def answer_of(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Function that runs a benchmark, and returns its closing line.

    Benchmarks are forked from a process that has imported what is slow to import, and share a cluster, unless they
    start one.
    """
    context = forks_with_imports()

    with raylets(1, 8, 256 << 20) as cluster:

        def answer(name: str, *arguments: str) -> Any:
            folder = tmp_path_factory.mktemp(name)
            given = (f"benchmarks.{name}", arguments, {"RAY_ADDRESS": cluster.address}, folder)
            process = context.Process(target=run_module, args=given)
            process.start()
            process.join()
            assert process.exitcode == 0, (folder / "stderr").read_text()[-4000:]
            return json.loads((folder / "stdout").read_text().splitlines()[-1])

        yield answer


def test_every_benchmark_is_here() -> None:
    paths = (ROOT / "benchmarks").glob("*.py")
    assert {path.stem for path in paths if "= parser_of(" in path.read_text()} == KEYS.keys() | PEERS.keys()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_module_of_the_benchmarks_imports(path: Path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")


@pytest.mark.parametrize("name", sorted(KEYS.keys() | PEERS.keys()))
def test_a_benchmark_shows_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--short" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(KEYS.keys() - {"dashboard"}))
def test_a_short_benchmark_ends_with_its_figures(name: str, answer_of: Callable[..., Any]) -> None:
    figures = answer_of(name, "--short")
    assert figures.pop("command") == f"python -m benchmarks.{name} --short"
    assert figures.keys() == KEYS[name]


@pytest.mark.nightly
def test_the_dashboard_benchmark_measures_every_page_and_emit_cost(answer_of: Callable[..., Any]) -> None:
    measured = answer_of("dashboard", "--short")
    assert measured.keys() == KEYS["dashboard"] | {"command"}
    assert measured["open_s"]["median"] > 0
    assert {"run", "runs", "series", "groups", "group", "episode", "task", "cluster"} <= measured["page_ms"].keys()
    assert 0 < measured["live_latency_s"]["median"] < 10
    assert measured["emit_us"] > 0


@pytest.mark.parametrize("name", PEERS)
def test_a_benchmark_without_its_peer_exits_with_a_remedy(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--short"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{PEERS[name]} lacks torch==")
    assert done.stderr.endswith("remedy: run this benchmark once without --short\n")


@pytest.mark.nightly
@pytest.mark.parametrize("play", ["group_queue:play_ray_queue", "group_queue_rlsys:play"])
def test_the_queues_that_need_no_other_environment_do_their_loads(play: str, answer_of: Callable[..., Any]) -> None:
    taken = answer_of("measure", f"benchmarks.{play}", json.dumps([LOADS]))
    assert [one.keys() for one in taken] == [{"groups_per_s", "p50_s", "p99_s"}] * len(LOADS)


def test_marks_count_the_cpu_time_of_processes_that_have_ended(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    job = (
        "import subprocess, sys\n"
        "for _ in range(3):\n"
        "    with open(sys.argv[1], 'a') as file: file.write('{}\\n')\n"
        f"    subprocess.run([sys.executable, '-c', {spin!r}], check=True)\n"
    )
    program = (
        "import sys; from pathlib import Path; from benchmarks.measure import ENV, marks_of\n"
        "first, last = marks_of([sys.executable, '-c', sys.argv[1], sys.argv[2]], ENV, Path(sys.argv[2]), [1, 3])\n"
        "print(last.step - first.step, last.cpu_s - first.cpu_s)\n"
    )
    command = [sys.executable, "-c", program, job, str(tmp_path / "metrics.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    steps, cpu_s = done.stdout.split()
    assert int(steps) == 2 and float(cpu_s) > 0.5
