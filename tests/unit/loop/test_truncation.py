"""Groups in which every reply is cut by length, for an algorithm that leaves those out."""

from __future__ import annotations

import asyncio

import pytest

from algorithms.grpo import GRPO
from rlsys.config.run_sections import LimitsSection
from rlsys.errors import AllTruncated, RunAborted
from rlsys.loop.curation import check_teaches
from rlsys.loop.failure_policy import TRUNCATED_STEPS, DroppedGroups, FailurePolicy, GivenUp
from rlsys.types import TRUNCATED
from tests.groups import episode, group, queue_of

MASKING = GRPO(group_size=2, mask_truncated=True)
CUT = [episode(1.0, TRUNCATED), episode(0.0, TRUNCATED)]


def test_the_length_is_named_and_not_the_rewards() -> None:
    with pytest.raises(AllTruncated, match=r"every reply was cut by length.* raise rollout\.max_new_tokens, or set it"):
        check_teaches(group(0, episodes=CUT), MASKING)
    check_teaches(group(0, episodes=CUT), GRPO(group_size=2))
    check_teaches(group(0, episodes=[*CUT, episode(1.0), episode(0.0)]), MASKING)


def test_ten_steps_of_them_one_after_the_other_end_the_run() -> None:
    queue = queue_of(groups_per_step=2, max_staleness=30)
    dropped = DroppedGroups(queue, FailurePolicy(LimitsSection()))

    async def give_up_all() -> None:
        for is_trained in (False, True):
            if is_trained:
                dropped.on_group_scored()
            for _ in range(2 * TRUNCATED_STEPS - 1):
                error = AllTruncated("cut")
                reason = dropped.decide(error, 1)
                assert reason == "zero_advantage"
                async with queue.permit() as permit:
                    dropped.give_up(queue.start_rollout(permit), GivenUp(reason, error))

    asyncio.run(give_up_all())
    with pytest.raises(RunAborted, match="nothing was trained of 20 groups one after the other; the last: cut"):
        dropped.decide(AllTruncated("cut"), 1)
