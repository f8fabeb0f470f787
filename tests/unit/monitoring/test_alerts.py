"""Alerts: each fires for its cause on realistic series, and for nothing else."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path

import pytest

from rlsys.monitoring.alert_rules import RULES
from rlsys.monitoring.alerts import Alarms, Alert, AlertSink
from rlsys.monitoring.events import (
    AlertRaised,
    EngineChosen,
    EvalDone,
    Events,
    PhaseDone,
    QueueSeen,
    RunEnded,
    RunStarted,
    StepDone,
)
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.testing import EventRecorder
from tests.faults import FAULTS as PLANTED
from tests.planted import COLLAPSE_STEP, planted_run

Row = Mapping[str, float]

LEARNED: Mapping[str, Mapping[str, list[float | None]]] = json.loads(
    (Path(__file__).parents[2] / "learned_runs.json").read_text()
)
"""What rules go by, of real runs of this project that learned what they should: run -> metric -> value by step."""


def recorded(run: str) -> list[dict[str, float]]:
    """The metrics of a real run, step by step."""
    columns = LEARNED[run].items()
    num_steps = len(next(iter(LEARNED[run].values())))
    return [{name: v for name, values in columns if (v := values[i]) is not None} for i in range(num_steps)]


def folded(rows: Iterable[Row], thresholds: Mapping[str, float | None] | None = None, step_s: float = 10.0) -> Alarms:
    """The alarms after steps of these metrics, `step_s` apart."""
    alarms = Alarms(thresholds or {})
    alarms.observe(RunStarted("runs/a", 0, 1000), 0.0)
    for i, row in enumerate(rows, 1):
        alarms.observe(StepDone(i, row), step_s * i)
    return alarms


def raised_by(rows: Iterable[Row]) -> Sequence[Alert]:
    return folded(rows).history


def noisy(level: Callable[[int], float], name: str, num_steps: int, seed: int, spread: float = 0.1) -> list[Row]:
    """A metric that scatters around `level` of the step by a share `spread`."""
    noise = random.Random(seed)
    return [{name: level(step) * math.exp(noise.gauss(0, spread))} for step in range(1, num_steps + 1)]


def honest(seed: int, num_steps: int = 400) -> list[Row]:
    """A run that learns as it should: reward up, entropy slowly down, lengths a little up, the rest as it scatters."""
    noise = random.Random(seed)

    def near(level: float, spread: float) -> float:
        return level + noise.gauss(0, spread)

    return [
        {
            "reward/mean": near(0.2 + 0.6 * done, 0.04),
            "completions/length_mean": near(300 + 100 * done, 12),
            "completions/truncated_frac": min(1.0, max(0.0, near(0.06, 0.03))),
            "policy/entropy": max(0.0, near(0.9 * math.exp(-1.7 * done), 0.03)),
            "policy/kl_ref": max(0.0, near(0.15 * done, 0.02)),
            "group/frac_zero_std": min(1.0, max(0.0, near(0.2 + 0.45 * done, 0.1))),
            "gac/cosine": near(0.0, 0.1),
            "async/staleness_max": 2.0,
            "sampler/mismatch_kl": max(0.0, near(0.004, 0.002)),
            "sampler/ratio_p99": near(1.25, 0.1),
            "async/dropped_stale": 0.0,
            "time/step": 10.0,
            "time/wait_batch": near(4.0, 1.0),
            "time/wait_permit": near(1.0, 0.3),
            "optim/grad_norm": abs(near(0.4, 0.2)),
        }
        for done in (step / num_steps for step in range(num_steps))
    ]


def changed(seed: int, at: int, **series: Callable[[int], float]) -> list[Row]:
    """An honest run in which some metrics follow `series` of the steps since `at` (`__` stands for `/`)."""
    rows = honest(seed)
    values = {name.replace("__", "/"): value for name, value in series.items()}
    return [
        {**row, **{name: value(step - at) for name, value in values.items()}} if step >= at else row
        for step, row in enumerate(rows, 1)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_an_honest_run_raises_nothing(seed: int) -> None:
    assert raised_by(honest(seed)) == []


@pytest.mark.parametrize("run", LEARNED)
def test_a_real_run_that_learned_raises_nothing(run: str) -> None:
    assert raised_by(recorded(run)) == []


FAULTS: Mapping[str, tuple[str, Callable[[float, int], float]]] = {
    "entropy_collapse": ("policy/entropy", lambda was, i: was * math.exp(-i / 2)),
    "gradient_alignment": ("gac/cosine", lambda was, i: 0.75 + was / 10),
    "truncation": ("completions/truncated_frac", lambda was, i: was + min(0.6, 0.03 * i)),
    "mismatch": ("sampler/mismatch_kl", lambda was, i: was + 0.1),
    "equal_groups": ("group/frac_zero_std", lambda was, i: 1 - (1 - was) / 10),
    "idle_side": ("time/step", lambda was, i: 30 * was),
}
"""Rule -> a metric, and what it becomes by what it was and the steps since something broke."""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_planted_in_a_recorded_run_raise_their_alert(name: str) -> None:
    rows = recorded("sort, four versions behind")
    metric, broken = FAULTS[name]
    for i, row in enumerate(rows[80:]):
        row[metric] = broken(row.get(metric, 0.0), i)
        if name == "idle_side":
            row["time/wait_batch"] = 0.97 * row[metric]

    (alert,) = raised_by(rows)

    assert alert.alert == name
    assert 80 < alert.step <= 105


def test_the_planted_faults_of_a_run_are_told(tmp_path: Path) -> None:
    lines = (planted_run(tmp_path) / "events.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines if '"alert_raised"' in line]

    assert {each["alert"] for each in told} == {"idle_side", "entropy_collapse", "stale_replica", "stuck_group"}
    (collapse,) = (each["step"] for each in told if each["alert"] == "entropy_collapse")
    assert COLLAPSE_STEP < collapse <= COLLAPSE_STEP + 5


@pytest.mark.parametrize("seed", range(30))
def test_a_share_that_scatters_around_one_level_does_not_rise(seed: int) -> None:
    drawn = random.Random(seed)
    rows = [{"completions/truncated_frac": sum(drawn.random() < 0.4 for _ in range(8)) / 8} for _ in range(400)]

    assert raised_by(rows) == []


@pytest.mark.parametrize("seed", range(8))
def test_gradients_that_are_aligned_from_the_start_are_no_alert(seed: int) -> None:
    drawn = random.Random(seed)
    rows = [{"gac/cosine": drawn.gauss(0.2, 0.25), "async/staleness_max": 2.0} for _ in range(300)]

    assert raised_by(rows) == []


def test_aligned_gradients_of_fresh_samples_raise_no_alert() -> None:
    rows = [{**row, "async/staleness_max": 0.0} for row in WRONG["gradient_alignment"]]

    assert raised_by(rows) == []


def test_slightly_longer_answers_raise_no_length_alert() -> None:
    rows = [{"reward/mean": 0.01 * i, "completions/length_mean": 6 + 0.2 * i} for i in range(60)]

    assert raised_by(rows) == []


@pytest.mark.parametrize("seed", range(8))
def test_entropy_that_collapses_is_told_within_ten_steps_and_once(seed: int) -> None:
    fallen = random.Random(seed)
    rows = changed(seed, 60, policy__entropy=lambda i: 0.7 * math.exp(-i / 2) + 0.02 * fallen.random())

    (alert,) = raised_by(rows)

    assert alert.alert == "entropy_collapse"
    assert 60 < alert.step <= 70
    assert alert.until_step is None
    assert "the last step above half of that was 6" in alert.sentence  # 60, or one just after


@pytest.mark.parametrize("seed", range(8))
def test_a_collapse_after_a_long_slow_decline_is_seen(seed: int) -> None:
    rows = noisy(lambda step: 1.2 * math.exp(-step / 80 - max(0, step - 200)), "policy/entropy", 300, seed)

    (alert,) = raised_by(rows)

    assert 200 < alert.step <= 208
    assert alert.until_step is None, "it holds, though what is low stays as low"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("end", [0.15, 0.3])
def test_a_slow_decline_of_entropy_is_no_collapse(seed: int, end: float) -> None:
    rows = noisy(lambda step: max(end, 1.2 * math.exp(-step / 80)), "policy/entropy", 600, seed, spread=0.12)

    assert raised_by(rows) == []


def test_falling_from_the_initial_entropy_is_no_collapse() -> None:
    assert raised_by(noisy(lambda step: 4.5 if step < 8 else 0.4, "policy/entropy", 100, 0)) == []


def test_a_collapse_in_the_first_steps_is_seen() -> None:
    (alert,) = raised_by(noisy(lambda step: 1.0 if step < 8 else 0.01, "policy/entropy", 40, 0))

    assert 8 <= alert.step <= 12


WRONG: Mapping[str, list[Row]] = {
    "reward_drop": changed(10, 100, reward__mean=lambda i: 0.1),
    "failed_samples": changed(11, 100, reward__failed_frac=lambda i: 0.48),
    "constant_reward": changed(12, 100, reward__min=lambda i: 0.0, reward__max=lambda i: 0.0),
    "length_explosion": changed(13, 100, completions__length_mean=lambda i: 300.0 + 120 * min(i, 20)),
    "slow_tool": changed(14, 80, agents__tool_s__search=lambda i: 0.5 if i < 20 else 4.0),
    "disk_low": changed(15, 100, driver__disk_free=lambda i: 0.4),
    "kl_tail": changed(0, 100, policy__kl_ref=lambda i: 0.1 + 0.05 * i if i < 30 else 1.6),
    "ratio_tail": changed(1, 100, sampler__ratio_p99=lambda i: 6.0),
    "equal_groups": changed(2, 100, group__frac_zero_std=lambda i: 0.95),
    "truncation": changed(3, 100, completions__truncated_frac=lambda i: min(0.6, 0.06 + 0.02 * i)),
    "gradient_alignment": changed(4, 100, gac__cosine=lambda i: -0.5),
    "mismatch": changed(5, 100, sampler__mismatch_kl=lambda i: 0.2),
    "stale_drops": changed(6, 100, async__dropped_stale=lambda i: 1.0 + i),
    "not_finite": changed(7, 100, optim__grad_norm=lambda i: math.nan),
    "idle_side": changed(8, 100, time__wait_batch=lambda i: 9.6),
    "reward_length": changed(
        9, 100, completions__length_mean=lambda i: 300.0 + 8 * i, reward__mean=lambda i: min(2.0, 0.2 + 0.01 * i)
    ),
}
"""Rule -> a run in which what it is for begins at step 100."""


@pytest.mark.parametrize("name", WRONG)
def test_every_fault_soon_raises_its_alert_and_no_other(name: str) -> None:
    (alert,) = raised_by(WRONG[name])

    assert alert.alert == name
    assert 100 <= alert.step <= 140
    assert alert.threshold == RULES[name].threshold
    assert (alert.value < alert.threshold) == RULES[name].is_low
    assert alert.sentence.endswith(RULES[name].remedy)
    assert not alert.metric or alert.metric in WRONG[name][alert.step - 1]


def evaluated(*means: float, dataset: str = "held_out") -> Alarms:
    """The alarms after evaluations of these means, 5 steps apart, each with an interval of 0.05."""
    alarms = Alarms()
    for i, mean in enumerate(means):
        metrics = {f"eval/{dataset}/mean": mean, f"eval/{dataset}/mean_ci95": 0.05}
        alarms.observe(EvalDone(5 * i, dataset, "", 1.0, metrics), 10.0 * i)
    return alarms


def test_an_evaluation_far_below_its_best_is_told_until_it_recovers() -> None:
    (alert,) = evaluated(0.5, 0.7, 0.66, 0.3).open

    assert (alert.alert, alert.metric) == ("evaluation_drop", "eval/held_out/mean")
    assert alert.sentence.startswith("eval/held_out/mean fell to 0.3 from 0.7 at step 5. ")
    assert evaluated(0.5, 0.7, 0.66, 0.3, 0.68).open == ()


def test_an_evaluation_that_scatters_within_its_interval_raises_nothing() -> None:
    assert evaluated(0.1, 0.16, 0.09, 0.15, 0.08).history == []


def test_every_rule_has_a_test_that_raises_it() -> None:
    planted = {fault.alert for fault in PLANTED.values()}
    assert {*WRONG, *planted, "evaluation_drop", "no_progress"} == set(RULES)


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_is_turned_off_says_nothing(name: str) -> None:
    assert folded(WRONG[name], {name: None}).history == []


def test_a_threshold_can_be_set() -> None:
    rows = WRONG["mismatch"]

    assert folded(rows, {"mismatch": 0.3}).history == []
    assert folded(rows, {"mismatch": 0.001}).history[0].step == 20


def test_an_alert_ends_with_recovery_and_may_return() -> None:
    rows = [{"sampler/ratio_p99": ratio} for ratio in [6.0] * 10 + [1.0] * 10 + [6.0] * 10]

    first, second = raised_by(rows)

    assert (first.step, first.until_step) == (5, 14)
    assert (second.step, second.until_step) == (23, None)


def test_what_scatters_around_a_threshold_does_not_flap() -> None:
    rows = noisy(lambda _: 3.0, "sampler/ratio_p99", 400, seed=1, spread=0.2)

    assert len(raised_by(rows)) == 1


def test_one_stale_drop_is_an_alert_for_ten_steps() -> None:
    rows = [{"async/dropped_stale": 0.0 if step < 30 else 1.0} for step in range(60)]

    (alert,) = raised_by(rows)

    assert (alert.step, alert.until_step) == (31, 41)


def test_drops_before_a_resume_are_not_reported_again() -> None:
    alarms = folded([{"async/dropped_stale": 3.0}] * 30)
    alarms.observe(RunStarted("runs/a", 25, 1000), 900.0)
    told = [
        alert for i in range(26, 40) for alert in alarms.observe(StepDone(i, {"async/dropped_stale": 0.0}), 910 + i)
    ]

    assert told == []


def test_of_numbers_that_are_not_finite_the_first_is_named() -> None:
    (alert,) = raised_by([{"reward/mean": 0.5, "loss": math.nan, "optim/grad_norm": math.inf}])

    assert alert.metric == "loss"
    assert "No finite number: loss, optim/grad_norm." in alert.sentence


def test_a_step_without_duration_raises_no_rate_alert() -> None:
    assert raised_by([{"perf/tokens_per_s": math.nan}]) == []


def test_sparse_metrics_are_read_where_they_appear() -> None:
    rows = [{"policy/kl_ref": 2.0} if step % 7 == 0 else {} for step in range(50)]

    (alert,) = raised_by(rows)

    assert alert.alert == "kl_tail"


# ------------------------------------------------------------------------------------------------------------- silence


def test_silence_for_ten_steps_is_an_alert_when_queried() -> None:
    alarms = folded([{}] * 30, step_s=10.0)

    assert alarms.silent(300 + 100) is None
    alert = alarms.silent(300 + 101)

    assert alert is not None
    assert alert.step == 30
    assert "for 101 s after step 30; steps take 10 s" in alert.sentence
    assert not alarms.open, "to ask changes nothing"


def test_the_run_reports_its_silence_until_the_next_step() -> None:
    alarms = folded([{}] * 30, step_s=10.0)

    assert alarms.observe(QueueSeen(4, 0), 350) == []
    (alert,) = alarms.observe(QueueSeen(4, 1), 401)
    assert alarms.observe(QueueSeen(4, 0), 402) == []
    assert (alert.alert, alarms.silent(500)) == ("no_progress", None)

    alarms.observe(StepDone(31, {}), 510)

    assert alarms.open == ()
    assert [a.until_step for a in alarms.history] == [31]


def test_silence_needs_a_minute_and_ten_before_the_first_step() -> None:
    quick, fresh = folded([{}] * 30, step_s=0.1), Alarms()
    fresh.observe(RunStarted("runs/a", 0, 10), 0.0)

    assert (quick.silent(3 + 60), fresh.silent(600)) == (None, None)
    assert quick.silent(3 + 61) is not None
    assert fresh.silent(601) is not None


def test_a_threshold_of_no_steps_alerts_after_a_minute() -> None:
    alarms = Alarms({"no_progress": 0.0})
    alarms.observe(RunStarted("runs/a", 0, 10), 0.0)

    assert alarms.silent(60) is None
    assert alarms.silent(61) is not None


def test_a_run_not_started_or_ended_is_never_silent() -> None:
    alarms = folded([{}] * 30)
    assert Alarms().silent(1e9) is None

    alarms.observe(RunEnded(30, "finished"), 301)

    assert alarms.silent(1e9) is None
    assert alarms.observe(RunStarted("runs/a", 30, 1000), 1e9) == [], "the time between was nobody's"


def test_after_the_last_step_nobody_waits_for_another() -> None:
    alarms = Alarms()
    alarms.observe(RunStarted("runs/a", 0, 3), 0.0)
    for step in (1, 2, 3):
        alarms.observe(StepDone(step, {}), 10.0 * step)

    assert alarms.observe(QueueSeen(0, 0), 5000) == [], "the last version is measured as long as that takes"
    assert alarms.silent(9000) is None

    alarms.observe(RunStarted("runs/a", 3, 4), 10_000)
    assert alarms.silent(20_000) is not None, "it goes on, with one step more"


def test_the_first_step_says_what_the_second_may_take() -> None:
    alarms = Alarms()
    alarms.observe(RunStarted("runs/a", 0, 9), 0.0)
    alarms.observe(StepDone(1, {}), 300.0)

    assert alarms.silent(300 + 2999) is None
    alert = alarms.silent(300 + 3001)

    assert alert is not None
    assert "after step 1; the first took 300 s" in alert.sentence

    alarms.observe(StepDone(2, {}), 320.0)
    alert = alarms.silent(320 + 201)
    assert alert is not None, "the first one is no measure once there is a better one"
    assert "steps take 20 s" in alert.sentence


def test_a_killed_run_that_restarts_days_later_is_not_late() -> None:
    alarms = folded([{}] * 30)

    assert alarms.observe(PhaseDone("load_data", 0.1), 1e6) == []
    assert alarms.observe(EngineChosen("rollout-0", "local", ""), 1e6 + 1) == []
    assert alarms.observe(RunStarted("runs/a", 30, 1000), 1e6 + 2) == []
    assert alarms.history == []


def test_a_run_that_ends_late_says_nothing_after_its_end() -> None:
    assert folded([{}] * 30).observe(RunEnded(30, "interrupted"), 1e6) == []


def test_an_alert_ended_by_a_resume_keeps_its_step_order() -> None:
    alarms = folded([{}] * 30)
    alarms.observe(QueueSeen(1, 0), 5000)

    alarms.observe(RunStarted("runs/a", 20, 1000), 6000)

    assert [(a.step, a.until_step) for a in alarms.history] == [(30, 30)]


# ---------------------------------------------------------------------------------------------------------- in the run


def test_alerts_reach_every_sink_after_their_step() -> None:
    kept, screen = EventRecorder(), StringIO()
    events = Events([kept, ConsoleSink(10, screen, every_s=0)])
    events.attach(AlertSink(events, {"not_finite": 0}))

    events.emit(StepDone(1, {"loss": math.nan}))
    events.emit(StepDone(2, {"loss": math.nan}))

    assert [event.kind for event in kept.events] == ["step_done", "alert_raised", "step_done"]
    told = kept.events[1]
    assert isinstance(told, AlertRaised)
    assert (told.alert, told.step, told.value, told.threshold) == ("not_finite", 1, 1, 0)
    assert f"alert not_finite at step 1: {told.sentence}\n" in screen.getvalue()


def test_alerts_read_from_the_file_equal_those_of_the_run() -> None:
    kept = EventRecorder()
    clock = iter(range(10**6))
    events = Events([kept], clock=lambda: float(next(clock)))
    events.attach(AlertSink(events, {}))
    for i, row in enumerate(WRONG["equal_groups"], 1):
        events.emit(StepDone(i, row))
    told = [event for event in kept.events if isinstance(event, AlertRaised)]

    alarms = Alarms()
    for i, event in enumerate(kept.events):
        alarms.observe(event, float(i))

    assert [(a.alert, a.step, a.sentence) for a in alarms.history] == [(t.alert, t.step, t.sentence) for t in told]
