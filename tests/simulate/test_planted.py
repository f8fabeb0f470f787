"""The faults of `tests.planted` are in its files, for whoever reads them; a browser shows them in `tests/browser`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.dashboard.query.queries import Readings
from tests.planted import (
    BEGIN_S,
    BOTTLENECK,
    COLLAPSE_STEP,
    LENGTH_S,
    NUM_STEPS,
    STALE_REPLICA,
    STALE_VERSION,
    STUCK_TASK,
    TOTAL_STEPS,
    planted_run,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_run(tmp_path_factory.mktemp("planted") / "run")


@pytest.fixture
def readings(folder: Path) -> Readings:
    return Readings(folder, now=lambda: BEGIN_S + LENGTH_S + 1)


def test_the_run_is_the_one_that_is_described(readings: Readings) -> None:
    told = readings.run(".").summary

    assert (told.step, told.total_steps, told.status) == (NUM_STEPS, TOTAL_STEPS, "running")
    assert told.started_s is not None
    assert told.updated_s is not None
    assert pytest.approx(told.updated_s, abs=1) == BEGIN_S + LENGTH_S


def test_one_replica_is_stale(readings: Readings) -> None:
    replicas = readings.cluster(".", None, None, 1000).replicas

    assert [(r.worker, r.version) for r in replicas if r.is_stale] == [(STALE_REPLICA, STALE_VERSION)]


def test_one_task_never_finishes(readings: Readings) -> None:
    pending = readings.ledger(".").pending

    assert {row.task_id for row in pending if row.is_overdue} == {STUCK_TASK}
    assert {point.fate for point in readings.rollouts.task(".", STUCK_TASK).points} == {"pending"}


def test_one_side_is_the_bottleneck(readings: Readings) -> None:
    bottleneck = readings.cluster(".", None, None, 1000).bottleneck

    assert bottleneck is not None
    assert bottleneck.who == BOTTLENECK


def test_entropy_collapses_at_one_step(readings: Readings) -> None:
    (entropy,) = readings.series(".", ["policy/entropy"], 1000).series
    values = {step: value or 0.0 for step, value in zip(entropy.steps, entropy.values, strict=True)}
    (alert,) = [row for row in readings.alerts(".").alerts if row.alert == "entropy_collapse"]

    assert min(v for step, v in values.items() if step < COLLAPSE_STEP) > 0.8
    assert max(v for step, v in values.items() if step >= COLLAPSE_STEP) < 0.4
    assert COLLAPSE_STEP <= alert.step <= COLLAPSE_STEP + 5


def test_the_same_run_is_written_every_time(folder: Path, tmp_path: Path) -> None:
    again = planted_run(tmp_path / "run")

    def told(run: Path) -> list[str]:
        lines = (run / "events.jsonl").read_text().splitlines()
        return [line.split(',"metrics":')[0] for line in lines if str(run) not in line]

    assert told(again) == told(folder)
