"""Fifteen faults planted in runs raise the alert that names them, and runs without a fault raise none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.dashboard.query.queries import Readings
from tests.by_day import first_by_day
from tests.faults import BEGIN_S, FAULTS, HEALTHY, alerts_of


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_raises_the_alert_that_names_it(fault: str, tmp_path: Path) -> None:
    planted = FAULTS[fault]

    raised = alerts_of(planted.watched, tmp_path / "run")

    first = next(alert for alert in raised if alert.alert == planted.alert)
    assert planted.names in first.sentence
    assert planted.begins <= first.step <= planted.begins + planted.within
    assert {alert.alert for alert in raised} <= {planted.alert, *planted.others}
    told = Readings(tmp_path, now=lambda: BEGIN_S + 300).alerts("run").alerts
    (shown,) = [a for a in told if (a.alert, a.step, a.sentence) == (first.alert, first.step, first.sentence)]
    assert not planted.within_s or shown.time_s - BEGIN_S <= planted.within_s


@pytest.mark.parametrize("healthy", first_by_day(HEALTHY, 2))
def test_a_run_without_a_fault_raises_no_alert(healthy: str, tmp_path: Path) -> None:
    assert alerts_of(HEALTHY[healthy], tmp_path / "run") == []
