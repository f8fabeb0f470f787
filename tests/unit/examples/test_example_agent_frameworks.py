"""The agents of `examples/agent_frameworks`: their rewards, and what the policy reads of them."""

from __future__ import annotations

import asyncio

import pytest

from examples.agent_frameworks.prepare import CODE, END, TEMPLATE, written
from examples.tiny_policy import build_tokenizer
from rlsys.config import Config
from rlsys.testing import ScriptedPolicy
from rlsys.types import POLICY, Task
from rlsys.workflows.openai_agent import OpenAIAgent
from workers.text.tokenizer import TextTokenizer

TASK = Task(id="sort", prompt="312>", answer="123")


@pytest.mark.parametrize("framework", ["openai_agents", "smolagents"])
def test_sorted_digits_are_rewarded(framework: str):
    workflow = OpenAIAgent(agent=f"examples.agent_frameworks.agents:with_{framework}")

    async def reward_of(digits: str) -> float | None:
        reply = f"{CODE}{digits}{END}" if framework == "smolagents" else digits
        policy = ScriptedPolicy(lambda prompt: reply)
        return (await workflow.play(workflow.session(TASK, {POLICY: policy}, 1, 0, {}))).trajectories[0].reward

    async def main() -> list[float | None]:
        return [await reward_of("123"), await reward_of("321")]

    assert asyncio.run(main()) == [1.0, 0.0]


def test_the_policy_reads_the_task_alone_as_in_its_warm_start():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["New task:\n", CODE, END])
    tokenizer.chat_template = TEMPLATE
    codec = TextTokenizer(tokenizer)
    asked = ({"role": "system", "content": "Call me, in German: ä"}, {"role": "user", "content": "New task:\n312>"})
    demonstration = codec.encode(written("312>123<eos>", in_code=True))
    assert demonstration[: len(codec.encode(asked))] == codec.encode(asked)
    assert codec.spell(demonstration) == f"New task:\n312>{CODE}123{END}<eos>"


def test_its_configuration_is_read():
    workflow = Config.load("examples/agent_frameworks/run.yaml").rollout.workflow
    assert isinstance(workflow, OpenAIAgent)
    assert workflow.agent == "examples.agent_frameworks.agents:with_openai_agents"
