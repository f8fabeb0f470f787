"""Frameworks of agents as they are, against an endpoint: each calls a tool and replies, in one sample."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from rlsys.batch.samples import samples_of
from tests import agent_frameworks
from tests.gateways import Served, served, session_of

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def with_tool(prompt: str) -> str:
    return "It rains in Oslo, I am told." if "It rains in Oslo." in prompt else CALL


def with_final_answer(prompt: str) -> str:
    """The form of smolagents, which wants a call in every step: the endpoint has begun it."""
    say = call_of("final_answer", '{"answer": "It rains in Oslo, I am told."}')
    return (say if "Observation:\nIt rains" in prompt else CALL).removeprefix("<tool_call>\n")


def with_code(prompt: str) -> str:
    return 'Thought: ask.\n<code>\nfinal_answer(weather("Oslo") + " I am told.")\n</code> and so on'


def typed(prompt: str) -> str:
    """The arguments of a function that the client names or wants."""
    begun = re.search(r'"name": "(\w+)", "arguments": $', prompt)
    return '{"name": "Oslo"}}\n</tool_call>' if begun else '{"name": "final_result", "arguments": {"name": "Oslo"}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "reply", "expected"),
    [
        ("openai_client", with_tool, "It rains in Oslo, I am told."),
        ("openai_agents", with_tool, "It rains in Oslo, I am told."),
        ("langgraph", with_tool, "It rains in Oslo, I am told."),
        ("pydantic_ai", with_tool, "It rains in Oslo, I am told."),
        ("pydantic_ai_typed", typed, "Oslo"),
        ("smolagents", with_final_answer, "It rains in Oslo, I am told."),
        ("smolagents_code", with_code, "It rains in Oslo. I am told."),
        ("litellm", with_tool, "It rains in Oslo, I am told."),
        ("instructor", typed, "Oslo"),
    ],
)
def test_an_agent_of_a_framework_runs_as_it_is(framework: str, reply: Callable[[str], str], expected: str):
    async def scenario(here: Served) -> str:
        agent = getattr(agent_frameworks, framework)
        return await agent("What is the weather in Oslo?", here.endpoint.base_url, here.endpoint.api_key)

    session = session_of(reply)
    assert served(session, scenario) == expected
    for trajectory in session.episode().trajectories:
        assert len(list(samples_of(trajectory))) == 1, "a conversation goes on token for token"
    assert session.num_sampled > 0
