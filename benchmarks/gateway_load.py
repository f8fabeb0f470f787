"""Clients of the gateway in a separate process, for `benchmarks.agents`.

Each client has a session, and requests turn after turn of one conversation, then of the next. A turn takes 50 to 150
ms, and its text contains its duration, so that the extra time of every reply is known.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Literal, TypeAlias

from benchmarks.measure import answer_of
from rlsys.agents.gateway.gateway_server import shared_gateway
from rlsys.agents.workflow import Session
from rlsys.testing import ScriptedPolicy
from rlsys.types import POLICY, Message, Task, Turn, VersionSpan

NUM_TURNS = 8
SHORTEST_S, LONGEST_S = 0.05, 0.15
Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[str]]
"""Function from a conversation to the reply."""


@dataclass
class SlowPolicy(ScriptedPolicy):
    """Policy that sleeps and replies with its duration."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def sample(self, prompt_ids: tuple[int, ...], seed: int, max_new_tokens: int | None = None) -> Turn:
        began_s = time.perf_counter()
        await asyncio.sleep(self.chance.uniform(SHORTEST_S, LONGEST_S))
        text = f"{time.perf_counter() - began_s:.7f}"
        ids = tuple(map(ord, text))
        return Turn(prompt_ids, ids, (-1.0,) * len(ids), (VersionSpan(0, len(ids)),), "stop", text)


def overhead_of_gateway(client: Literal["raw", "openai"], num_clients: int, num_conversations: int) -> dict[str, float]:
    """Measure the extra milliseconds of a reply through the gateway over one inside the session."""
    return asyncio.run(_overhead(client, num_clients, num_conversations))


async def _overhead(client: str, num_clients: int, num_conversations: int) -> dict[str, float]:
    policy = SlowPolicy()
    sessions = [Session(Task(id=str(n), prompt=""), {POLICY: policy}, seed=n) for n in range(num_clients)]
    in_session = await asyncio.gather(*(_in_session(session, num_conversations) for session in sessions))
    direct = [ms for all_ms in in_session for ms in all_ms]
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(shared_gateway())
        endpoints = [await stack.enter_async_context(gateway.serve(session)) for session in sessions]
        where = json.dumps([[endpoint.base_url, endpoint.api_key] for endpoint in endpoints])
        command = [sys.executable, "-m", "benchmarks.gateway_load", client, str(num_conversations)]
        through = await asyncio.to_thread(answer_of, command, where)
    return {
        "overhead_ms": fmean(through) - fmean(direct),
        "overhead_p95_ms": quantiles(through, n=20)[-1] - quantiles(direct, n=20)[-1],
        "direct_ms": fmean(direct),
    }


async def _in_session(session: Session, num_conversations: int) -> list[float]:
    agents = iter([session.agent(POLICY) for _ in range(num_conversations)])
    agent = None

    async def ask(messages: Sequence[Message]) -> str:
        nonlocal agent
        agent = next(agents) if len(messages) == 1 else agent
        assert agent is not None
        return await agent.chat((messages[-1],))

    return await converse(ask, num_conversations)


async def converse(ask: Ask, num_conversations: int) -> list[float]:
    """Measure the milliseconds of every turn without those of the policy; the first conversation, which connects, does
    not count."""
    all_ms = []
    for number in range(num_conversations):
        said: list[Message] = []
        for turn in range(NUM_TURNS):
            said.append(Message(role="user", content=f"{number}.{turn}"))
            began_s = time.perf_counter()
            reply = await ask(said)
            all_ms.append(1000 * (time.perf_counter() - began_s - float(reply)))
            said.append(Message(role="assistant", content=reply))
    return all_ms[NUM_TURNS:]


# ---------------------------------------------------------------------------------------------- in a separate process


async def raw(num_conversations: int, base_url: str, api_key: str) -> list[float]:
    """Send HTTP by hand over one persistent connection."""
    host, path = base_url.removeprefix("http://").split("/", 1)
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"

    async def ask(messages: Sequence[Message]) -> str:
        body = json.dumps({"model": POLICY, "messages": messages}).encode()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert headers.startswith("http/1.1 200"), headers
        length = int(headers.split("content-length:")[1].split("\r\n")[0])
        return json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"]

    try:
        return await converse(ask, num_conversations)
    finally:
        writer.close()


async def openai(num_conversations: int, base_url: str, api_key: str) -> list[float]:
    """Send requests by the `openai` client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages: Sequence[Message]) -> str:
            reply = await client.chat.completions.create(model=POLICY, messages=[*messages])  # pyright: ignore
            return reply.choices[0].message.content or ""

        return await converse(ask, num_conversations)


async def _clients() -> None:
    client = {"raw": raw, "openai": openai}[sys.argv[1]]
    all_ms = await asyncio.gather(*(client(int(sys.argv[2]), *where) for where in json.load(sys.stdin)))
    print(json.dumps([ms for each in all_ms for ms in each]))


if __name__ == "__main__":
    asyncio.run(_clients())
