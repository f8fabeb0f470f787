"""What the answers of all of OpenAI's paths have in common: refusals, choices, and replies that are still sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from rlsys.agents.tool_calls import OPEN
from rlsys.types import Json, Message, Turn

MAX_TOLD = 2000
"""Longest message of an error, in characters: a request is not sent back."""
DONE = b"data: [DONE]\n\n"


class Refused(Exception):
    """Request that gets an error response, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        shown = message[:MAX_TOLD].encode(errors="replace").decode()
        self.status, self.message, self.code, self.param = status, shown, code, param

    @property
    def body(self) -> dict[str, Json]:
        """Error body `{"error": {...}}`, as OpenAI's clients expect it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the replies to a request."""

    turn: Turn
    message: Message
    """The reply as a message, without the text that ended it."""

    @property
    def finish(self) -> str:
        """OpenAI's reason: `length` even if calls were parsed, since the reply may be incomplete."""
        return "tool_calls" if self.turn.finish == "stop" and "tool_calls" in self.message else self.turn.finish


class AnswerForm(Protocol):
    """Form of the answer to one request: one JSON object, or server-sent events."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the body of an answer that is not streamed."""

    def opening(self) -> bytes:
        """Return the events before any text."""

    def news(self, index: int, text: str) -> bytes:
        """Return the events for the text of choice `index` so far: what was not sent yet."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return all further events."""

    def failure(self, error: Refused) -> bytes:
        """Return the events that end an answer whose reply failed after the first event."""


def event(data: Mapping[str, object], name: str | None = None) -> bytes:
    """Write one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, orjson.dumps(data))


def without_stop(text: str, stop: Sequence[str]) -> str:
    """Return a reply up to the first of these texts, as OpenAI's clients expect it."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def settled_text(text: str, stop: Sequence[str], *, may_call: bool) -> str:
    """Return the part of a reply that is still sampled that no later token can take from its message: what may be the
    beginning of a stop text or of a call is left out, and so is whitespace that a call could follow.

    >>> settled_text("Let me see. <tool", (), may_call=True)
    'Let me see.'
    """
    marks = (*stop, OPEN) if may_call else stop
    end = min((_end_before(text, mark) for mark in marks), default=len(text))
    return text[:end].rstrip() if may_call else text[:end]


def _end_before(text: str, mark: str) -> int:
    """Place where a mark begins, or may begin with the next tokens."""
    if (place := text.find(mark)) >= 0:
        return place
    begun = (num for num in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:num]))
    return len(text) - next(begun, 0)


def usage_of(choices: Sequence[Choice]) -> dict[str, int]:
    """Count the tokens of the prompts, which choices share, and of all replies."""
    asked = sum(len(prompt) for prompt in {choice.turn.prompt_ids for choice in choices})
    num_completion = sum(len(choice.turn.output_ids) for choice in choices)
    return {"prompt_tokens": asked, "completion_tokens": num_completion, "total_tokens": asked + num_completion}


def token_name(token: int) -> str:
    """Name of a token in logprobs, as in vLLM, since one token may not be valid text."""
    return f"token_id:{token}"
