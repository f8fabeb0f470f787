"""Tool calls in a policy's text: the Hermes form, which Qwen and many other models are trained on.

    I will look it up.
    <tool_call>
    {"name": "search", "arguments": {"query": "height of K2"}}
    </tool_call>

Several calls may follow each other, and run in parallel. A malformed call is reported to the model, never raised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from rlsys.types import Json, Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One tool call of a policy."""

    name: str
    arguments: Mapping[str, Json]
    id: str
    """Unique within a conversation, e.g. `call_0_1`."""


@dataclass(frozen=True)
class Malformed:
    """Tool call that cannot be parsed: reported to the model, never raised."""

    text: str
    """The text between the tags."""
    problem: str
    """Error text for the model."""
    id: str


Call: TypeAlias = ToolCall | Malformed


def read_calls(text: str, id_prefix: str = "call") -> tuple[str, tuple[Call, ...]]:
    """Parse a reply: the text before its first call, and its calls in order, with the ids `PREFIX_0`, `PREFIX_1`, ...

    Text between calls is ignored, and so are calls within the reply's thinking, see `spoken`. The last call may lack
    its closing tag. Never raises.
    """
    content, calls, end = text, [], len(text) - len(spoken(text))
    while (opened := text.find(OPEN, end)) >= 0:
        if not calls:
            content = text[:opened].rstrip()
        call, end = _read_at(text, opened + len(OPEN), f"{id_prefix}_{len(calls)}")
        calls.append(call)
    return content, tuple(calls)


def spoken(text: str) -> str:
    """Return a reply without its thinking: the text after the first `</think>`, or "" if the thinking does not end. The
    opening `<think>` may be part of the chat template."""
    _, closing, answer = text.partition("</think>")
    if closing:
        return answer.lstrip()
    return "" if text.lstrip().startswith("<think>") else text


def after_thinking(prompt: str) -> str:
    """Text that ends the thinking, if the prompt has opened it; else empty."""
    return "\n</think>\n\n" if prompt.rstrip().endswith("<think>") else ""


def message_of(text: str, id_prefix: str = "call") -> Message:
    """Convert a reply to a message in the OpenAI form. If a call is malformed, the whole reply stays text."""
    content, calls = read_calls(text, id_prefix)
    readable = [call for call in calls if isinstance(call, ToolCall)]
    if not readable or len(readable) < len(calls):
        return Message(role="assistant", content=text)
    return Message(role="assistant", content=content, tool_calls=[_as_json(call) for call in readable])


def with_calls_as_text(message: Message) -> Message:
    """Return a message with its `tool_calls` written as text, for templates and people; other messages unchanged."""
    if not message.get("tool_calls"):
        return message
    calls = [_function_of(call) for call in message.get("tool_calls", [])]
    content = "\n".join(filter(None, [message["content"], *map(_call_text, calls)]))
    return Message(role=message["role"], content=content)


def _as_json(call: ToolCall) -> Json:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _function_of(call: Json) -> Json:
    """Convert a call in the OpenAI form, whose arguments are JSON text, to `{"name", "arguments"}`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = STRICT_JSON.decode(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _call_text(call: Json) -> str:
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def describe_tools(tools: Sequence[Mapping[str, Json]]) -> str:
    """Describe tools (OpenAI schemas) in text, for a chat template that does not support tools."""
    schemas = "\n".join(json.dumps(dict(schema), ensure_ascii=False) for schema in tools)
    return (
        "# Tools\n\nYou may call one or more functions. Their signatures are:\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "For each call, return a JSON object with the function's name and arguments within tool_call tags:\n"
        f'{OPEN}\n{{"name": <function-name>, "arguments": <arguments-object>}}\n{CLOSE}'
    )


def _read_at(text: str, start: int, call_id: str) -> tuple[Call, int]:
    """Parse the call whose JSON begins at `start`. Returns it and its end. Tags within JSON strings are ignored."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = STRICT_JSON.raw_decode(text, start)
        _check_text(value)
    except (ValueError, RecursionError) as error:
        return _malformed_call(text, start, start, _PROBLEM.format(error=_reason(error)), call_id)
    closing = len(text) - len(text[end:].lstrip())
    if closing < len(text) and not text.startswith((CLOSE, OPEN), closing):
        return _malformed_call(text, start, end, "there is more than one JSON object between the tags", call_id)
    return _call_of(value, text[start:end], call_id), end


def _malformed_call(text: str, start: int, end: int, problem: str, call_id: str) -> tuple[Malformed, int]:
    """Return a malformed call and its end, the next tag at or after `end`."""
    closed = min(at for tag in (CLOSE, OPEN, "") if (at := text.find(tag, end) if tag else len(text)) >= 0)
    if closed == len(text):
        problem = f"{problem}; the call ends without {CLOSE}"
    return Malformed(text[start:closed].strip(), problem, call_id), closed


def _call_of(value: Json, text: str, call_id: str) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return Malformed(text, _PROBLEM.format(error="it has no `name`"), call_id)
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # the form of OpenAI's API
        try:
            arguments = STRICT_JSON.decode(arguments)
            _check_text(arguments)
        except (ValueError, RecursionError) as error:
            return Malformed(text, f"`arguments` is text that is not JSON: {_reason(error)}", call_id)
    if not isinstance(arguments, dict):
        return Malformed(text, "`arguments` is not a JSON object", call_id)
    return ToolCall(name, arguments, call_id)


def _check_text(value: Json) -> None:
    """Raise `ValueError` for an unpaired surrogate, which no tokenizer accepts."""
    json.dumps(value, ensure_ascii=False).encode()


def _reason(error: ValueError | RecursionError) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=_no_constant)
"""Decoder that raises `ValueError` for `NaN` and `Infinity`, which Python's own accepts."""
_PROBLEM = 'a call is a JSON object like {{"name": "...", "arguments": {{...}}}}: {error}'
