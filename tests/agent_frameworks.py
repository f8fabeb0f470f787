"""An agent with a tool in each framework, written as its own documentation shows: `NAME(prompt, base_url, api_key)`.

The frameworks are imported in the functions: a start takes seconds. None of them may call home.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from pydantic import BaseModel

from tests.gateways import WEATHER

MODEL = "policy"
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}


def weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: Name of the city.
    """
    return f"It rains in {city}."


class City(BaseModel):
    """A city."""

    name: str


async def openai_client(prompt: str, base_url: str, api_key: str) -> str:
    from openai import AsyncOpenAI, pydantic_function_tool

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": prompt}]

        class weather_in(BaseModel):  # noqa: N801  (the name of the tool)
            """Tell the weather in a city."""

            city: str

        tools = [pydantic_function_tool(weather_in, name="weather")]
        reply = await client.chat.completions.parse(model=MODEL, messages=messages, tools=tools)
        said = reply.choices[0].message
        call = (said.tool_calls or [None])[0]
        assert call is not None and isinstance(call.function.parsed_arguments, weather_in)
        result = weather(call.function.parsed_arguments.city)
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": result}]
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            return (await stream.get_final_completion()).choices[0].message.content or ""


async def openai_agents(prompt: str, base_url: str, api_key: str) -> str:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        model = OpenAIResponsesModel(MODEL, client)
        agent = Agent("weather", instructions="Use the tool.", model=model, tools=[function_tool(weather)])
        streamed = Runner.run_streamed(agent, prompt)
        async for _ in streamed.stream_events():
            pass
        whole = await Runner.run(agent, prompt)
        assert whole.final_output == streamed.final_output
        return str(whole.final_output)


async def langgraph(prompt: str, base_url: str, api_key: str) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
    from pydantic import SecretStr

    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=SecretStr(api_key), max_retries=0)
    tools = [tool(weather)]

    async def ask(state: MessagesState) -> Any:
        return {"messages": [await model.bind_tools(tools).ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)  # type: ignore[bad-specialization]
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    asked: Any = {"messages": [("user", prompt)]}
    return str((await graph.compile().ainvoke(asked))["messages"][-1].content)


async def pydantic_ai(prompt: str, base_url: str, api_key: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), instructions="Use the tool.", tools=[weather])
    async with agent.run_stream(prompt) as streamed:
        return await streamed.get_output()


async def pydantic_ai_typed(prompt: str, base_url: str, api_key: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=City)
    return (await agent.run(prompt)).output.name


async def smolagents(prompt: str, base_url: str, api_key: str) -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    def run() -> str:
        model = OpenAIModel(MODEL, api_base=base_url, api_key=api_key)
        agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=3, verbosity_level=0)
        return str(agent.run(prompt))

    return await asyncio.to_thread(run)


async def smolagents_code(prompt: str, base_url: str, api_key: str) -> str:
    from smolagents import CodeAgent, OpenAIModel, tool

    def run() -> str:
        model = OpenAIModel(MODEL, api_base=base_url, api_key=api_key)
        agent = CodeAgent(tools=[tool(weather)], model=model, max_steps=3, verbosity_level=0)
        return str(agent.run(prompt))

    return await asyncio.to_thread(run)


async def litellm(prompt: str, base_url: str, api_key: str) -> str:
    import litellm as library

    at = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": api_key, "max_retries": 0}
    messages: list[Any] = [{"role": "user", "content": prompt}]
    reply: Any = await library.acompletion(messages=messages, tools=[WEATHER], **at)
    said = reply.choices[0].message
    (call,) = said.tool_calls
    messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": weather("Oslo")}]
    stream: Any = await library.acompletion(messages=messages, tools=[WEATHER], stream=True, **at)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def instructor(prompt: str, base_url: str, api_key: str) -> str:
    import instructor as library
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as plain:
        client = library.from_openai(plain, mode=library.Mode.TOOLS)
        asked: Any = [{"role": "user", "content": prompt}]
        city = await client.chat.completions.create(model=MODEL, messages=asked, response_model=City, max_retries=1)
        return city.name
