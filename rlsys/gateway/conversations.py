"""Choice of the agent for each request: the conversations of a session, as a tree of messages.

A client sends the whole conversation each time. Each agent's turns are one unbroken run of tokens. Branches share their
common prefix, which is trained once, with the agent that sampled it.

| the request's messages | agent that replies |
| --- | --- |
| extend an agent's last reply | that agent: its tokens so far, then those of the new messages |
| extend an earlier reply, or one that another request extends or repeats | a fork of that agent |
| extend no earlier reply | a new agent; the messages are its prompt |

Further choices of a request (`n`) are replies of further agents, from the same place. A completion of plain text is a
reply of a new agent.

Whitespace around a reply is ignored, since clients strip it: the agent continues from the tokens that it sampled. Tools
are ignored too, and may change with every request: `Agent.act` describes new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import orjson

from rlsys.agents.agent import Agent, Context, Tell
from rlsys.agents.session import Session
from rlsys.agents.tool_calls import message_of
from rlsys.errors import ConfigError, first_of
from rlsys.gateway.answers import Choice, Refused, without_stop
from rlsys.gateway.chat_completions import ChatRequest
from rlsys.gateway.completions import CompletionRequest
from rlsys.types import Json, Message

TellChoice: TypeAlias = Callable[[int, str], None]
"""Takes the number of a choice and its text so far, see `rlsys.agents.agent.Tell`."""


@dataclass(slots=True)
class _Node:
    """Node of the tree, after the messages on the path to it."""

    after: dict[bytes, _Node] = field(default_factory=dict)
    """Children, by the key of the next message."""
    idle: list[Agent] = field(default_factory=list)
    """Agents whose context ends here, without a request in progress."""
    said_by: tuple[Agent, Context] | None = None
    """Agent that sampled the last message, and its context then; None for other messages."""

    @property
    def is_reached(self) -> bool:
        return self.said_by is not None or bool(self.idle)


class Conversations:
    """Conversations of one session through the gateway."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last_speaker: Agent | None = None
        """Agent of the last reply; None before the first."""
        self._roots: dict[str, _Node] = {}
        """Trees by the requested model."""

    async def reply(self, asked: ChatRequest | CompletionRequest, tell: TellChoice | None = None) -> tuple[Choice, ...]:
        """Sample and record the replies to a request, all of them or none. `tell` gets their text meanwhile.

        Raises `Refused` for an agent without a policy, and the errors of `Agent.act`. After an error or a cancellation
        the agents' contexts are unchanged.
        """
        if isinstance(asked, CompletionRequest):
            return await self._completions(asked, tell)
        place, num_said = self._place(asked)
        new = asked.prompt[num_said:]
        agents = [self._speaker(place, asked.model) for _ in range(asked.n or 1)]
        try:
            choices = await _all_or_none(
                agents, [self._choice(agent, new, asked, _of(tell, i)) for i, agent in enumerate(agents)]
            )
        except BaseException:
            place.idle += agents
            raise
        for agent, choice in zip(agents, choices, strict=True):
            node = place
            for message in (*new, choice.message):
                node = node.after.setdefault(_key(message), _Node())
            node.idle.append(agent)
            node.said_by = (agent, agent.context)
        self.last_speaker = agents[0]
        return choices

    async def _choice(self, agent: Agent, new: tuple[Message, ...], asked: ChatRequest, tell: Tell | None) -> Choice:
        reply = await agent.act(
            new or None,
            asked.toolbox,
            max_new_tokens=asked.max_new_tokens,
            stop=asked.ends,
            begin=asked.begin,
            tell=tell,
        )
        turn = agent.turns[-1]
        text = reply.text.removesuffix(turn.text) + without_stop(turn.text, asked.stop)
        plain = Message(role="assistant", content=text)
        return Choice(turn, message_of(text, f"call_{agent.index}_{len(agent.turns) - 1}") if asked.may_call else plain)

    async def _completions(self, asked: CompletionRequest, tell: TellChoice | None) -> tuple[Choice, ...]:
        agents = [self._speaker(_Node(), asked.model) for _ in range(asked.num_choices)]
        policy = self.session.policies[agents[0].policy_name]
        for prompt in asked.prompt:
            if not isinstance(prompt, str):
                policy.check_ids(prompt)
        work = []
        for index, agent in enumerate(agents):
            prompt = asked.prompt[index // (asked.n or 1)]
            agent.context = Context(unread=prompt) if isinstance(prompt, str) else Context(ids=prompt)
            work.append(self._completion(agent, asked, _of(tell, index)))
        choices = await _all_or_none(agents, work)
        self.last_speaker = agents[0]
        return choices

    @staticmethod
    async def _completion(agent: Agent, asked: CompletionRequest, tell: Tell | None) -> Choice:
        text = await agent.chat(None, max_new_tokens=asked.max_new_tokens, stop=asked.stop, tell=tell)
        return Choice(agent.turns[-1], Message(role="assistant", content=without_stop(text, asked.stop)))

    def _place(self, asked: ChatRequest) -> tuple[_Node, int]:
        """Find the deepest node that the request extends, and the number of its messages up to there."""
        root = node = self._roots.setdefault(asked.model, _Node())
        found, num_said = root, 0
        for number, message in enumerate(asked.prompt, 1):
            if (node := node.after.get(_key(message))) is None:
                break
            if node.is_reached:
                found, num_said = node, number
        return found, num_said

    def _speaker(self, place: _Node, model: str) -> Agent:
        if place.idle:
            return place.idle.pop()
        if place.said_by is not None:
            agent, context = place.said_by
            return agent.fork(at=context)
        agents = self.session.agents
        try:
            return self.session.agent(model, parent=agents[0] if agents else None)
        except ConfigError as error:
            raise Refused(404, str(error), code="model_not_found", param="model") from None


def _of(tell: TellChoice | None, index: int) -> Tell | None:
    return partial(tell, index) if tell else None


async def _all_or_none(agents: Sequence[Agent], work: Sequence[Coroutine[Any, Any, Choice]]) -> tuple[Choice, ...]:
    """Return the choices of all agents. The first error cancels the others, and no agent has said anything."""
    before = [(agent.context, len(agent.turns)) for agent in agents]
    choices: tuple[Choice, ...] = ()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
        choices = tuple(task.result() for task in tasks)
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        if not choices:
            for agent, (context, num_turns) in zip(agents, before, strict=True):
                agent.context = context
                del agent.turns[num_turns:]
    return choices


def _key(message: Message) -> bytes:
    """Key that is equal for equivalent messages, however the client formats the arguments of a call."""
    calls = [_call_key(call) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    parts = [message["role"], content, calls, message.get("tool_call_id"), message.get("name")]
    return orjson.dumps(parts)


def _call_key(call: Json) -> list[Json]:
    assert isinstance(call, dict)
    function = call["function"]
    assert isinstance(function, dict)
    arguments = str(function["arguments"])
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):  # unchanged if not JSON, or too deep
        arguments = orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    return [call["id"], function["name"], arguments]
