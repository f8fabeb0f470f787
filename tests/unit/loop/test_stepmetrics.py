"""Metrics of a step: times, rewards and staleness."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rlsys.contracts import Busy, TrainStats
from rlsys.errors import ConfigError
from rlsys.loop.learner import StepResult
from rlsys.loop.step_metrics import StepClock, step_metrics
from rlsys.monitoring.metric_catalog import METRICS, STALENESS_BUCKETS, undocumented_names
from rlsys.testing import RewardAsAdvantage, run_virtual
from rlsys.types import OK, TRUNCATED, EpisodeMeta, Group, Outcome, SampleMeta, TrajectoryMeta, failed
from tests.groups import episode, group, queue_of


def test_a_span_counts_virtual_seconds_and_a_lap_starts_anew():
    async def main() -> None:
        clock = StepClock()
        clock.start()
        for seconds in (2.0, 1.0):
            with clock.span("train"):
                await asyncio.sleep(seconds)
        await asyncio.sleep(4.0)
        lap = clock.lap()
        assert (lap["time/train"], lap["time/step"]) == (3.0, 7.0)
        await asyncio.sleep(1.0)
        assert clock.lap() == {"time/step": 1.0, "time/wait_permit": 0.0}

    run_virtual(main())


def test_a_span_counts_what_raises_too():
    async def main() -> None:
        clock = StepClock()

        async def fail() -> None:
            with clock.span("train"):
                await asyncio.sleep(2.0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert clock.lap()["time/train"] == 2.0

    run_virtual(main())


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], None),
        ([("a", 0, 2), ("a", 5, 6)], 3),
        ([("a", 0, 4), ("a", 1, 2), ("a", 3, 6)], 6),
        ([("a", 5, 6), ("a", 0, 5)], 6),
        ([("a", 0, 4), ("b", 100, 103), ("b", 104, 106)], 5),
    ],
    ids=["none", "apart", "overlapping", "touching, out of order", "the busiest worker"],
)
def test_worker_time_is_the_union_of_the_busiest_workers_spans(spans, seconds):
    async def main() -> None:
        clock = StepClock()
        for worker, start, end in spans:
            clock.add("rollout", Busy(worker, start, end))
        assert clock.lap().get("time/rollout") == seconds

    run_virtual(main())


def test_rollouts_wait_while_nobody_produces():
    async def main() -> None:
        clock = StepClock()
        clock.start()

        async def produce(start: float, end: float) -> None:
            await asyncio.sleep(start)
            with clock.producing():
                await asyncio.sleep(end - start)

        await asyncio.gather(produce(0, 3), produce(1, 4), produce(6, 7))
        await asyncio.sleep(2.0)
        assert clock.lap()["time/wait_permit"] == pytest.approx(2.0 + 2.0)
        await asyncio.sleep(5.0)
        assert clock.lap()["time/wait_permit"] == pytest.approx(5.0)

    run_virtual(main())


def learned_of(
    groups: Sequence[Group], num_trained: int | None = None, metrics: Mapping[str, float] | None = None
) -> StepResult:
    """A step of these groups, of which settling left the first `num_trained`; all without it."""
    every = [tuple(RewardAsAdvantage().advantages(one)) for one in groups]
    kept = len(groups) if num_trained is None else num_trained
    return StepResult(groups, [*every[:kept], *[()] * (len(groups) - kept)], TrainStats(metrics or {"loss": 0.5}, 1.0))


def measured(*groups, version: int = 0, seconds: float = 2.0, dropped: dict[str, int] | None = None, offered=()):
    async def main() -> dict[str, float]:
        clock = StepClock()
        clock.start()
        for one in offered or groups:
            clock.offer(one)
        await asyncio.sleep(seconds)
        queue = queue_of(2, 1, version=version)
        queue.dropped.update(dropped or {})
        return step_metrics(learned_of(groups), version, queue, clock)

    return run_virtual(main())


def test_weights_wait_is_the_mean_over_groups_of_a_step():
    async def main() -> None:
        clock = StepClock()
        for seconds in (0.0, 3.0):
            clock.offer(group(0), seconds)
        assert clock.lap()["time/weights_wait"] == 1.5
        assert "time/weights_wait" not in clock.lap()
        assert undocumented_names(["time/weights_wait"]) == []

    run_virtual(main())


def test_throughput_counts_only_trained_samples_and_tokens():
    async def main() -> None:
        clock = StepClock()
        clock.start()
        await asyncio.sleep(2.0)
        learned = learned_of([group(0), group(1)], num_trained=1)
        metrics = step_metrics(learned, 0, queue_of(2, 1), clock)
        assert (metrics["perf/samples_per_s"], metrics["perf/tokens_per_s"]) == (1.0, 3.0)
        assert metrics["reward/mean"] == 0.5, "rewards are those of all groups"

    run_virtual(main())


@pytest.mark.parametrize("name", ["reward/mean", "time/step", "perf/tokens_per_s"])
def test_no_metric_hides_another_of_the_same_name(name):
    async def main() -> None:
        clock = StepClock()
        with pytest.raises(ConfigError, match=f"the metrics {name} are reported twice in one step"):
            step_metrics(learned_of([group(0)], metrics={name: 1.0}), 0, queue_of(2, 1), clock)

    run_virtual(main())


def test_failed_episodes_count_in_no_statistic():
    broken = episode(None, failed("took too long"), num_trained=900)
    metrics = measured(group(0, episodes=[episode(1.0), broken, episode(0.0)]), group(1, episodes=[episode(0.5)]))
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (0.5, 0.0, 1.0)
    assert metrics["group/frac_zero_std"] == 0.0, "the other group has nobody to compare with"
    assert (metrics["completions/length_mean"], metrics["completions/length_max"]) == (3, 3)
    assert (metrics["perf/samples_per_s"], metrics["perf/tokens_per_s"]) == (1.5, 4.5)


def test_zero_std_counts_only_groups_of_several_episodes():
    equal, single = group(0, episodes=[episode(1.0), episode(1.0)]), group(2, episodes=[episode(1.0)])
    assert measured(equal, group(1), single)["group/frac_zero_std"] == 0.5
    assert "group/frac_zero_std" not in measured(single, group(3, episodes=[episode(0.0)]))


def test_failed_and_empty_subagents_count_in_no_metric():
    def subagent(outcome: Outcome, num_samples: int) -> TrajectoryMeta:
        return TrajectoryMeta("helper", 0, outcome, None, (SampleMeta(2, 900, 900, 0),) * num_samples)

    root = episode(1.0).trajectories[0]
    whole = EpisodeMeta((root, subagent(failed("its index was empty"), 1), subagent(OK, 0)))
    metrics = measured(group(0, episodes=[whole, episode(0.0)]))
    assert (metrics["reward/mean"], metrics["reward/failed_frac"]) == (0.5, 0.0)
    assert (metrics["completions/length_mean"], metrics["completions/length_max"]) == (3, 3)


def test_agents_are_counted_by_episode_and_failed_ones_shown():
    def agent(name: str, reward: float | None, outcome: Outcome = OK) -> TrajectoryMeta:
        return TrajectoryMeta(name, 0, outcome, reward, (SampleMeta(2, 3, 3, 0),))

    root = episode(1.0).trajectories[0]
    wide = EpisodeMeta((root, agent("solver", 0.5), agent("solver", 9.0, failed("gone")), agent("critic", None)), 6, 90)
    lone = EpisodeMeta((root, agent("solver", 1.0)), 1, 40)
    lost = EpisodeMeta((replace(root, outcome=failed("hung")), agent("solver", 7.0)), 99, 9000)
    metrics = measured(group(0, episodes=[wide, lost]), group(1, episodes=[lone, episode(0.0)]))
    found = {name: value for name, value in metrics.items() if name.startswith("agents/")}
    assert found == pytest.approx(
        {
            "agents/per_episode": (4 + 2 + 1) / 3,
            "agents/tool_calls": (6 + 1 + 0) / 3,
            "agents/sequential_tokens": (90 + 40 + 0) / 3,
            "agents/failed_frac": 1 / 4,
            "agents/reward/solver": (0.5 + 1.0) / 2,
        }
    )
    assert undocumented_names(found) == []


def test_staleness_is_a_mean_over_tokens():
    metrics = measured(group(0, versions=(1, 3)), group(1, versions=(3,)), version=3)
    assert metrics["async/staleness_mean"] == pytest.approx(2 * 3 / 9)
    assert metrics["async/staleness_max"] == 2


def test_the_staleness_histogram_counts_trained_tokens_and_sums_to_one():
    metrics = measured(group(0, versions=(1, 6)), group(1, versions=(5, 7)), group(2, versions=(7, 7)), version=7)
    shares = {name: metrics[f"async/staleness/{name}"] for name in STALENESS_BUCKETS}
    assert shares == pytest.approx({"s0": 3 / 6, "s1": 1 / 6, "s2": 1 / 6, "s3": 0.0, "s4plus": 1 / 6})


def test_lengths_are_reported_for_offered_and_trained_groups():
    short = [group(n, episodes=[episode(1.0, num_trained=k) for k in (1, 2, 3, 4, 5)]) for n in (0, 1)]
    long = group(2, episodes=[episode(None, num_trained=k) for k in (40, 50)], versions=(3,))
    metrics = measured(*short, offered=[*short, long])
    trained = {k: metrics[f"completions/length_{k}"] for k in ("mean", "p50", "p90", "max")}
    offered = {k: metrics[f"completions/offered_length_{k}"] for k in ("mean", "p50", "p90", "max")}
    assert trained == {"mean": 3, "p50": 3, "p90": 5, "max": 5}
    assert offered == {"mean": 10, "p50": 3, "p90": 40, "max": 50}
    assert metrics["async/num_versions"] == 2


def test_truncation_and_drops_are_counted():
    cut = group(0, episodes=[episode(1.0, OK), episode(0.0, TRUNCATED)])
    metrics = measured(cut, dropped={"stale": 1, "too_long": 2, "zero_advantage": 4})
    assert metrics["completions/truncated_frac"] == 0.5
    dropped = [metrics[name] for name in ("async/dropped", "async/dropped_stale", "curation/zero_advantage")]
    assert dropped == [7, 1, 4]


def test_every_metric_of_a_step_is_documented():
    assert undocumented_names(measured(group(0))) == []
    spans = ("rollout", "reward", "wait_batch", "annotate", "train", "publish", "record", "checkpoint", "eval_wait")
    assert {f"time/{span}" for span in spans} <= METRICS.keys()
