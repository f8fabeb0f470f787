"""OpenAI's chat completions: the body of `POST /v1/chat/completions`, checked, and the body of the response.

The run decides how tokens are sampled, since training needs samples from a known distribution. Fields that only shape
that distribution (`temperature`, `top_p`, `seed`, penalties) and unknown fields are accepted and ignored. Fields that
would change the reply or its meaning, and are not supported, are refused (`NOT_HERE`), so that no client relies on
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from rlsys.agents.tools import Tool, Toolbox
from rlsys.types import Json, Message, Turn

_ENDS = "a reply ends where the policy ends it"
_DRAWN = "the run decides how tokens are drawn"
_SHOWN = "the run's chat template is what the policy is trained on"
NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(("stop_token_ids", "min_tokens", "ignore_eos"), _ENDS),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "best_of", "structured_outputs"), _DRAWN),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _DRAWN),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "echo"), _SHOWN),
    "functions": "give `tools`",
    "function_call": "give `tool_choice`",
    "audio": "the policy reads and writes text",
    "web_search_options": "the policy can search only with your tools",
}
"""Fields of OpenAI and vLLM that are refused unless null or empty, and the reason."""


MAX_TOLD = 2000
"""Longest message of an error, in characters: a request is not sent back."""


class Refused(Exception):
    """Request that gets an error response, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        shown = message[:MAX_TOLD].encode(errors="replace").decode()
        self.status, self.message, self.code, self.param = status, shown, code, param

    @property
    def body(self) -> Json:
        """Error body `{"error": {...}}`, as OpenAI's clients expect it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Lenient(BaseModel):
    """Base of the body's models; ignores unknown fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _TextPart(_Lenient):
    type: Literal["text"]
    text: str


_PARTS = TypeAdapter(Annotated[list[_TextPart], FailFast()])


def _as_text(content: object) -> object:
    """Join text parts into one text; pydantic validates other content."""
    if isinstance(content, list):
        return "".join(part.text for part in _PARTS.validate_python(content))
    return "" if content is None else content


class _CalledFunction(_Lenient):
    name: str
    arguments: str


class _Call(_Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Said(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    name: str | None = None
    tool_calls: Annotated[tuple[_Call, ...] | None, FailFast()] = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        message = Message(role="system" if self.role == "developer" else self.role, content=self.content)
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


_NO_PARAMETERS: Mapping[str, Json] = {"type": "object", "properties": {}}


def _run_by_the_client() -> NoReturn:
    raise NotImplementedError("the client runs its tools itself")


class _Function(_Lenient):
    name: str
    description: str | None = ""
    parameters: dict[str, Any] | None = None


class _Tool(_Lenient):
    type: Literal["function"]
    function: _Function

    def tool(self) -> Tool:
        about = self.function
        return Tool(about.name, about.description or "", about.parameters or _NO_PARAMETERS, _run_by_the_client)


class _StreamOptions(_Lenient):
    include_usage: bool = False


class _ResponseFormat(_Lenient):
    type: Literal["text"]


_Limit = Annotated[int, Field(ge=1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]


def _as_texts(stop: object) -> object:
    return () if stop is None else (stop,) if isinstance(stop, str) else stop


class ChatRequest(_Lenient):
    """Body of a request for one reply."""

    model: Annotated[str, Field(max_length=256)]
    """Name of the requested agent."""
    messages: Annotated[tuple[_Said, ...], Field(min_length=1), FailFast()]
    tools: Annotated[tuple[_Tool, ...] | None, FailFast()] = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    n: Literal[1] | None = None
    stop: Annotated[tuple[_StopText, ...], Field(max_length=16), BeforeValidator(_as_texts)] = ()
    """Texts that end the reply. They are sampled and recorded, and left out of the answer."""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: _ResponseFormat | None = None
    modalities: Annotated[tuple[Literal["text"], ...] | None, FailFast()] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: dict[str, object]) -> dict[str, object]:
        asked = {key: why for key, why in NOT_HERE.items() if body.get(key)}
        if asked:
            raise ValueError("; ".join(f"`{key}` is not supported: {why}" for key, why in asked.items()))
        return body

    @cached_property
    def prompt(self) -> tuple[Message, ...]:
        """The messages as an agent's prompt."""
        return tuple(said.message() for said in self.messages)

    @cached_property
    def toolbox(self) -> Toolbox:
        """The client's tools, which the client runs. Raises `ValueError` for two of the same name."""
        return Toolbox(*(each.tool() for each in self.tools or ()))

    @property
    def may_call(self) -> bool:
        """True if calls in the reply are parsed. Without tools, or with `tool_choice: none`, they stay text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit, if any; the run's limit also applies."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


R = TypeVar("R", bound=ChatRequest)


def without_stop(text: str, stop: Sequence[str]) -> str:
    """Return a reply up to the first of these texts, as OpenAI's clients expect it."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def read_request(body: bytes, kind: type[R] = ChatRequest) -> R:
    """Parse and check the body. Raises `Refused` with status 400, which names every invalid field, and
    of a list the first invalid entry."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the body is not a JSON object")
    try:
        request = kind.model_validate(asked)
        orjson.dumps([tool.parameters for tool in request.toolbox.tools.values()])
    except ValidationError as error:
        raise _refusal(error) from None
    except (ValueError, orjson.JSONEncodeError) as error:  # two tools of the same name, or nested too deeply
        raise Refused(400, str(error), param="tools") from None
    return request


def _refusal(error: ValidationError) -> Refused:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    places = [".".join(map(str, problem["loc"])) for problem in problems]
    texts = [f"{place}: {p['msg']}" if place else p["msg"] for place, p in zip(places, problems, strict=True)]
    return Refused(400, "; ".join(texts), param=places[0] or None)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Turn in the form that the client receives: one JSON object, or server-sent events."""

    id: str
    asked: ChatRequest
    turn: Turn
    message: Message

    def whole(self) -> bytes:
        """Return the body of a reply that is not streamed."""
        told: dict[str, Json] = {"role": "assistant", "content": self.message["content"] or None, "refusal": None}
        if calls := self.message.get("tool_calls"):
            told["tool_calls"] = calls
        choice = {"index": 0, "message": told, "finish_reason": self._finish, "logprobs": self._logprobs()}
        return self._named("chat.completion", [choice], usage=self._usage())

    def events(self) -> bytes:
        """Return the body of a stream: role, content, calls, finish reason, and the usage if requested."""
        options = self.asked.stream_options
        wants_usage = options is not None and options.include_usage
        deltas: list[dict[str, Json]] = [{"role": "assistant", "content": ""}]
        if content := self.message["content"]:
            deltas.append({"content": content})
        for index, call in enumerate(self.message.get("tool_calls", [])):
            assert isinstance(call, dict)
            deltas.append({"tool_calls": [{"index": index, **call}]})
        choices: list[dict[str, object]] = [
            {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": self._finish, "logprobs": self._logprobs()})
        usage = {"usage": None} if wants_usage else {}
        events = [self._named("chat.completion.chunk", [choice], **usage) for choice in choices]
        if wants_usage:
            events.append(self._named("chat.completion.chunk", [], usage=self._usage()))
        return b"".join([*(b"data: %b\n\n" % event for event in events), b"data: [DONE]\n\n"])

    @property
    def _finish(self) -> str:
        """OpenAI's reason: `length` even if calls were parsed, since the reply may be incomplete."""
        return "tool_calls" if self.turn.finish == "stop" and "tool_calls" in self.message else self.turn.finish

    def _named(self, kind: str, choices: Sequence[Mapping[str, object]], **more: object) -> bytes:
        head = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.asked.model}
        return orjson.dumps({**head, "choices": choices, **more})

    def _usage(self) -> dict[str, int]:
        asked, said = len(self.turn.prompt_ids), len(self.turn.output_ids)
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

    def _logprobs(self) -> dict[str, object] | None:
        """Logprobs of all tokens, by token id: `token_id:42`, as in vLLM, since one token may not be valid text."""
        if not self.asked.logprobs:
            return None
        tokens = zip(self.turn.output_ids, self.turn.logprobs, strict=True)
        told = [{"token": f"token_id:{id_}", "logprob": p, "bytes": None, "top_logprobs": []} for id_, p in tokens]
        return {"content": told, "refusal": None}
