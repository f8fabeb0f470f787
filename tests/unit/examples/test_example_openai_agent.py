"""The agent of `examples/openai_agent`: its reward, and one sample for its two questions."""

from __future__ import annotations

import asyncio

from examples.openai_agent.prepare import TEMPLATE
from examples.tiny_policy import EOS, build_tokenizer
from rlsys.batch.samples import samples_of
from rlsys.config import Config
from rlsys.testing import ScriptedPolicy
from rlsys.types import POLICY, Message, Task
from rlsys.workflows.openai_agent import OpenAIAgent
from workers.text.tokenizer import TextTokenizer

TASK = Task(id="sort", prompt="312>", answer="123")
WORKFLOW = OpenAIAgent(agent="examples.openai_agent.agent:solve")


def test_a_right_answer_is_worth_more_at_once():
    async def worth(right_at: int) -> float | None:
        policy = ScriptedPolicy(lambda prompt: "123" if prompt.count("<user>") == right_at else "321")
        episode = await WORKFLOW.play(WORKFLOW.session(TASK, {POLICY: policy}, 1, 0, {}))
        (trajectory,) = episode.trajectories
        assert len(list(samples_of(trajectory))) == 1
        return trajectory.reward

    async def main() -> list[float | None]:
        return [await worth(right_at) for right_at in (1, 2, 3)]

    assert asyncio.run(main()) == [1.0, 0.5, 0.0]


def test_the_template_is_what_the_policy_was_warm_started_on():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    codec = TextTokenizer(tokenizer)
    asked = codec.encode(({"role": "user", "content": "312>"},))
    assert asked == codec.encode("312>")
    said = (Message(role="user", content="312>"), Message(role="assistant", content="321"))
    ids = asked + codec.reply("321")
    assert codec.extend(ids, said, ({"role": "user", "content": "312>"},)) == codec.encode(f"312>321{EOS}312>")


def test_its_configuration_is_read():
    workflow = Config.load("examples/openai_agent/run.yaml").rollout.workflow
    assert isinstance(workflow, OpenAIAgent) and workflow.agent == WORKFLOW.agent
