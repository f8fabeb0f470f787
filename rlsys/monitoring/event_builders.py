"""Events built from the answers of workers. Nothing here makes a decision."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.contracts import Busy, RolledOut
from rlsys.monitoring.events import Events, GroupRolledOut, GroupScored, WorkerBusy
from rlsys.types import EpisodeMeta, Group, OutcomeKind

SHORTEST_S = 0.001
"""Shorter work is not emitted: it would be invisible on a timeline."""


def emit_busy(events: Events, activity: str, spans: Iterable[Busy], answered_s: float) -> None:
    """Emit when one worker did `activity`, one of `rlsys.monitoring.events.ACTIVITIES`.

    `answered_s` is the time of the answer on the worker's clock; its offset from the driver's clock corrects all times.
    """
    ahead_s = events.now() - answered_s
    for busy in spans:
        if busy.end_s - busy.start_s >= SHORTEST_S:
            events.emit(WorkerBusy(busy.worker, activity, busy.start_s + ahead_s, busy.end_s + ahead_s))


def group_rolled_out(rolled_out: RolledOut) -> GroupRolledOut:
    """Event of a group whose episodes were rolled out."""
    group, busy = rolled_out.group, rolled_out.busy
    return GroupRolledOut(
        group_id=group.group_id,
        task_id=group.task_id,
        worker=group.replica,
        oldest=group.oldest_version,
        newest=group.versions[-1].version if group.versions else group.permit_version,
        lengths=tuple(_num_sampled(episode) for episode in group.episodes),
        num_truncated=sum(_is_truncated(episode) for episode in group.episodes),
        seconds=busy.end_s - busy.start_s,
        waited_s=rolled_out.waited_s,
    )


def group_scored(group: Group) -> GroupScored:
    """Event of a group whose episodes were scored."""
    roots = [episode.trajectories[0] for episode in group.episodes]
    rewards = tuple(None if root.outcome.is_failed else root.reward for root in roots)
    return GroupScored(group.group_id, group.task_id, rewards)


def _num_sampled(episode: EpisodeMeta) -> int:
    return sum(sample.num_trained for t in episode.trajectories for sample in t.samples)


def _is_truncated(episode: EpisodeMeta) -> bool:
    return any(t.outcome.kind is OutcomeKind.TRUNCATED for t in episode.trajectories)
