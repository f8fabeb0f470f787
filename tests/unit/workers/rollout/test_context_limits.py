"""The prompt of a task and the whole conversation have separate limits, each with its own outcome."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rlsys.agents.workflow import ContextFull, Session
from rlsys.errors import TaskTooLong
from rlsys.types import OutcomeKind, Task
from tests.replicas import policy_of, scripted, text_of


def session_of(*, max_prompt_tokens: int, max_context_tokens: int) -> Session:
    """A session with a policy whose replies have eight tokens."""
    text = replace(text_of(8), max_prompt_tokens=max_prompt_tokens, max_context_tokens=max_context_tokens)
    return Session(Task(id="t", prompt="12>"), {"policy": policy_of(text, scripted("0123"))}, seed=1)


def test_the_prompt_of_a_task_is_bounded_by_max_prompt_tokens():
    session = session_of(max_prompt_tokens=3, max_context_tokens=40)
    with pytest.raises(TaskTooLong, match=r"4 tokens, allowed are 1 to data\.max_prompt_tokens = 3"):
        asyncio.run(session.agent("solver").chat("123>"))


def test_later_turns_are_bounded_by_max_context_tokens():
    session = session_of(max_prompt_tokens=3, max_context_tokens=18)

    async def scenario() -> None:
        agent = session.agent("solver")
        for prompt in ("12>", "2"):  # 3 + 8 and 1 tokens: room for six more
            await agent.chat(prompt)
        assert [len(turn.output_ids) for turn in agent.turns] == [8, 6]
        with pytest.raises(ContextFull, match=r"19 tokens, allowed are 1 to 17, .*rollout\.max_context_tokens"):
            await agent.chat("1")

    asyncio.run(scenario())
    assert session.episode().trajectories[0].outcome.kind is OutcomeKind.TRUNCATED
