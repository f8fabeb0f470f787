"""OpenAI's chat completions: the body of `POST /v1/chat/completions`, checked, and the answer to it.

The run decides how tokens are sampled, since training needs samples from a known distribution. Fields that only shape
that distribution (`temperature`, `top_p`, `seed`, penalties) and unknown fields are accepted and ignored. Fields that
would change the reply or its meaning, and are not supported, are refused (`NOT_HERE`), so that no client relies on
them.

`tool_choice: required`, or a function, opens the reply with the beginning of a call. That text is part of the prompt,
so that the tokens after it are still sampled from the policy's own distribution. The policy may yet write a call that
cannot be read, which stays text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from rlsys.agents.tool_calls import CLOSE, OPEN
from rlsys.agents.tools import Tool, Toolbox
from rlsys.gateway.answers import (
    DONE,
    Choice,
    Refused,
    event,
    settled_text,
    token_name,
    usage_of,
)
from rlsys.types import Json, Message

_ENDS = "a reply ends where the policy ends it"
_DRAWN = "the run decides how tokens are drawn"
_SHOWN = "the run's chat template is what the policy is trained on"
_SCHEMA = "give a function with this schema in `tools`, and name it in `tool_choice`"
NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(("stop_token_ids", "min_tokens", "ignore_eos"), _ENDS),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "best_of", "structured_outputs"), _DRAWN),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _DRAWN),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "continue_final_message", "echo"), _SHOWN),
    "top_logprobs": "`logprobs` has those of the sampled tokens",
    "functions": "give `tools`",
    "function_call": "give `tool_choice`",
    "audio": "the policy reads and writes text",
    "web_search_options": "the policy can search only with your tools",
}
"""Fields of OpenAI and vLLM that are refused unless null, zero or empty, and the reason."""
MAX_CHOICES = 128


class Lenient(BaseModel):
    """Base of the models of bodies; ignores unknown fields.

    Every list has `fail_fast`: else a body of some megabytes has millions of errors, which take gigabytes.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


class _TextPart(Lenient):
    type: Literal["text"]
    text: str


_PARTS = TypeAdapter(Annotated[list[_TextPart], Field(fail_fast=True)])


def _as_text(content: object) -> object:
    """Join text parts into one text; pydantic validates other content."""
    if isinstance(content, list):
        return "".join(part.text for part in _PARTS.validate_python(content))
    return "" if content is None else content


class _CalledFunction(Lenient):
    name: str
    arguments: str


class _Call(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Said(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    name: str | None = None
    tool_calls: Annotated[tuple[_Call, ...] | None, Field(fail_fast=True)] = None
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


class _Function(Lenient):
    name: str
    description: str | None = ""
    parameters: dict[str, Any] | None = None


class _Tool(Lenient):
    type: Literal["function"]
    function: _Function

    def tool(self) -> Tool:
        about = self.function
        return Tool(about.name, about.description or "", about.parameters or _NO_PARAMETERS, _run_by_the_client)


class _ChosenFunction(Lenient):
    name: str


class _Chosen(Lenient):
    type: Literal["function"]
    function: _ChosenFunction


class StreamOptions(Lenient):
    """What a stream contains beside the reply."""

    include_usage: bool = False


class _ResponseFormat(Lenient):
    type: Literal["text"]

    @model_validator(mode="before")
    @classmethod
    def _refuse_schemas(cls, format_: object) -> object:
        if isinstance(format_, Mapping) and format_.get("type") != "text":
            raise ValueError(f"`{format_.get('type')}` is not supported: {_SCHEMA}")
        return format_


Limit = Annotated[int, Field(ge=1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]


def _as_texts(stop: object) -> object:
    return () if stop is None else (stop,) if isinstance(stop, str) else stop


StopTexts = Annotated[tuple[_StopText, ...], Field(max_length=16, fail_fast=True), BeforeValidator(_as_texts)]


class ReplyRequest(Lenient):
    """What the bodies of all paths have in common."""

    model: Annotated[str, Field(max_length=256)]
    """Name of the requested agent."""
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: dict[str, object]) -> dict[str, object]:
        asked = {key: why for key, why in NOT_HERE.items() if body.get(key)}
        if asked:
            raise ValueError("; ".join(f"`{key}` is not supported: {why}" for key, why in asked.items()))
        return body


class ChatRequest(ReplyRequest):
    """Body of a request for replies to a conversation."""

    messages: Annotated[tuple[_Said, ...], Field(min_length=1), Field(fail_fast=True)]
    tools: Annotated[tuple[_Tool, ...] | None, Field(fail_fast=True)] = None
    tool_choice: Literal["auto", "none", "required"] | _Chosen | None = None
    parallel_tool_calls: bool | None = None
    """False: a reply ends with its first call."""
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopTexts = ()
    """Texts that end the reply. They are sampled and recorded, and left out of the answer."""
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    response_format: _ResponseFormat | None = None
    modalities: Annotated[tuple[Literal["text"], ...] | None, Field(fail_fast=True)] = None

    @model_validator(mode="after")
    def _choose_among_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice == "required" and not names:
            raise ValueError("`tool_choice` is `required`, and there are no `tools`")
        if isinstance(self.tool_choice, _Chosen) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"`tool_choice` names the function {self.tool_choice.function.name!r}, and `tools` has "
                f"{', '.join(map(repr, names)) or 'none'}"
            )
        return self

    @cached_property
    def prompt(self) -> tuple[Message, ...]:
        """The messages as an agent's prompt."""
        return tuple(message.message() for message in self.messages)

    @cached_property
    def toolbox(self) -> Toolbox:
        """The client's tools, which the client runs. Raises `ValueError` for two of the same name."""
        return Toolbox(*(each.tool() for each in self.tools or ()))

    @property
    def may_call(self) -> bool:
        """True if calls in the reply are parsed. Without tools, or with `tool_choice: none`, they stay text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def begin(self) -> str:
        """Text that the reply begins with: the opening of a call that `tool_choice` wants."""
        if isinstance(self.tool_choice, _Chosen):
            return f'{OPEN}\n{{"name": {json.dumps(self.tool_choice.function.name)}, "arguments": '
        return f"{OPEN}\n" if self.tool_choice == "required" else ""

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end the reply: `stop`, and the end of the only call."""
        is_one = self.may_call and (self.parallel_tool_calls is False or isinstance(self.tool_choice, _Chosen))
        return (*self.stop, CLOSE) if is_one else self.stop

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit, if any; the run's limit also applies."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)


R = TypeVar("R", bound=ReplyRequest)


def read_request(body: bytes, kind: type[R]) -> R:
    """Parse and check the body. Raises `Refused` with status 400, which names every invalid field, and
    of a list the first invalid entry."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the body is not a JSON object")
    return check_request(asked, kind)


def check_request(asked: Mapping[str, object], kind: type[R]) -> R:
    """Check a parsed body, see `read_request`."""
    try:
        request = kind.model_validate(asked)
        if isinstance(request, ChatRequest):
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


class ChatAnswer:
    """Answer to a `ChatRequest`."""

    def __init__(self, number: int, asked: ChatRequest) -> None:
        """`number` is that of the request."""
        self._id, self._asked = f"chatcmpl-{number}", asked
        self._sent = [""] * (asked.n or 1)
        """Text that was sent, by choice."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        entries = [
            {
                "index": index,
                "message": self._message(choice.message),
                "finish_reason": choice.finish,
                "logprobs": self._logprobs(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return orjson.dumps(self._envelope("chat.completion", entries, usage=usage_of(choices)))

    def opening(self) -> bytes:
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._asked.n or 1))

    def news(self, index: int, text: str) -> bytes:
        return self._more(index, settled_text(text, self._asked.stop, may_call=self._asked.may_call))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        events = []
        for index, choice in enumerate(choices):
            events.append(self._more(index, choice.message["content"]))
            for number, call in enumerate(choice.message.get("tool_calls", [])):
                assert isinstance(call, dict)
                events.append(self._chunk(index, {"tool_calls": [{"index": number, **call}]}))
            events.append(self._chunk(index, {}, choice.finish, self._logprobs(choice)))
        if self._wants_usage:
            events.append(event(self._envelope("chat.completion.chunk", [], usage=usage_of(choices))))
        return b"".join([*events, DONE])

    def failure(self, error: Refused) -> bytes:
        return event(error.body) + DONE

    def _more(self, index: int, text: str) -> bytes:
        """Return an event with the part of the text that was not sent."""
        new = text[len(self._sent[index]) :]
        self._sent[index] += new
        return self._chunk(index, {"content": new}) if new else b""

    def _chunk(
        self, index: int, delta: dict[str, Json], finish: str | None = None, logprobs: dict[str, Json] | None = None
    ) -> bytes:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        usage = {"usage": None} if self._wants_usage else {}
        return event(self._envelope("chat.completion.chunk", [choice], **usage))

    @property
    def _wants_usage(self) -> bool:
        options = self._asked.stream_options
        return options is not None and options.include_usage

    @staticmethod
    def _message(message: Message) -> dict[str, object]:
        fields: dict[str, object] = {"role": "assistant", "content": message["content"] or None, "refusal": None}
        calls = message.get("tool_calls")
        return {**fields, "tool_calls": calls} if calls else fields

    def _envelope(self, kind: str, choices: Sequence[object], **more: object) -> dict[str, object]:
        head = {"id": self._id, "object": kind, "created": int(time.time()), "model": self._asked.model}
        return {**head, "choices": choices, **more}

    def _logprobs(self, choice: Choice) -> dict[str, Json] | None:
        if not self._asked.logprobs:
            return None
        tokens = zip(choice.turn.output_ids, choice.turn.logprobs, strict=True)
        entries: list[Json] = [
            {"token": token_name(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in tokens
        ]
        return {"content": entries, "refusal": None}
