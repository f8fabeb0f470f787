"""Workflow of one agent that calls tools until it answers, and what workflows with tools share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Annotated, TypeVar, cast

from pydantic import AfterValidator

from rlsys.agents.session_budget import append_paragraph, messages_of
from rlsys.agents.tools import Tool, Toolbox, tool
from rlsys.agents.workflow import Session, Workflow
from rlsys.types import Message, Prompt
from rlsys.util.importing import import_object

T = TypeVar("T")


@cache
def load_tool(spec: str) -> Tool:
    """Import the tool, or the typed function, `module:name`. Raises `ValueError` that states the problem."""
    found = import_object("tool", spec)
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

    def check_spec(spec: T) -> T:
        load(spec)
        return spec

    return AfterValidator(check_spec)


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
        await session.agent("policy").use(opening_messages(self.system, session.task.prompt), self.toolbox())


_MOVES: dict[CodeType, Tool] = {}


def move(function: Callable[..., Awaitable[str]]) -> Tool:
    """Make a tool that is part of a workflow (`Tool.is_move`) from an async function.

    A schema takes a millisecond, so it is cached by the function's code, since the function references its session.
    Defaults are part of a schema, so they prevent caching.
    """
    mine = cast("FunctionType", function)
    if mine.__defaults__ or mine.__kwdefaults__:
        return replace(tool(mine), is_move=True)
    if mine.__code__ not in _MOVES:
        _MOVES[mine.__code__] = replace(tool(mine), function=print, is_move=True)  # a placeholder, called by nothing
    return replace(_MOVES[mine.__code__], function=mine)


def opening_messages(system: str, prompt: Prompt, then: str = "") -> tuple[Message, ...]:
    """Build the first messages of a conversation.

    A system message before others in `prompt` is appended to `system`, and `then` to the last message.
    """
    first, messages = messages_of(system, "system"), messages_of(prompt)
    if len(messages) > 1 and messages[0]["role"] == "system":
        first, messages = append_paragraph(first, messages[0]["content"]), messages[1:]
    return first + (append_paragraph(messages, then) if then else messages)
