"""Session workers that score their own groups, without a reward worker."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.errors import RunAborted
from rlsys.rewards.reward_function import RewardSpec
from rlsys.types import Task
from tests.groups import group
from tests.replicas import assignment, own_tokens, played, scripted, worker_of
from workers.reward.replica_rewards import ReplicaRewards
from workers.reward.reward_worker import RewardWorker

pytestmark = pytest.mark.slow

SIX = RewardSpec(f"{__name__}:is_of_six", "six")


def is_of_six(completion: str) -> float:
    return float(len(completion) == 6)


def test_a_group_comes_with_its_scores_and_the_driver_reads_them():
    worker = worker_of(None, scripted("rollout-0", own_tokens), judge=RewardWorker([SIX], 1, 20.0, name="session-0"))

    async def scenario() -> None:
        done, episodes = await worker.run(assignment(size=3))
        assert done[0].scores is not None
        assert [score.value for score in done[0].scores] == [1.0] * len(episodes)
        scored = await ReplicaRewards().score(Task(id="t", prompt="p"), done[0])
        whole = done[0].with_scores(scored.scores)
        assert whole.rewards() == {0: 1.0, 1: 1.0, 2: 1.0} and whole.scores is None

    played([worker], scenario)


def test_a_group_without_scores_is_refused():
    with pytest.raises(RunAborted, match=r"set reward\.workers to 1"):
        asyncio.run(ReplicaRewards().score(Task(id="t", prompt="p"), group(0)))
