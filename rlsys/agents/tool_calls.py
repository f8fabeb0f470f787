"""Tool calls as a policy writes them: Hermes form, which Qwen and many others are trained on.

    I will look it up.
    <tool_call>
    {"name": "search", "arguments": {"query": "height of K2"}}
    </tool_call>

Several calls may follow each other, and run in parallel. What cannot be read is told to the model, never raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from rlsys.types import Json, Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call that a policy asked for."""

    name: str
    arguments: Mapping[str, Json]
    id: str
    """Tells the calls of one conversation apart, e.g. `call_0_1`."""


@dataclass(frozen=True)
class Malformed:
    """A call that cannot be read: told to the model, never an exception."""

    text: str
    """What stood between the tags."""
    problem: str
    """What is wrong with it, for the model."""
    id: str


Call: TypeAlias = ToolCall | Malformed


def read_calls(text: str, id_prefix: str = "call") -> tuple[str, tuple[Call, ...]]:
    """What a reply says before its first call, and its calls in order, with the ids `PREFIX_0`, `PREFIX_1`, ...

    Text between calls is passed over, and so are calls in what it thought, see `spoken`. The last call may lack its
    closing tag. Never raises.
    """
    content, calls, end = text, [], len(text) - len(spoken(text))
    while (opened := text.find(OPEN, end)) >= 0:
        if not calls:
            content = text[:opened].rstrip()
        call, end = _read_at(text, opened + len(OPEN), f"{id_prefix}_{len(calls)}")
        calls.append(call)
    return content, tuple(calls)


def spoken(text: str) -> str:
    """A reply without what was thought before it: what follows the first `</think>`, which a chat template may have
    opened itself; nothing of a thought that does not end."""
    _, closing, said = text.partition("</think>")
    if closing:
        return said.lstrip()
    return "" if text.lstrip().startswith("<think>") else text


def write_calls(calls: Iterable[ToolCall]) -> str:
    """The text that `read_calls` reads as these calls."""
    return "\n".join(_written({"name": call.name, "arguments": dict(call.arguments)}) for call in calls)


def message_of(text: str, id_prefix: str = "call") -> Message:
    """A reply as a message in the OpenAI form: calls that can be read as `tool_calls`, the rest as `content`."""
    content, calls = read_calls(text, id_prefix)
    readable = [call for call in calls if isinstance(call, ToolCall)]
    if not readable or len(readable) < len(calls):
        return Message(role="assistant", content=text)
    return Message(role="assistant", content=content, tool_calls=[_as_json(call) for call in readable])


def written_out(message: Message) -> Message:
    """A message with its `tool_calls` written as text, for templates and people; others as they are."""
    if not message.get("tool_calls"):
        return message
    calls = [_function_of(call) for call in message.get("tool_calls", [])]
    content = "\n".join(filter(None, [message["content"], *map(_written, calls)]))
    return Message(role=message["role"], content=content)


def _as_json(call: ToolCall) -> Json:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _function_of(call: Json) -> Json:
    """`{"name", "arguments"}` of a call in the OpenAI form, whose arguments are JSON in text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = _DECODER.decode(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _written(call: Json) -> str:
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def described(tools: Sequence[Mapping[str, Json]]) -> str:
    """How a system message offers tools (OpenAI schemas) to a model whose chat template has no place for them."""
    schemas = "\n".join(json.dumps(dict(schema), ensure_ascii=False) for schema in tools)
    return (
        "# Tools\n\nYou may call one or more functions. Their signatures are:\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "For each call, return a JSON object with the function's name and arguments within tool_call tags:\n"
        f'{OPEN}\n{{"name": <function-name>, "arguments": <arguments-object>}}\n{CLOSE}'
    )


def _read_at(text: str, start: int, call_id: str) -> tuple[Call, int]:
    """The call whose JSON begins at `start`, and where it ends. Tags within its strings are part of it."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
        _check_text(value)
    except (ValueError, RecursionError) as error:
        return _malformed(text, start, start, _PROBLEM.format(error=_reason(error)), call_id)
    closing = len(text) - len(text[end:].lstrip())
    if closing < len(text) and not text.startswith((CLOSE, OPEN), closing):
        return _malformed(text, start, end, "there is more than one JSON object between the tags", call_id)
    return _call_of(value, text[start:end], call_id), end


def _malformed(text: str, start: int, end: int, problem: str, call_id: str) -> tuple[Malformed, int]:
    """What cannot be read ends at the next tag; nothing that was read before `end` is looked at again."""
    closed = min(at for tag in (CLOSE, OPEN, "") if (at := text.find(tag, end) if tag else len(text)) >= 0)
    if closed == len(text):
        problem = f"{problem}; the call ends without {CLOSE}"
    return Malformed(text[start:closed].strip(), problem, call_id), closed


def _call_of(value: Json, text: str, call_id: str) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return Malformed(text, _PROBLEM.format(error="it has no `name`"), call_id)
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's API has it
        try:
            arguments = _DECODER.decode(arguments)
            _check_text(arguments)
        except (ValueError, RecursionError) as error:
            return Malformed(text, f"`arguments` is text that is not JSON: {_reason(error)}", call_id)
    if not isinstance(arguments, dict):
        return Malformed(text, "`arguments` is not a JSON object", call_id)
    return ToolCall(name, arguments, call_id)


def _check_text(value: Json) -> None:
    """Raise `ValueError` for half a surrogate pair, which is text that no tokenizer takes."""
    json.dumps(value, ensure_ascii=False).encode()


def _reason(error: ValueError | RecursionError) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_PROBLEM = 'a call is a JSON object like {{"name": "...", "arguments": {{...}}}}: {error}'
