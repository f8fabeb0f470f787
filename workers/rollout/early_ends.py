"""Early ends: episodes that would add nothing to their group are not played to their end.

A group is settled once a share of its episodes has ended, all with the same reward. Each of the others then goes on
with a probability, and stands for all of them by its weight: see `algorithms.policy_gradient.EarlyEnds` for why nothing
is biased. Which of them go on depends on the seed of the group, and on nothing that they have said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from typing import Protocol

from rlsys.rewards.reward_function import known_score
from rlsys.types import Assignment, Episode, Score, Task


class EpisodeJudge(Protocol):
    """Scores ended episodes where they are played; its processes end with `close`."""

    async def score(self, task: Task, episodes: tuple[Episode, ...]) -> tuple[Score, ...]:
        """Return one score per episode, in order."""

    async def start(self) -> None:
        """Start its processes. Without this call, the first `score` does."""

    async def close(self) -> None:
        """End its processes."""


@dataclass
class GroupEnds:
    """Ends episodes early once their group is settled."""

    after: float = 0.5
    """Share of the episodes that must have ended, two at least."""
    keep: float = 0.25
    """Probability with which each of the others goes on."""
    judge: EpisodeJudge | None = None
    """None: only rewards of workflows are known."""

    async def watch(
        self, assignment: Assignment, tasks: Sequence[asyncio.Task[Episode]]
    ) -> tuple[tuple[Episode, ...], float | None]:
        """Return the episodes of `tasks`, of which some may be cancelled, and the reward of those that had ended then;
        None if none was cancelled.

        Waits for one episode after the other; unblocked by their ends. Raises the first error of an episode.
        """
        rewards: dict[int, float] = {}
        numbers = {task: number for number, task in enumerate(tasks)}
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                reward = await self._reward(assignment.task, task.result())
                if reward is None:
                    return await _all(tasks)
                rewards[numbers[task]] = reward
            if len(set(rewards.values())) > 1:
                return await _all(tasks)
            if len(rewards) >= max(2, ceil(self.after * len(tasks))):
                break
        running = {task for task in waiting if not task.done()}
        if not running:
            return await _all(tasks)
        ended = {task for task in running if not self._goes_on(assignment, numbers[task])}
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)
        weights = {task: 1 / self.keep if task in running else 1.0 for task in tasks if task not in ended}
        episodes = [replace(await task, weight=weight) for task, weight in weights.items()]
        return tuple(episodes), next(iter(rewards.values()))

    def _goes_on(self, assignment: Assignment, number: int) -> bool:
        return Random(f"{assignment.seed} {number} end").random() < self.keep

    async def close(self) -> None:
        if self.judge is not None:
            await self.judge.close()

    async def _reward(self, task: Task, episode: Episode) -> float | None:
        """Reward of an ended episode; None if it failed, or cannot be known here."""
        score = known_score(episode)
        if score is None and self.judge is not None:
            (score,) = await self.judge.score(task, (episode,))
        return None if score is None else score.value


async def _all(tasks: Sequence[asyncio.Task[Episode]]) -> tuple[tuple[Episode, ...], None]:
    return tuple([await task for task in tasks]), None
