"""Events built from the answers of workers."""

from __future__ import annotations

from dataclasses import replace

from rlsys.monitoring.events import (
    SHORTEST_S,
    Event,
    Events,
    GroupScored,
    WorkerBusy,
    emit_busy,
    group_rolled_out,
    group_scored,
)
from rlsys.testing import EventRecorder
from rlsys.types import TRUNCATED, Busy, RolloutReport, TrajectoryMeta, failed
from tests.groups import episode, group, rolled_out

SUBAGENT = TrajectoryMeta("subagent", 0, TRUNCATED, None, episode(0.0, num_trained=4).trajectories[0].samples)


def told(spans: list[Busy], answered_s: float, now_s: float) -> list[Event]:
    recorder = EventRecorder()
    emit_busy(Events([recorder], clock=lambda: now_s), "scoring", spans, answered_s)
    return recorder.events


def test_worker_times_are_mapped_to_the_clock_of_the_driver():
    spans = [Busy("reward-0", 50.0, 51.0), Busy("reward-0", 53.0, 57.0)]
    assert told(spans, answered_s=57.0, now_s=1_000.0) == [
        WorkerBusy("reward-0", "scoring", 993.0, 994.0),
        WorkerBusy("reward-0", "scoring", 996.0, 1_000.0),
    ]


def test_work_too_short_to_be_seen_is_not_told():
    assert told([Busy("reward-0", 50.0, 50.0 + SHORTEST_S / 2)], 51.0, 1_000.0) == []


def test_a_rolled_out_group_reports_all_lengths_and_truncated_episodes():
    lead = episode(1.0, num_trained=3)
    both = replace(lead, trajectories=(*lead.trajectories, SUBAGENT, SUBAGENT))
    lost = episode(None, failed("a tool broke"), num_trained=2)
    of = group(4, versions=(2, 5), episodes=[both, lead, lost])
    event = group_rolled_out(rolled_out(of, RolloutReport(Busy("rollout-0", 10.0, 12.5), waited_s=0.5)))
    assert (event.group_id, event.task_id, event.worker) == (4, "task-4", "rollout-0")
    assert (event.oldest, event.newest, event.lengths, event.num_truncated) == (2, 5, (11, 3, 2), 1)
    assert (event.seconds, event.waited_s) == (2.5, 0.5)


def test_a_group_without_samples_has_its_permits_version():
    of = replace(group(0), versions=(), permit_version=7)
    event = group_rolled_out(rolled_out(of, RolloutReport(Busy("rollout-0", 0.0, 1.0))))
    assert (event.oldest, event.newest) == (7, 7)


def test_a_failed_episode_has_no_reward_whatever_it_was_given():
    of = group(1, episodes=[episode(0.5), episode(1.0, failed("the judge raised")), episode(None)])
    assert group_scored(of) == GroupScored(1, "task-1", (0.5, None, None), {"the judge raised": 1})
