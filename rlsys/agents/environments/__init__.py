"""Adapters to third-party environments, behind `rlsys.agents.environment.Environment`, and lookup by name.

| name | environment | package (extra) |
| --- | --- | --- |
| `gymnasium:ID` | a text environment of Gymnasium | `gymnasium` |
| `reasoning_gym:TASK` | a task of reasoning-gym, a new one for each group | `gym` |
| `openenv:URL` | a session on an OpenEnv server | `openenv` |
| `mcp:COMMAND` or `mcp:URL` | the tools of an MCP server; the answer is scored by the run's reward | `mcp` |
| `module:Name` | your subclass of `Environment` | |
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
"""Prefix before the colon -> the class that takes the rest."""


def make(spec: str, args: Mapping[str, Json]) -> Environment:
    """Create an environment by its name, with these arguments.

    Raises `ConfigError` if it does not exist or does not take these arguments.
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
    """Import an optional package. Raises `ConfigError` that names the extra to install."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{error}; pip install rlsys[{extra}]") from error


def told(prompt: Prompt, observation: str) -> Prompt:
    """Join a task's prompt and the first observation into the agent's first prompt.

    In a conversation both are one user message, since many chat templates refuse two in a row.
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
