"""Choice of the agent for each request: the conversations of a session, as a tree of messages.

A client sends the whole conversation each time. Each agent's turns are one unbroken run of tokens. Branches share their
common prefix, which is trained once, with the agent that sampled it.

| the request's messages | agent that replies |
| --- | --- |
| extend an agent's last reply | that agent: its tokens so far, then those of the new messages |
| extend an earlier reply, or one that another request extends or repeats | a fork of that agent |
| extend no earlier reply | a new agent; the messages are its prompt |

Whitespace around a reply is ignored, since clients strip it: the agent continues from the tokens that it sampled. Tools
are ignored too, and may change with every request: `Agent.act` describes new ones.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from rlsys.agents.agent import Agent, Context
from rlsys.agents.gateway.chat_completions import ChatReply, ChatRequest, Refused, without_stop
from rlsys.agents.session import Session
from rlsys.agents.tool_calls import message_of
from rlsys.errors import ConfigError
from rlsys.types import Json, Message


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

    async def reply(self, asked: ChatRequest) -> ChatReply:
        """Sample and record the reply to a request.

        Raises `Refused` for an agent without a policy, and the errors of `Agent.act`. After an error or a cancellation
        the agent's context is unchanged.
        """
        place, num_said = self._place(asked)
        agent = self._speaker(place, asked)
        new = asked.prompt[num_said:]
        try:
            reply = await agent.act(new or None, asked.toolbox, max_new_tokens=asked.max_new_tokens, stop=asked.stop)
        except BaseException:
            place.idle.append(agent)
            raise
        number = len(agent.turns) - 1
        text = without_stop(reply.text, asked.stop)
        said = Message(role="assistant", content=text)
        if asked.may_call:
            said = message_of(text, f"call_{agent.index}_{number}")
        for message in (*new, said):
            place = place.after.setdefault(_key(message), _Node())
        place.idle.append(agent)
        place.said_by = (agent, agent.context)
        self.last_speaker = agent
        return ChatReply(f"chatcmpl-{agent.index}-{number}", asked, agent.turns[-1], said)

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

    def _speaker(self, place: _Node, asked: ChatRequest) -> Agent:
        if place.idle:
            return place.idle.pop()
        if place.said_by is not None:
            agent, context = place.said_by
            return agent.fork(at=context)
        agents = self.session.agents
        try:
            return self.session.agent(asked.model, parent=agents[0] if agents else None)
        except ConfigError as error:
            raise Refused(404, str(error), code="model_not_found", param="model") from None


def _key(message: Message) -> bytes:
    """Key that is equal for equivalent messages, however the client formats the arguments of a call."""
    calls = [_told(call) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    told = [message["role"], content, calls, message.get("tool_call_id"), message.get("name")]
    return orjson.dumps(told)


def _told(call: Json) -> list[Json]:
    assert isinstance(call, dict)
    function = call["function"]
    assert isinstance(function, dict)
    arguments = str(function["arguments"])
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):  # unchanged if not JSON, or too deep
        arguments = orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    return [call["id"], function["name"], arguments]
