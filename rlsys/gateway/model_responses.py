"""OpenAI's responses: the body of `POST /v1/responses`, checked, and the answer to it.

A request is read as one of chat completions: items become messages, and the reply becomes items. So both paths share
their conversations, and a client may use both. `reasoning` items and what only shapes the distribution are ignored;
tools that OpenAI runs itself are refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from rlsys.gateway.answers import Choice, Refused, event, settled_text, token_name, usage_of
from rlsys.gateway.chat_completions import ChatRequest, Lenient, Limit, ReplyRequest, check_request
from rlsys.types import Json, Message

_HERE = "only `function` is supported: the client runs the tools"


class _Part(Lenient):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Parts = Annotated[tuple[_Part, ...], Field(fail_fast=True)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class _Item(Lenient):
    """Message; the type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class _CallItem(Lenient):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _ResultItem(Lenient):
    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


_ITEMS: Mapping[str, TypeAdapter[Any]] = {
    "message": TypeAdapter(_Item),
    "function_call": TypeAdapter(_CallItem),
    "function_call_output": TypeAdapter(_ResultItem),
}


class _FunctionTool(Lenient):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ChosenTool(Lenient):
    type: Literal["function"]
    name: str


class _Text(Lenient):
    format: dict[str, Any] | None = None


class ResponsesRequest(ReplyRequest):
    """Body of a request for one response."""

    input: str | _Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: _Objects | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Limit | None = None
    text: _Text | None = None
    include: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    """`message.output_text.logprobs` is the one that is supported; others are ignored."""
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has the logprobs of the reply's tokens."""
        return "message.output_text.logprobs" in (self.include or ())

    def chat(self, earlier: Sequence[Message]) -> ChatRequest:
        """Return the request as one of chat completions; `earlier` are the messages up to the previous response.

        Raises `Refused`.
        """
        messages = [*earlier, *self.messages()]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chosen = self.tool_choice
        body = {
            "model": self.model,
            "messages": [*system, *messages],
            "tools": [_tool(place, tool) for place, tool in enumerate(self.tools or ())] or None,
            "tool_choice": chosen
            if not isinstance(chosen, _ChosenTool)
            else {"type": "function", "function": {"name": chosen.name}},
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format if self.text else None,
            "stream": self.stream,
        }
        return check_request(body, ChatRequest)

    def messages(self) -> list[Message]:
        """Return the input as messages. Raises `Refused`, naming the item."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        found: list[Message] = []
        for place, given in enumerate(self.input):
            kind = given.get("type", "message")
            if kind == "reasoning":
                continue
            if not isinstance(kind, str) or kind not in _ITEMS:
                text = f"input.{place}: an item of type {kind!r} is not supported; give {', '.join(_ITEMS)}"
                raise Refused(400, text, param="input")
            try:
                _append(found, _ITEMS[kind].validate_python(given))
            except ValidationError as error:
                problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
                where = ".".join(map(str, ("input", place, *problem["loc"])))
                raise Refused(400, f"{where}: {problem['msg']}", param=where) from None
        return found


def _append(messages: list[Message], item: _Item | _CallItem | _ResultItem) -> None:
    """Append an item. What the assistant said and called in one response is one message."""
    if isinstance(item, _ResultItem):
        messages.append(Message(role="tool", content=_as_text(item.output), tool_call_id=item.call_id))
        return
    if isinstance(item, _Item):
        messages.append(Message(role=item.role, content=_as_text(item.content)))
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append(Message(role="assistant", content=""))
    function: Json = {"name": item.name, "arguments": item.arguments}
    call: Json = {"id": item.call_id, "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _as_text(content: str | tuple[_Part, ...]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(place: int, given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function":
        raise Refused(400, f"tools.{place}: a tool of type {given.get('type')!r}; {_HERE}", param="tools")
    try:
        function = _FunctionTool.model_validate(given).model_dump(exclude={"type"}, exclude_none=True)
    except ValidationError as error:
        raise Refused(400, f"tools.{place}: {error.errors()[0]['msg']}", param="tools") from None
    return {"type": "function", "function": function}


class ResponsesAnswer:
    """Answer to a `ResponsesRequest`."""

    def __init__(self, number: int, asked: ResponsesRequest, chat: ChatRequest) -> None:
        """`number` is that of the request, and `chat` is what it was read as."""
        self.id, self._asked, self._chat = f"resp_{number}", asked, chat
        self._created = int(time.time())
        self._text = ""
        """Text that was sent."""
        self._num_events = 0

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return orjson.dumps(self._final_response(choices))

    def opening(self) -> bytes:
        empty = self._response("in_progress", [])
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def news(self, index: int, text: str) -> bytes:
        return self._more(settled_text(text, (), may_call=self._chat.may_call))

    def closing(self, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        response = self._final_response(choices)
        events = [self._more(choice.message["content"])]
        for place, item in enumerate(self._output(choice)):
            events += self._of_message(item) if item["type"] == "message" else self._of_call(place, item)
        return b"".join([*events, self._event(f"response.{response['status']}", response=response)])

    def failure(self, error: Refused) -> bytes:
        problem: Json = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed", []), "error": problem})

    def _more(self, text: str) -> bytes:
        """Return the events for the part of the text that was not sent."""
        new = text[len(self._text) :]
        if not new:
            return b""
        events = [] if self._text else list(self._message_begins())
        self._text += new
        delta = self._event("response.output_text.delta", item_id=self._message_id, **_PLACE, delta=new, logprobs=[])
        return b"".join([*events, delta])

    def _message_begins(self) -> Iterator[bytes]:
        item = {"type": "message", "id": self._message_id, "status": "in_progress", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", item_id=self._message_id, **_PLACE, part=part)

    def _of_message(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        (part,) = item["content"]
        about = {"item_id": self._message_id, **_PLACE}
        yield self._event("response.output_text.done", **about, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **about, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _of_call(self, place: int, item: Mapping[str, Any]) -> Iterator[bytes]:
        begun = {**item, "arguments": "", "status": "in_progress"}
        about = {"item_id": item["id"], "output_index": place}
        yield self._event("response.output_item.added", output_index=place, item=begun)
        yield self._event("response.function_call_arguments.delta", **about, delta=item["arguments"])
        done = {**about, "name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _final_response(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        is_cut = choice.turn.finish == "length"
        used = usage_of(choices)
        return {
            **self._response("incomplete" if is_cut else "completed", self._output(choice)),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }

    def _output(self, choice: Choice) -> list[dict[str, Any]]:
        """Return the reply as items: what it says, then what it calls."""
        status = "incomplete" if choice.turn.finish == "length" else "completed"
        calls = choice.message.get("tool_calls", [])
        items: list[dict[str, Any]] = []
        if (text := choice.message["content"]) or not calls:
            tokens = zip(choice.turn.output_ids, choice.turn.logprobs, strict=True)
            logprobs = [
                {"token": token_name(token), "logprob": logprob, "bytes": [], "top_logprobs": []}
                for token, logprob in (tokens if self._asked.wants_logprobs else ())
            ]
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            items.append(
                {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": [part]}
            )
        for call in calls:
            assert isinstance(call, dict)
            function, call_id = call["function"], call["id"]
            assert isinstance(function, dict)
            item = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "status": status}
            items.append({**item, "name": function["name"], "arguments": function["arguments"]})
        return items

    def _response(self, status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        asked = self._asked
        choice = asked.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "metadata": {},
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, _ChosenTool) else choice or "auto",
            "tools": asked.tools or [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def _message_id(self) -> str:
        return f"msg_{self.id}"

    def _event(self, kind: str, **data: object) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **data}, kind)


_PLACE = {"output_index": 0, "content_index": 0}
"""Of the only part of the only message, which comes first."""
