"""Files of rollouts made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.replay.rollout_log import RolloutRecord, write_rollouts
from rlsys.types import Episode, Message, Outcome, OutcomeKind, Task, Trajectory, Turn, VersionSpan


def said(text: str, num_tokens: int) -> Turn:
    """A turn."""
    return Turn(
        prompt_ids=(1,),
        output_ids=(5,) * num_tokens,
        logprobs=(-0.5,) * num_tokens,
        versions=(VersionSpan(0, num_tokens),),
        finish="stop",
        text=text,
    )


def rollouts(path: Path, rewards: Sequence[float | None], step: int = 10) -> Path:
    """A file of rollouts: two episodes a group, one turn each."""

    def episode(reward: float | None) -> Episode:
        turn = said(f"it is {reward}", 2)
        outcome = Outcome(OutcomeKind.OK) if reward is not None else Outcome(OutcomeKind.FAILED, "no judge")
        return Episode((Trajectory("policy", (turn,), outcome, reward),))

    def record(group_id: int) -> RolloutRecord:
        prompt = (Message(role="user", content="1 + 1?"),) if group_id else "2 + 2?"
        task = Task(id=f"t{group_id}", prompt=prompt)
        pair = tuple(map(episode, rewards[2 * group_id : 2 * group_id + 2]))
        return RolloutRecord(step, group_id, task, "rollout-0", 0, pair, (TrajectoryAdvantage(1, 0, 0.5),), ({}, {}))

    write_rollouts(path, map(record, range(len(rewards) // 2)))
    return path
