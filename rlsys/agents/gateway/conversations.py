"""Which agent a request is for: the conversations of a session, as the tree that their messages make.

A client sends the whole conversation each time. The agent whose context it extends goes on, token for token; one that
has gone on already, or is speaking at the moment, is forked there. So each agent's turns are one unbroken run of
tokens, branches share what came before them, and that is trained once, with the agent that said it.

| the request's messages | who answers |
| --- | --- |
| extend what an agent said last | that agent: the tokens so far, then those of the messages that are new |
| extend what an agent said before that, or is going on from now | a fork of it |
| extend nothing that was said here | another agent; the messages are its prompt |

Space around what an agent said does not count, since clients strip it: the agent goes on from what it did say. Nor do
the tools, which may be others with every request: `Agent.act` offers them where they are new.

Two requests at once that go on from the same place are no conflict, then: each is a branch. So is one sent again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from rlsys.agents.gateway.chat_replies import ChatReply
from rlsys.agents.gateway.chat_requests import ChatRequest, Refused
from rlsys.agents.session import Agent, Context, Session
from rlsys.agents.tool_calls import message_of
from rlsys.errors import ConfigError
from rlsys.types import Json, Message


@dataclass(slots=True)
class _Node:
    """A place in the tree: what was said on the way to it."""

    after: dict[bytes, _Node] = field(default_factory=dict)
    """By the message that is said next."""
    idle: list[Agent] = field(default_factory=list)
    """Agents whose context ends here, and which can go on."""
    said_by: tuple[Agent, Context] | None = None
    """Who said the last message, and its context then; None where somebody else said it."""

    @property
    def is_reached(self) -> bool:
        return self.said_by is not None or bool(self.idle)


class Conversations:
    """All that is said in one session through the gateway."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last_speaker: Agent | None = None
        """Who replied last."""
        self._roots: dict[str, _Node] = {}
        """By the model that is asked."""

    async def reply(self, asked: ChatRequest) -> ChatReply:
        """The reply of the agent that is asked, recorded with it.

        Raises `Refused` for an agent that is bound to no policy, and whatever `Agent.act` raises. Then, and if it is
        cancelled, nothing was said: the agent stands where it stood.
        """
        place, num_said = self._place(asked)
        agent = self._speaker(place, asked)
        new = asked.messages[num_said:]
        try:
            reply = await agent.act(new or None, asked.tools, max_new_tokens=asked.max_new_tokens)
        except BaseException:
            place.idle.append(agent)
            raise
        number = len(agent.turns) - 1
        said = Message(role="assistant", content=reply.text)
        if asked.may_call:
            said = message_of(reply.text, f"call_{agent.index}_{number}")
        for message in (*new, said):
            place = place.after.setdefault(_key(message), _Node())
        place.idle.append(agent)
        place.said_by = (agent, agent.context)
        self.last_speaker = agent
        return ChatReply(f"chatcmpl-{agent.index}-{number}", asked.model, agent.turns[-1], said, asked.wants_logprobs)

    def _place(self, asked: ChatRequest) -> tuple[_Node, int]:
        """Where the request goes on from, and how many of its messages were said by then."""
        root = node = self._roots.setdefault(asked.model, _Node())
        found, num_said = root, 0
        for number, message in enumerate(asked.messages, 1):
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
    """Equal for messages that say the same, however a client wrote the arguments of a call down."""
    calls = [_told(call) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    told = [message["role"], content, calls, message.get("tool_call_id"), message.get("name")]
    return orjson.dumps(told)


def _told(call: Json) -> list[Json]:
    assert isinstance(call, dict)
    function = call["function"]
    assert isinstance(function, dict)
    arguments = str(function["arguments"])
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):  # not JSON, or too deep: as it is written
        arguments = orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    return [call["id"], function["name"], arguments]
