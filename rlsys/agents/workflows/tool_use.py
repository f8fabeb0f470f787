"""Workflow of one agent that calls tools until it answers, and what workflows with tools share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Annotated, TypeVar, cast

from pydantic import AfterValidator, ValidationError

from rlsys.agents.agent import appended, messages_of
from rlsys.agents.tools import Answered, Tool, Toolbox, tool
from rlsys.agents.workflow import Session, Workflow
from rlsys.types import Json, Message, Prompt
from rlsys.util.importing import imported

T = TypeVar("T")


@cache
def load_tool(spec: str) -> Tool:
    """Import the tool, or the typed function, `module:name`. Raises `ValueError` that states the problem."""
    found = imported("tool", spec)
    if isinstance(found, Tool):
        return found
    try:
        return tool(cast("Callable[..., object]", found))
    except TypeError as error:
        raise ValueError(f"the tool {spec!r}: {error}") from error


def toolbox_of(specs: Iterable[str]) -> Toolbox:
    """Collect tools by name. Raises `ValueError` for an invalid tool, and for two of the same name."""
    return Toolbox(*map(load_tool, specs))


def loadable(load: Callable[[T], object]) -> AfterValidator:
    """Validator of names that `load` imports: a configuration with an invalid one is refused when it is read."""

    def loaded(spec: T) -> T:
        load(spec)
        return spec

    return AfterValidator(loaded)


ToolNames = Annotated[tuple[str, ...], loadable(toolbox_of)]
"""Tools, each as `module:name`."""


@dataclass(frozen=True, kw_only=True)
class ToolUse(Workflow):
    """One agent calls tools, also several in one reply, until it replies without a call: that reply is its answer.
    If turn `max_turns` still calls tools, the episode is truncated."""

    tools: ToolNames
    """Typed Python functions, as `module:function`; their signatures and docstrings describe them to the model."""
    system: str = "Call tools where they help. Then answer without calling any."
    """System message of the agent."""

    def toolbox(self) -> Toolbox:
        """All tools of an episode."""
        return toolbox_of(self.tools)

    async def run(self, session: Session) -> None:
        await session.agent("policy").use(opened(self.system, session.task.prompt), self.toolbox())


class Moves(Toolbox):
    """Tools that are part of a workflow, such as starting subagents, together with other tools.

    A workflow's tool has no deadline, since it may sample, and its exceptions are raised: a bug, or an `AgentStopped`.
    Invalid arguments are reported to the model, and long results are cut, as for any tool.
    """

    def __init__(self, *moves: Callable[..., Awaitable[str]], others: Toolbox | None = None) -> None:
        """Raises `ValueError` for two tools of the same name."""
        mine = [_described(move) for move in moves]
        super().__init__(*mine, *(others.tools.values() if others else ()))
        self._moves: frozenset[str] = frozenset(each.name for each in mine)
        if isinstance(others, Moves):
            self._moves |= others._moves

    async def _answer(self, tool: Tool, arguments: Mapping[str, Json]) -> tuple[str, Answered]:
        given: Mapping[str, object] | None = None
        with suppress(ValidationError):
            given = tool.validated(arguments)
        if given is None or tool.name not in self._moves:
            return await super()._answer(tool, arguments)
        return await cast("Callable[..., Awaitable[str]]", tool.function)(**given), "ok"


_DESCRIBED: dict[CodeType, Tool] = {}


def _described(move: Callable[..., Awaitable[str]]) -> Tool:
    """Convert a workflow's function to a tool. A schema takes a millisecond, so it is cached by the function's code,
    since the function references its session. Defaults are part of a schema, so they prevent caching."""
    function = cast("FunctionType", move)
    if function.__defaults__ or function.__kwdefaults__:
        return tool(move)
    if function.__code__ not in _DESCRIBED:
        _DESCRIBED[function.__code__] = replace(tool(move), function=_nothing)
    return replace(_DESCRIBED[function.__code__], function=move)


def _nothing() -> None:
    """Placeholder for the function in a cached tool."""


def opened(system: str, prompt: Prompt, then: str = "") -> tuple[Message, ...]:
    """Build the first messages of a conversation.

    A system message before others in `prompt` is appended to `system`, and `then` to the last message.
    """
    first, messages = messages_of(system, "system"), messages_of(prompt)
    if len(messages) > 1 and messages[0]["role"] == "system":
        first, messages = appended(first, messages[0]["content"]), messages[1:]
    return first + (appended(messages, then) if then else messages)
