"""Lists of the groups of a step and of a task, with their results."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.groups import PENDING, GroupFacts, Groups, RewardRange
from rlsys.dashboard.query.episodes import Neighbours, num_tokens, rewards_of
from rlsys.dashboard.query.rollout_files import RolloutFiles
from rlsys.dashboard.responses import GroupRow, GroupsAnswer, TaskAnswer, TaskPoint
from rlsys.replay.rollout_json import RolloutRecord
from rlsys.types import OutcomeKind


class ScoredGroup(NamedTuple):
    """Group with a reward."""

    step: int
    group_id: int
    task_id: str
    reward: float
    """Mean of its episodes."""


@dataclass
class Lists:
    """Lists of one run. Rows are built from events, which cover every step. If events lack groups, rows are built from
    rollout files, which may skip steps."""

    groups: Groups
    rollouts: RolloutFiles
    _from_file: tuple[int, Sequence[GroupRow]] = (-1, ())
    """Last step read from a file, and its rows."""

    def step(self, step: int | None) -> GroupsAnswer:
        """Build a `GroupsAnswer`. Raises `NoSuch`."""
        steps = sorted({*self.groups.by_step, *self.rollouts.steps()})
        shown = step if step is not None else (steps[-1] if steps else None)
        if shown is not None and shown not in steps:
            known = f"those from {steps[0]} to {steps[-1]} did" if steps else "none has so far"
            raise NoSuch(f"step {shown} has trained no group, {known}")
        at = shown if shown is not None else 0
        before, after = bisect_left(steps, at), bisect_right(steps, at)
        return GroupsAnswer(
            step=shown,
            previous_step=steps[before - 1] if before else None,
            next_step=steps[after] if after < len(steps) else None,
            first_step=steps[0] if steps else None,
            last_step=steps[-1] if steps else None,
            groups=() if shown is None else self._rows(shown),
        )

    def beside(self, step: int, group_id: int) -> Neighbours:
        """Neighbours of a group in its step."""
        return neighbours(self._group_ids(step), group_id)

    def task(self, task_id: str) -> TaskAnswer:
        """One task over time. Raises `NoSuch`."""
        found = self._of_task(task_id)
        if not found:
            raise NoSuch(
                f"no group of task {task_id!r:.200} was told of; the table `tasks` lists those that were trained"
            )
        written = set(self.rollouts.steps())
        return TaskAnswer(task_id, [_point(facts, facts.step in written) for facts in found])

    def scored_groups(self) -> Iterator[ScoredGroup]:
        """Groups with a reward, of all steps whose rollouts were written."""
        for step in self.rollouts.steps():
            for row in self._rows(step):
                if row.reward_mean is not None:
                    yield ScoredGroup(step, row.group_id, row.task_id, row.reward_mean)

    def _group_ids(self, step: int) -> Sequence[int]:
        """Group ids in the order of the batch."""
        return self.groups.by_step.get(step) or self.rollouts.group_ids(step)

    def _rows(self, step: int) -> Sequence[GroupRow]:
        facts = [self.groups.by_group_id.get(group_id) for group_id in self.groups.by_step.get(step, ())]
        is_written = step in self.rollouts.steps()
        rows = [_row(known, known.rewards, step, is_written) for known in facts if known and known.rewards]
        if not is_written or (rows and len(rows) == len(facts)):
            return rows
        if self._from_file[0] != step:
            self._from_file = (step, [row_of(record) for record in self.rollouts.records(step)])
        return self._from_file[1]

    def _of_task(self, task_id: str) -> list[GroupFacts]:
        group_ids = self.groups.by_task.get(task_id, ())
        return [self.groups.by_group_id[s] for s in group_ids if s not in self.groups.forgotten]


def neighbours(group_ids: Sequence[int], group_id: int) -> Neighbours:
    """Return the neighbours of a group among these; none if it is not among them."""
    if group_id not in group_ids:
        return Neighbours(None, None)
    at = group_ids.index(group_id)
    return Neighbours(group_ids[at - 1] if at else None, group_ids[at + 1] if at + 1 < len(group_ids) else None)


def _row(facts: GroupFacts, rewards: RewardRange, step: int, is_written: bool) -> GroupRow:
    return GroupRow(
        group_id=facts.group_id,
        task_id=facts.task_id,
        replica=facts.where,
        num_episodes=rewards.num_episodes,
        num_failed=rewards.num_failed,
        num_truncated=facts.num_truncated,
        reward_mean=rewards.mean,
        reward_min=rewards.min,
        reward_max=rewards.max,
        is_zero_std=rewards.is_zero_std,
        length_mean=facts.length_mean,
        staleness=None if facts.oldest is None else max(0, step - 1 - facts.oldest),
        has_rollouts=is_written,
    )


def row_of(record: RolloutRecord) -> GroupRow:
    """Row of a recorded group, of a step or of an evaluation, whose staleness is 0."""
    rewards = rewards_of(record)
    roots = [episode.trajectories[0] for episode in record.episodes]
    versions = [s.version for e in record.episodes for t in e.trajectories for turn in t.turns for s in turn.versions]
    return GroupRow(
        group_id=record.key.group_id,
        task_id=record.task.id,
        replica=record.replica,
        num_episodes=rewards.num_episodes,
        num_failed=rewards.num_failed,
        num_truncated=sum(root.outcome.kind is OutcomeKind.TRUNCATED for root in roots),
        reward_mean=rewards.mean,
        reward_min=rewards.min,
        reward_max=rewards.max,
        is_zero_std=rewards.is_zero_std,
        length_mean=fmean(map(num_tokens, record.episodes)),
        staleness=max(0, record.step - 1 - min(versions)) if versions else None,
        has_rollouts=True,
    )


def _point(facts: GroupFacts, has_rollouts: bool) -> TaskPoint:
    rewards = facts.rewards
    fate: Literal["trained", "pending", "dropped"] = "pending" if facts.state in PENDING else "dropped"
    return TaskPoint(
        group_id=facts.group_id,
        step=facts.step,
        fate="trained" if facts.step is not None else fate,
        reason=facts.reason if facts.state == "dropped" else "",
        reward_mean=rewards.mean if rewards else None,
        reward_min=rewards.min if rewards else None,
        reward_max=rewards.max if rewards else None,
        num_episodes=rewards.num_episodes if rewards else facts.size,
        length_mean=facts.length_mean,
        has_rollouts=has_rollouts,
    )
