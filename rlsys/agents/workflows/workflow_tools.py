"""What workflows share: tools by name, tools that are part of the workflow itself, and how a conversation is opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import CodeType, FunctionType
from typing import Annotated, cast

from pydantic import AfterValidator, ValidationError

from rlsys.agents.tools import Answered, Tool, Toolbox, tool
from rlsys.types import Json, Message, Prompt
from rlsys.util.importing import imported


@cache
def load_tool(spec: str) -> Tool:
    """The tool, or the typed function, that `module:name` names. Raises `ValueError` saying what is wrong with it."""
    found = imported("tool", spec)
    if isinstance(found, Tool):
        return found
    try:
        return tool(cast("Callable[..., object]", found))
    except TypeError as error:
        raise ValueError(f"the tool {spec!r}: {error}") from error


def _loads(specs: tuple[str, ...]) -> tuple[str, ...]:
    toolbox_of(specs)
    return specs


ToolNames = Annotated[tuple[str, ...], AfterValidator(_loads)]
"""Tools, each as `module:name`. They are imported as a configuration is read, so that a wrong one is found there."""


def toolbox_of(specs: Iterable[str]) -> Toolbox:
    """The tools of these names. Raises `ValueError` for what is no tool, and for two of one name."""
    return Toolbox(*map(load_tool, specs))


class Moves(Toolbox):
    """Tools that are part of a workflow, such as calling in subagents, beside others.

    They have no deadline, since what they do may be sampling, and what they raise is raised: a bug at its own line, or
    an `AgentStopped`. What a model asks wrongly is told to it as by any tool, and what they return is cut as of any.
    """

    def __init__(self, *moves: Callable[..., Awaitable[str]], others: Toolbox | None = None) -> None:
        """Raises `ValueError` for two of one name."""
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
    """It as a tool. A workflow makes the same moves in every episode, and a schema takes a millisecond: it is kept by
    the code of the move, and nothing else, since a move holds on to its session. Defaults are part of a schema."""
    function = cast("FunctionType", move)
    if function.__defaults__ or function.__kwdefaults__:
        return tool(move)
    if function.__code__ not in _DESCRIBED:
        _DESCRIBED[function.__code__] = replace(tool(move), function=_nothing)
    return replace(_DESCRIBED[function.__code__], function=move)


def _nothing() -> None:
    """Stands for the function of a move in a description that is kept."""


def opened(system: str, prompt: Prompt, then: str = "") -> tuple[Message, ...]:
    """The first messages of a conversation.

    A system message that `prompt` begins with follows `system` in one, and `then` follows its last message in one:
    chat templates take no two of a role in a row.
    """
    *before, last = (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt
    if before and before[0]["role"] == "system":
        system, before = f"{system}\n\n{before[0]['content']}", before[1:]
    if then:
        last = Message(role=last["role"], content=f"{last['content']}\n\n{then}")
    return (Message(role="system", content=system), *before, last)
