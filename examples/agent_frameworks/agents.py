"""Sort six digits with an agent of a framework, as its own documentation shows. Nothing here knows of rlsys."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_THREADS = ThreadPoolExecutor(4, "smolagents")
"""Threads of agents that block. They share one interpreter with the endpoint, which waits for each of them in turn."""


async def with_openai_agents(prompt: str, base_url: str, api_key: str, model: str) -> float:
    """Return the reward of one run of an `agents.Agent`: 1 for the sorted digits."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(disabled=True)
    client = _anywhere().with_options(base_url=base_url, api_key=api_key)
    agent = Agent("sorter", instructions="Sort the digits.", model=OpenAIChatCompletionsModel(model, client))
    result = await Runner.run(agent, prompt, max_turns=1)
    return reward(prompt, str(result.final_output))


async def with_smolagents(prompt: str, base_url: str, api_key: str, model: str) -> float:
    """Return the reward of one run of a `smolagents.CodeAgent`, whose answer is Python code that it runs itself."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _run_code, prompt, base_url, api_key, model)


def reward(prompt: str, answer: str) -> float:
    """1 for the digits of a prompt in order, else 0."""
    return float(answer == "".join(sorted(prompt.removesuffix(">"))))


def _run_code(prompt: str, base_url: str, api_key: str, model: str) -> float:
    from smolagents import CodeAgent, OpenAIModel

    agent = CodeAgent([], OpenAIModel(model, api_base=base_url, api_key=api_key), max_steps=1, verbosity_level=0)
    return reward(prompt, str(agent.run(prompt)))


@cache
def _anywhere() -> AsyncOpenAI:
    """Shared client: creating one takes 20 ms, while `with_options` copies it in no time."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")
