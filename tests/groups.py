"""Groups made by hand, for tests that need no rollout, and queues for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlsys.data.task_source import TaskSource
from rlsys.loop.admission import StalenessBound
from rlsys.loop.group_queue import GroupQueue, InFlightGroup, Permit
from rlsys.loop.task_ledger import Ledger
from rlsys.testing import tasks
from rlsys.types import (
    OK,
    Acknowledged,
    Busy,
    EpisodeMeta,
    Group,
    GroupKey,
    Outcome,
    RolloutReport,
    SampleMeta,
    TrajectoryMeta,
    VersionSpan,
)


def episode(reward: float | None, outcome: Outcome = OK, num_trained: int = 3) -> EpisodeMeta:
    """One agent, one turn of `num_trained` tokens."""
    sample = SampleMeta(num_prompt=2, num_completion=num_trained, num_trained=num_trained, prompt_key=0)
    return EpisodeMeta((TrajectoryMeta("policy", None, outcome, reward, (sample,)),))


def group(
    group_id: int,
    *,
    versions: Sequence[int] = (0,),
    hashes: Sequence[str] | None = None,
    episodes: Sequence[EpisodeMeta] | None = None,
) -> Group:
    """A group with three tokens of each of `versions`, acknowledged as `hashes` (by default `hash-of-VERSION`)."""
    hashes = hashes if hashes is not None else [f"hash-of-{v}" for v in versions]
    return Group(
        key=GroupKey(group_id, 1),
        task_id=f"task-{group_id}",
        permit_version=versions[0],
        replica="rollout-0",
        episodes=tuple(episodes or [episode(1.0), episode(0.0)]),
        versions=tuple(VersionSpan(v, 3) for v in versions),
        weights=tuple(Acknowledged("rollout-0", v, h) for v, h in zip(versions, hashes, strict=False)),
        payload=None,
    )


def num_ok(group: Group) -> int:
    """Episodes without a failure."""
    return sum(not episode.is_failed for episode in group.episodes)


def rolled_out(done: Group, report: RolloutReport = RolloutReport(Busy("rollout-0", 0.0, 0.0))) -> Group:  # noqa: B008
    """What a replica answers."""
    return replace(done, report=report)


def report_of(views: Sequence[Group]) -> RolloutReport:
    """The report of a rollout."""
    report = views[0].report
    assert report is not None
    return report


def hand_in(queue: GroupQueue, permit: Permit, done: Group) -> InFlightGroup:
    """Do all that a producer does with a permit whose group is worth training."""
    in_flight = queue.start_rollout(permit)
    assert queue.finish_rollout(in_flight, rolled_out(done))
    assert queue.score(in_flight, done)
    queue.offer(in_flight)
    return in_flight


def queue_of(
    groups_per_step: int = 2,
    max_staleness: int = 0,
    window: int = 1,
    *,
    version: int = 0,
    num_groups: int = 100,
    num_tasks: int = 5,
    synchronous_until: int = 0,
    **options: Any,
) -> GroupQueue:
    """A queue over tasks that are drawn with seed 3, two episodes a group."""
    ledger = Ledger(TaskSource(tasks(num_tasks), seed=3), group_size=2, seed=3)
    bound = StalenessBound(groups_per_step, max_staleness, window, synchronous_until)
    return GroupQueue(bound, version, num_groups, ledger, **options)
