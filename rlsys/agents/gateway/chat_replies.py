"""Responses to clients: a reply as one JSON object, or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

from rlsys.types import Json, Message, Turn


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Turn in the form that the client receives."""

    id: str
    model: str
    turn: Turn
    message: Message
    wants_logprobs: bool

    def whole(self) -> bytes:
        """Return the body of a reply that is not streamed."""
        told = {"role": "assistant", "content": self.message["content"] or None, "refusal": None}
        if calls := self.message.get("tool_calls"):
            told["tool_calls"] = calls
        choice = {"index": 0, "message": told, "finish_reason": self.finish, "logprobs": self._logprobs()}
        return orjson.dumps(self._named("chat.completion", [choice], {"usage": self._usage()}))

    def events(self, *, wants_usage: bool) -> bytes:
        """Return the body of a stream: role, content, calls, finish reason, and the usage if requested."""
        return b"".join([*(b"data: %b\n\n" % event for event in self._events(wants_usage)), b"data: [DONE]\n\n"])

    @property
    def finish(self) -> str:
        """OpenAI's reason: `length` even if calls were parsed, since the reply may be incomplete."""
        return "tool_calls" if self.turn.finish == "stop" and "tool_calls" in self.message else self.turn.finish

    def _events(self, wants_usage: bool) -> Iterator[bytes]:
        usage = {"usage": None} if wants_usage else {}
        content, calls = self.message["content"], self.message.get("tool_calls", [])
        deltas: list[dict[str, Json]] = [{"role": "assistant", "content": ""}]
        if content:
            deltas.append({"content": content})
        for index, call in enumerate(calls):
            assert isinstance(call, dict)
            deltas.append({"tool_calls": [{"index": index, **call}]})
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
            yield orjson.dumps(self._named("chat.completion.chunk", [choice], usage))
        last = {"index": 0, "delta": {}, "finish_reason": self.finish, "logprobs": self._logprobs()}
        yield orjson.dumps(self._named("chat.completion.chunk", [last], usage))
        if wants_usage:
            yield orjson.dumps(self._named("chat.completion.chunk", [], {"usage": self._usage()}))

    def _named(self, kind: str, choices: list[dict[str, object]], more: Mapping[str, object]) -> dict[str, object]:
        head = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}
        return {**head, "choices": choices, **more}

    def _usage(self) -> dict[str, int]:
        asked, said = len(self.turn.prompt_ids), len(self.turn.output_ids)
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

    def _logprobs(self) -> dict[str, object] | None:
        """Logprobs of all tokens, by token id: `token_id:42`, as in vLLM, since one token may not be valid text."""
        if not self.wants_logprobs:
            return None
        tokens = zip(self.turn.output_ids, self.turn.logprobs, strict=True)
        told = [{"token": f"token_id:{id_}", "logprob": p, "bytes": None, "top_logprobs": []} for id_, p in tokens]
        return {"content": told, "refusal": None}
