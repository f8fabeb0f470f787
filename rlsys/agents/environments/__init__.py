"""Environments that others made, each behind `rlsys.agents.environment.Environment`, and how one is found by its name.

| name | what | package (extra) |
| --- | --- | --- |
| `gymnasium:ID` | a text environment of Gymnasium | `gymnasium` |
| `reasoning_gym:TASK` | a task of reasoning-gym, a fresh one for each group | `gym` |
| `openenv:URL` | a session on an OpenEnv server | `openenv` |
| `mcp:COMMAND` or `mcp:URL` | the tools of an MCP server; the answer is scored by the run's reward | `mcp` |
| `module:Name` | a subclass of `Environment` of your own | |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from types import ModuleType

from rlsys.agents.environment import Environment
from rlsys.errors import ConfigError
from rlsys.types import Json, Message, Prompt

ADAPTERS = {
    "gymnasium": "rlsys.agents.environments.gymnasium:Gymnasium",
    "reasoning_gym": "rlsys.agents.environments.reasoning_gym:ReasoningGym",
    "openenv": "rlsys.agents.environments.openenv:OpenEnv",
    "mcp": "rlsys.agents.environments.mcp:Mcp",
}
"""What comes before the colon, and the class that takes what comes after it."""


def make(spec: str, args: Mapping[str, Json]) -> Environment:
    """A new environment by its name, with arguments of its own.

    Raises `ConfigError` if there is none, or it does not take these arguments.
    """
    scheme, _, rest = spec.partition(":")
    if scheme in ADAPTERS and not rest:
        raise ConfigError(f"environment {spec!r}: say which one after the colon")
    made, given = (_class_at(ADAPTERS[scheme]), (rest,)) if scheme in ADAPTERS else (_class_at(spec), ())
    try:
        signature(made).bind(*given, **args)
    except TypeError as error:
        raise ConfigError(
            f"environment {spec!r}: args: {error}; it takes {', '.join(signature(made).parameters)}"
        ) from error
    return made(*given, **args)


def needs(package: str, extra: str) -> ModuleType:
    """An optional package. Raises `ConfigError` that names the extra to install."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{error}; pip install rlsys[{extra}]") from error


def told(prompt: Prompt, observation: str) -> Prompt:
    """A task's prompt, then what the world looks like: the first thing that an agent is told.

    In a conversation both are one message of the user, since many chat templates refuse two in a row.
    """
    if isinstance(prompt, str):
        return "\n".join(filter(None, (prompt, observation)))
    *before, last = prompt
    if last["role"] != "user":
        return (*prompt, Message(role="user", content=observation))
    return (*before, Message(role="user", content=f"{last['content']}\n\n{observation}"))


def _class_at(spec: str) -> Callable[..., Environment]:
    module, _, name = spec.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(f"`{scheme}:...`" for scheme in ADAPTERS)
        raise ConfigError(f"environment {spec!r}: {error}; give {known} or `module:Name`") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"environment {spec!r} is not a subclass of rlsys.agents.environment.Environment")
    return found
