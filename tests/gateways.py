"""Sessions of a scripted policy behind a gateway, and the real client in front of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from openai import AsyncOpenAI

from rlsys.agents.agent import Policy, Tell
from rlsys.agents.session_budget import Budget
from rlsys.agents.workflow import Session
from rlsys.errors import DataError, TaskTooLong
from rlsys.gateway.gateway_server import Endpoint, Gateway, shared_gateway
from rlsys.testing import ScriptedPolicy
from rlsys.types import Message, Task, Turn

T = TypeVar("T")

TASK = Task(id="t", prompt="2+3?")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@dataclass
class Served:
    """A session that is served."""

    session: Session
    endpoint: Endpoint
    gateway: Gateway
    client: Any  # the openai client, whose types want literals
    http: aiohttp.ClientSession

    async def chat(self, *messages: Mapping[str, Any], **more: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=list(messages), **more)

    async def post(self, body: object, *, key: str | None = None, url: str | None = None) -> tuple[int, Any]:
        """Status and body, without the client's own checks and retries."""
        headers = {"Authorization": f"Bearer {self.endpoint.api_key if key is None else key}"}
        where = f"{url or self.endpoint.base_url}/chat/completions"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(where, headers=headers, data=data) as answer:
            return answer.status, await answer.json()


@dataclass
class HeldPolicy(ScriptedPolicy):
    """Replies once a test lets it, and says who was cancelled while it waited."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0
    num_cancelled: int = 0

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        self.num_waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_waiting -= 1
        return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)


@dataclass
class FailingPolicy(ScriptedPolicy):
    """Raises what it is told to, instead of a reply."""

    error: Exception = field(default_factory=RuntimeError)

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        raise self.error


@dataclass
class PickyPolicy(ScriptedPolicy):
    """Has no room for what says `long`, a template that does not take `odd`, and never replies to `slow`."""

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        asked = "".join(map(chr, prompt_ids))
        if "long" in asked:
            raise TaskTooLong("rollout-0", "encoding a prompt", "too many tokens")
        if "odd" in asked:
            raise DataError("the template takes no 'odd'")
        if "slow" in asked:
            await asyncio.Event().wait()
        return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def session_of(policy: Policy | Mapping[str, Policy] | Callable[[str], str], budget: Budget | None = None) -> Session:
    policies = policy if isinstance(policy, Mapping) else {"policy": _policy(policy)}
    return Session(TASK, policies, seed=1, budget=budget or Budget())


def _policy(policy: Policy | Callable[[str], str]) -> Policy:
    return ScriptedPolicy(policy) if callable(policy) else policy


def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    """One that does not try again."""
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0, timeout=10)


def served(session: Session, scenario: Callable[[Served], Awaitable[T]]) -> T:
    """What the scenario returns; nothing is open after it."""

    async def main() -> T:
        async with shared_gateway() as gateway, aiohttp.ClientSession() as http:
            async with gateway.serve(session) as endpoint, client_of(endpoint) as client:
                result = await scenario(Served(session, endpoint, gateway, client, http))
            assert not gateway.endpoints
        return result

    return asyncio.run(asyncio.wait_for(main(), 100))
