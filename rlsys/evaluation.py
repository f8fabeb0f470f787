"""Measure a policy on tasks: the same rollouts and rewards as in training, without a learner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev

from rlsys.contracts import Rewards, Rollouts
from rlsys.errors import RlsysError, TaskTooLong
from rlsys.seeds import group_seed
from rlsys.types import Assignment, Group, OutcomeKind, Task


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation came to."""

    num_tasks: int
    """Tasks with at least one judged sample."""
    samples: int
    """Samples per task."""
    mean: float
    """Mean over tasks of the mean reward of their samples."""
    mean_ci95: float
    """Half width of the mean's 95 % confidence interval over tasks (normal approximation)."""
    best: float
    """Mean over tasks of the best reward among their samples."""
    truncated_frac: float
    """Share of samples cut at the token limit."""
    length_mean: float
    """Tokens sampled per episode."""
    failed_frac: float
    """Share of samples that could not be judged; they count in nothing else."""
    num_too_long: int
    """Tasks left out because their prompt exceeds the limit."""

    def as_json(self) -> dict[str, object]:
        """One JSON object, as the command line prints it."""
        return asdict(self)


async def evaluate(
    rollouts: Rollouts, rewards: Rewards, tasks: Sequence[Task], *, samples: int, seed: int, max_open: int
) -> EvalResult:
    """Sample every task `samples` times, at most `max_open` tasks at once, and judge.

    Raises whatever ends a rollout except a prompt over the limit, which is counted; and `RlsysError` if nothing was
    judged.
    """
    room = asyncio.Semaphore(max_open)

    async def one(serial: int, task: Task) -> Group | None:
        async with room:
            try:
                rolled_out = await rollouts.run(Assignment(serial, task, samples, 0, group_seed(seed, serial)))
            except TaskTooLong:
                return None
            judged = await rewards.score(task, rolled_out.group)
            return rolled_out.group.with_scores(judged.scores)

    groups = await asyncio.gather(*(one(serial, task) for serial, task in enumerate(tasks)))
    return _summary([g for g in groups if g is not None], samples, num_too_long=sum(g is None for g in groups))


def _summary(groups: Sequence[Group], samples: int, *, num_too_long: int) -> EvalResult:
    by_task = [[t.reward for (_, i), t in g.trajectories() if i == 0 and t.reward is not None] for g in groups]
    judged = [rewards for rewards in by_task if rewards]
    if not judged:
        reasons = [t.outcome.reason for g in groups for e in g.episodes for t in e.trajectories if t.outcome.is_failed]
        raise RlsysError(
            f"no sample could be judged: {reasons[0] if reasons else f'{num_too_long} prompts are too long'}"
        )
    means = [fmean(rewards) for rewards in judged]
    trajectories = [t for g in groups for _, t in g.trajectories()]
    return EvalResult(
        num_tasks=len(judged),
        samples=samples,
        mean=fmean(means),
        mean_ci95=1.96 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else float("inf"),
        best=fmean(max(rewards) for rewards in judged),
        truncated_frac=fmean(t.outcome.kind is OutcomeKind.TRUNCATED for t in trajectories),
        length_mean=fmean(sum(s.num_trained for s in t.samples) for t in trajectories),
        failed_frac=1 - sum(map(len, judged)) / (samples * len(groups)),
        num_too_long=num_too_long,
    )
