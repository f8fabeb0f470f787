"""Metrics of an evaluation: pass@k against brute force, means over tasks, and unscored episodes."""

from __future__ import annotations

import json
import math
from itertools import combinations
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.eval_section import EvalSection, ks_up_to
from rlsys.errors import RlsysError
from rlsys.loop.evaluation import EvalMetrics, eval_metrics_of, pass_at_k, table_of
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, TRUNCATED, EpisodeMeta, Group, Outcome, failed
from tests.groups import episode, group

outcomes = st.lists(st.booleans(), min_size=1, max_size=8)


@given(passed=outcomes, data=st.data())
def test_pass_at_k_is_the_share_of_successful_subsets(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = [any(subset) for subset in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(fmean(subsets), abs=1e-12)


@given(num_samples=st.integers(1, 2000), data=st.data())
def test_pass_at_1_is_the_share_that_passed_exactly(num_samples, data):
    num_passed = data.draw(st.integers(0, num_samples))
    assert pass_at_k(num_samples, num_passed, 1) == num_passed / num_samples


@given(num_samples=st.integers(1, 300), data=st.data())
def test_pass_at_k_grows_with_k_up_to_any_success(num_samples, data):
    num_passed = data.draw(st.integers(0, num_samples))
    shares = [pass_at_k(num_samples, num_passed, k) for k in range(1, num_samples + 1)]
    assert shares == sorted(shares)
    assert shares[-1] == (num_passed > 0)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_more_than_there_is_is_refused(n, c, k):
    with pytest.raises(ValueError, match=rf"pass@{k} of {n} samples, {c} of them passed"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_doubles_up_to_the_samples_there_are(samples, ks):
    assert ks_up_to(samples) == ks


@pytest.mark.parametrize("samples", [1, 6])
def test_metrics_by_which_checkpoints_compare_exist(samples):
    section = EvalSection(data={"a": "a.jsonl"}, samples=samples, temperature=1.0)
    measured = eval_metrics_of([group(0, episodes=[sample(1.0)] * samples)], samples, 1.0, 0).as_metrics("a")
    assert {*section.metrics} <= measured.keys()


def sample(reward: float | None, outcome: Outcome = OK, length: int = 3) -> EpisodeMeta:
    """A scored sample; without a reward, one that could not be scored."""
    return episode(reward, failed("the judge raised") if reward is None else outcome, length)


def task(*samples: EpisodeMeta) -> Group:
    return group(0, episodes=samples)


def measured(*tasks: Group, samples: int = 2, pass_reward: float = 1.0, num_too_long: int = 0) -> EvalMetrics:
    return eval_metrics_of(tasks, samples=samples, pass_reward=pass_reward, num_too_long=num_too_long)


def test_the_mean_and_its_interval_are_over_tasks():
    rewards = [(1.0, 0.0), (0.5, 0.5), (0.0, 0.0), (1.0, 1.0)]
    result = measured(*(task(*map(sample, pair)) for pair in rewards))
    means = [fmean(pair) for pair in rewards]
    assert result.mean == fmean(means) == 0.5
    assert result.mean_ci95 == pytest.approx(1.96 * stdev(means) / 2)
    assert (result.num_tasks, result.samples) == (4, 2)


def test_one_task_has_a_mean_without_an_interval():
    result = measured(task(sample(1.0), sample(0.0)))
    assert result.mean_ci95 is None
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["mean_ci95"] is None
    assert "eval/d/mean_ci95" not in result.as_metrics("d")


def test_a_sample_passes_at_the_threshold():
    tasks = [task(sample(0.5), sample(0.4)), task(sample(0.1), sample(0.2))]
    assert measured(*tasks, pass_reward=0.5).pass_at == {1: 0.25, 2: 0.5}
    assert measured(*tasks, pass_reward=0.0).pass_at == {1: 1.0, 2: 1.0}
    assert measured(*tasks).pass_at == {1: 0.0, 2: 0.0}


def test_unscored_samples_count_only_in_the_failed_fraction():
    whole, half, none = (
        task(sample(1.0), sample(0.0)),
        task(sample(None), sample(1.0, TRUNCATED, 7)),
        task(sample(None), sample(None)),
    )
    result = measured(whole, half, none)
    assert (result.num_tasks, result.mean, result.failed_frac) == (2, 0.75, 0.5)
    assert result.pass_at == {1: 0.75, 2: 1.0}, "only one task has two scored samples"
    assert result.truncated_frac == pytest.approx(1 / 3)
    assert result.length_mean == pytest.approx(13 / 3)


def test_pass_at_k_needs_a_task_with_k_scored_samples():
    assert measured(task(sample(None), sample(1.0))).pass_at == {1: 1.0}


def test_a_sample_of_several_agents_counts_once_with_summed_length():
    lead, helper = sample(1.0, OK, 3), episode(None, OK, 4)
    result = measured(task(EpisodeMeta(lead.trajectories + helper.trajectories)), samples=1)
    assert (result.length_mean, result.truncated_frac, result.mean) == (7, 0, 1.0)


def test_nothing_to_judge_is_an_error_that_says_why():
    with pytest.raises(RlsysError, match="no sample could be scored: the judge raised"):
        measured(task(sample(None), sample(None)))
    with pytest.raises(RlsysError, match="no sample could be scored: 2 prompts are too long"):
        measured(num_too_long=2)


def test_every_measure_is_a_documented_metric_of_its_data_set():
    tasks = [task(sample(1.0), sample(0.0)), task(sample(0.0), sample(0.0))]
    metrics = measured(*tasks, num_too_long=1).as_metrics("hard.v2")
    assert metrics["eval/hard.v2/pass@2"] == 0.5
    assert {"eval/hard.v2/mean", "eval/hard.v2/mean_ci95", "eval/hard.v2/num_too_long"} <= metrics.keys()
    assert undocumented_names(metrics) == []
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_table_has_rows_for_sets_and_columns_for_measures():
    one = measured(task(sample(1.0)), task(sample(0.0)), samples=1)
    other = measured(task(sample(1.0), sample(1.0)))
    assert table_of({"held_out": one, "hard": other}) == [
        "data set  tasks  too long  mean@1         pass@1  tokens  truncated  failed  mean@2  pass@2",
        "held_out  2      0         0.500 ± 0.980  0.500   3.0     0.0%       0.0%",
        "hard      1      0                        1.000   3.0     0.0%       0.0%    1.000   1.000",
    ]
