"""Tools: typed Python functions that a policy may call.

    def search(query: str, limit: int = 5) -> list[str]:
        \"\"\"Titles of the pages that match a query.\"\"\"

    tools = Toolbox(search, tool(calculate, timeout_s=2))

The signature gives the schema, and the docstring the description. An exception of a tool, or an invalid call, becomes
text for the model. A `RlsysError` is raised instead: it means a failure that the policy did not cause.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import inspect
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, cast, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, to_json

from rlsys.agents.tool_calls import Call, Malformed
from rlsys.errors import RlsysError, ToolError, first_of
from rlsys.types import Json

ToolSchema: TypeAlias = Mapping[str, Json]
"""A tool in the OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

Answered: TypeAlias = Literal["ok", "error", "timeout"]

TIMEOUT_S = 30.0
MAX_CHARS = 20_000


@dataclass(frozen=True)
class ToolResult:
    """Result of one tool call."""

    content: str
    """Text for the model."""
    outcome: Literal["ok", "error", "timeout", "unknown", "malformed", "refused"]
    seconds: float
    is_cut: bool = False
    """True if the result was longer than the tool's `max_chars`."""


@dataclass(frozen=True)
class Tool:
    """Function with a name, a description and a JSON schema of its arguments. Made by `tool`, or from the description
    that a server gives."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of the arguments, an object."""
    function: Callable[..., object]
    """Called with the arguments by name; sync (run in a thread) or async. A returned string is used unchanged, any
    other value as JSON."""
    timeout_s: float = TIMEOUT_S
    """Deadline of one call, seconds."""
    max_chars: int = MAX_CHARS
    """Longest result, in characters; the rest is cut off with a note."""
    arguments: type[BaseModel] | None = None
    """Model that validates the arguments before the call; None passes them unchanged."""
    is_move: bool = False
    """True for an async function that is part of a workflow, such as starting subagents. It has no deadline, since it
    may sample, and its exceptions are raised: a bug, or an `AgentStopped`."""

    @property
    def schema(self) -> ToolSchema:
        """The tool in the OpenAI form."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }

    def validate_arguments(self, arguments: Mapping[str, Json]) -> Mapping[str, object]:
        """Validate the arguments of a call. Raises pydantic's `ValidationError` if they do not fit."""
        if self.arguments is None:
            return arguments
        parsed = self.arguments.model_validate(arguments)
        return {str(info.alias): getattr(parsed, field) for field, info in self.arguments.model_fields.items()}


def tool(
    function: Callable[..., Any], *, name: str | None = None, timeout_s: float = TIMEOUT_S, max_chars: int = MAX_CHARS
) -> Tool:
    """Make a tool from a typed function: its name, its docstring, and a schema of its signature.

    An async function is cancelled at its deadline. A sync one runs in a thread, `MAX_THREADS` at a time, which cannot
    be killed: past the deadline it is abandoned, and while `MAX_HANGING` such threads run, further calls raise
    `ToolError`. Give a sync function a time limit, and run model-written code in a separate process.

    Raises `TypeError` for a function without a name or docstring, or with a signature that has no schema.
    """
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise TypeError(f"{name!r} is no name for a tool: give 1 to 64 letters, digits, `_` and `-`, with name=")
    described = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    description = inspect.getdoc(described)
    if not description:
        raise TypeError(f"the tool {name!r} has no docstring: it is what tells the model when to call it")
    try:
        types = get_type_hints(described, include_extras=True)
    except NameError as error:
        raise TypeError(f"a type of the tool {name!r} is not found: {error}; define it in the module itself") from error
    arguments = _arguments_of(function, types, name)
    parameters = arguments.model_json_schema(schema_generator=_Untitled)
    for titled in ("title", "description"):
        parameters.pop(titled, None)
    return Tool(name, description, parameters, function, timeout_s, max_chars, arguments)


class Toolbox:
    """Tools that an agent may use. Stateless: one toolbox serves many sessions."""

    def __init__(self, *tools: Tool | Callable[..., Any]) -> None:
        """Convert plain functions by `tool`. Raises `ValueError` for two tools of the same name."""
        made = [each if isinstance(each, Tool) else tool(each) for each in tools]
        self.tools: Mapping[str, Tool] = {each.name: each for each in made}
        if len(self.tools) < len(made):
            names = sorted(each.name for each in made)
            twice = next(a for a, b in pairwise(names) if a == b)
            raise ValueError(f"two tools are called {twice!r}: give one another name, with tool(function, name=...)")

    def __len__(self) -> int:
        return len(self.tools)

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """Schemas of the tools, for a chat template or an endpoint."""
        return tuple(each.schema for each in self.tools.values())

    async def run(self, calls: Sequence[Call]) -> list[ToolResult]:
        """Run calls in parallel, each with the deadline of its tool, and return their results in order.

        Raises only `RlsysError`, exceptions of moves, and cancellation, which also reaches the tools.
        """
        try:
            async with asyncio.TaskGroup() as group:
                results = [group.create_task(self._result(call)) for call in calls]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        return [result.result() for result in results]

    async def _result(self, call: Call) -> ToolResult:
        start_s = time.monotonic()
        if isinstance(call, Malformed):
            return ToolResult(f"This call cannot be read: {call.problem}", "malformed", 0.0)
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult(self._unknown(call.name), "unknown", 0.0)
        content, outcome = await self._answer(tool, call.arguments)
        shown, is_cut = _cut(content, tool.max_chars)
        return ToolResult(shown, outcome, time.monotonic() - start_s, is_cut)

    async def _answer(self, tool: Tool, arguments: Mapping[str, Json]) -> tuple[str, Answered]:
        """Run a tool within its deadline, and return its result as uncut text, and the outcome.

        Raises `RlsysError`, and any exception of a move.
        """
        deadline, function = asyncio.timeout(tool.timeout_s), tool.function
        is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
        room = _threads.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
        try:
            given = tool.validate_arguments(arguments)
            if not tool.is_move:
                async with nullcontext() if is_async else room, deadline:
                    value = function(**given) if is_async else await in_thread(function, given)
                    if inspect.isawaitable(value):
                        value = await value
                return (value if isinstance(value, str) else to_json(value, fallback=str).decode()), "ok"
        except RlsysError:
            raise
        except ValidationError as error:
            return _complaint(tool, error), "error"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "CancelledError: the tool cancelled itself", "error"
        except (Exception, SystemExit) as error:  # noqa: BLE001  (any exception becomes a result for the model)
            if deadline.expired():
                return f"{tool.name} took longer than its {tool.timeout_s:g} s", "timeout"
            return f"{type(error).__name__}: {error}", "error"
        return await cast("Callable[..., Awaitable[str]]", function)(**given), "ok"

    def _unknown(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.tools, n=1)
        remedy = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(self.tools) or 'none'}"
        return f"No tool is called `{_cut(name, 100)[0]}`; {remedy}"


NO_TOOLS = Toolbox()
MAX_THREADS = 256
"""Concurrent calls of sync tools in one event loop; further calls wait, and their deadline starts after the wait."""
MAX_HANGING = 64
"""Threads of sync tools past their deadline, in one process, at which further calls of sync tools fail."""
_overdue: set[threading.Thread] = set()
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Slots for threads, by event loop. A call waits for one; unblocked at the latest by another call's deadline."""


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Call a sync function in a new daemon thread, so that a hanging call blocks neither other calls nor process exit.

    Raises `ToolError` while too many threads hang, or if the machine has no thread left. Waits for the thread;
    unblocked by the function's end, and the caller's deadline ends the wait.
    """
    _overdue.intersection_update([thread for thread in _overdue if thread.is_alive()])
    if len(_overdue) >= MAX_HANGING:
        raise ToolError(
            f"{MAX_HANGING} calls of sync tools ({', '.join(sorted({t.name for t in _overdue}))}) hang past their "
            "deadlines, and threads cannot be killed: give them time limits of their own, or make them async"
        )
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()  # a thread cannot be cancelled
    context = contextvars.copy_context()

    def work() -> None:
        try:
            answer.set_result(context.run(function, **arguments))
        except StopIteration as error:  # which no future takes
            answer.set_exception(RuntimeError(repr(error)))
        except BaseException as error:  # noqa: BLE001  (raised again at the await)
            answer.set_exception(error)

    thread = threading.Thread(target=work, name=getattr(function, "__name__", "tool"), daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ToolError(f"no thread can be started for the tool {thread.name!r}: {error}") from error
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        _overdue.add(thread)
        raise


def _cut(text: str, most: int) -> tuple[str, bool]:
    """Cut a text to `most` characters, with a note; an unpaired surrogate becomes `?`."""
    shown = text[:most].encode(errors="replace").decode()
    if len(text) <= most:
        return shown, False
    return f"{shown}\n[cut: the first {most} of {len(text)} characters]", True


# ------------------------------------------------------------------------------------------------------------ arguments


class _Untitled(GenerateJsonSchema):
    """JSON schema without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: CoreSchema | Any) -> bool:  # noqa: ANN401  (as the base has it)
        return False


def _arguments_of(function: Callable[..., Any], types: Mapping[str, Any], name: str) -> type[BaseModel]:
    """Build a model whose fields have the function's parameters as aliases, so that any parameter name is allowed."""
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        where = f"parameter {parameter.name!r} of the tool {name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{where} cannot be given by name; tools take plain named parameters")
        if parameter.name not in types:
            raise TypeError(f"{where} has no type: annotate it, as in `query: str`")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{number}"] = (types[parameter.name], Field(default, alias=parameter.name))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        raise TypeError(f"the signature of the tool {name!r} has no schema: {error.message}") from error


def _complaint(tool: Tool, error: ValidationError) -> str:
    """Describe invalid arguments to the model, also for a `ValidationError` that the tool itself raised."""
    problems = [
        f"{'.'.join(map(str, detail['loc'])) or 'arguments'}: {detail['msg']}"
        for detail in error.errors(include_url=False, include_input=False)
    ]
    return f"`{tool.name}` was called with wrong arguments: {'; '.join(problems)}"
