"""Everything that can hold a run up, planted in a run, is what the cluster page names, with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.dashboard.query.queries import Readings
from tests.faults import BEGIN_S, CAUSES, FAULTS, alerts_of


@pytest.mark.parametrize("cause", CAUSES)
def test_what_holds_a_run_up_is_named(cause: str, tmp_path: Path) -> None:
    planted = CAUSES[cause]
    alerts_of(planted.watched, tmp_path / "run")

    found = Readings(tmp_path, now=lambda: BEGIN_S).cluster("run").bottleneck

    assert found is not None
    assert found.who == planted.who
    assert found.worker.startswith(planted.worker)
    assert [text for text in planted.says if text not in found.sentence] == []


def test_the_speed_of_a_slow_replica_is_beside_that_of_its_peers(tmp_path: Path) -> None:
    alerts_of(CAUSES["one slow replica"].watched, tmp_path / "run")

    answer = Readings(tmp_path, now=lambda: BEGIN_S).cluster("run")

    means = {s.worker: sum(p.tokens_per_s for p in s.points) / len(s.points) for s in answer.speeds}
    assert set(means) == {"rollout-0", "rollout-1", "rollout-2"}
    assert means["rollout-1"] < min(means["rollout-0"], means["rollout-2"]) / 5
    times_s = [point.time_s for speed in answer.speeds for point in speed.points]
    assert BEGIN_S <= min(times_s) <= max(times_s) <= (answer.to_s or 0.0)


def test_a_score_stands_beside_the_share_of_samples_that_failed(tmp_path: Path) -> None:
    alerts_of(FAULTS["the evaluation fails"].watched, tmp_path / "run")

    (score,) = Readings(tmp_path, now=lambda: BEGIN_S).run("run").summary.evaluations

    assert (score.dataset, score.step) == ("held_out", 24)
    assert score.mean is not None
    assert score.failed_frac is not None
    assert 0.2 < score.failed_frac < 0.8
