"""OpenAI's older completions: the body of `POST /v1/completions`, checked, and the answer to it.

A prompt is plain text, whatever the chat template, or token ids. Every prompt begins a sample of its own; a client that
gives token ids can continue one token for token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import orjson
from pydantic import BeforeValidator, Field

from rlsys.gateway.answers import DONE, Choice, Refused, event, settled_text, token_name, usage_of
from rlsys.gateway.chat_completions import MAX_CHOICES, Limit, ReplyRequest, StopTexts, StreamOptions
from rlsys.types import Json

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion without `max_tokens`, as at OpenAI and vLLM."""

_Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[tuple[str | _Ids, ...], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


def _as_prompts(prompt: object) -> object:
    """Convert a text, or the token ids of one, to a list of prompts."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))
    return (prompt,) if is_one else prompt


class CompletionRequest(ReplyRequest):
    """Body of a request for continuations of texts."""

    prompt: Annotated[_Prompts, BeforeValidator(_as_prompts)]
    max_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopTexts = ()
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """0: those of the sampled tokens."""
    suffix: Annotated[str, Field(max_length=0)] | None = None

    @property
    def num_choices(self) -> int:
        """Completions of all prompts together."""
        return len(self.prompt) * (self.n or 1)

    @property
    def max_new_tokens(self) -> int:
        """Limit of each completion; the run's limit also applies."""
        return self.max_tokens or DEFAULT_MAX_TOKENS


class CompletionAnswer:
    """Answer to a `CompletionRequest`."""

    def __init__(self, number: int, asked: CompletionRequest) -> None:
        """`number` is that of the request."""
        self._id, self._asked = f"cmpl-{number}", asked
        self._sent = [""] * asked.num_choices

    def whole(self, choices: Sequence[Choice]) -> bytes:
        entries = [self._choice(index, c.message["content"], c) for index, c in enumerate(choices)]
        return orjson.dumps(self._envelope(entries, usage=usage_of(choices)))

    def opening(self) -> bytes:
        return b""

    def news(self, index: int, text: str) -> bytes:
        return self._more(index, settled_text(text, self._asked.stop, may_call=False), None)

    def closing(self, choices: Sequence[Choice]) -> bytes:
        events = [self._more(index, c.message["content"], c) for index, c in enumerate(choices)]
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            events.append(event(self._envelope([], usage=usage_of(choices))))
        return b"".join([*events, DONE])

    def failure(self, error: Refused) -> bytes:
        return event(error.body) + DONE

    def _more(self, index: int, text: str, ended: Choice | None) -> bytes:
        new = text[len(self._sent[index]) :]
        self._sent[index] += new
        return event(self._envelope([self._choice(index, new, ended)])) if new or ended else b""

    def _choice(self, index: int, text: str, ended: Choice | None) -> dict[str, object]:
        finish = ended.turn.finish if ended else None
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": self._logprobs(ended)}

    def _logprobs(self, choice: Choice | None) -> dict[str, Json] | None:
        if self._asked.logprobs is None or choice is None:
            return None
        names: list[Json] = [token_name(token) for token in choice.turn.output_ids]
        return {"tokens": names, "token_logprobs": list(choice.turn.logprobs), "top_logprobs": None, "text_offset": []}

    def _envelope(self, choices: Sequence[object], **more: object) -> dict[str, object]:
        head = {"id": self._id, "object": "text_completion", "created": int(time.time()), "model": self._asked.model}
        return {**head, "choices": choices, **more}
