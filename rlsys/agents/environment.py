"""Environment that an agent acts on, for one episode: `reset`, `step`, and tools.

class Guess(Environment):
    async def reset(self, task: Task, seed: int) -> Prompt:
        self.secret = Random(seed).randint(1, 100)
        return "Guess a number from 1 to 100."

    async def step(self, reply: str) -> Step:
        is_right = reply.strip() == str(self.secret)
        return Step("Right." if is_right else "Wrong.", reward=float(is_right), is_done=is_right)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from types import ModuleType

from rlsys.agents.session_budget import append_paragraph, messages_of
from rlsys.agents.tools import NO_TOOLS, Toolbox
from rlsys.errors import ConfigError
from rlsys.types import Json, Prompt, Task
from rlsys.util.importing import import_from_here

ADAPTERS = {
    "gymnasium": "rlsys.agents.environments.gymnasium:Gymnasium",
    "reasoning_gym": "rlsys.agents.environments.reasoning_gym:ReasoningGym",
    "openenv": "rlsys.agents.environments.openenv:OpenEnv",
    "mcp": "rlsys.agents.environments.mcp:Mcp",
}
"""Prefix before the colon -> the class that takes the rest."""


@dataclass(frozen=True)
class Step:
    """Result of one reply."""

    observation: Prompt
    """The agent's next prompt."""
    reward: float | None = None
    """Reward of this step; None if the environment gives none."""
    is_done: bool = False
    """True if the episode is over."""
    is_truncated: bool = False
    """True if the episode was cut short, for example by a limit on steps."""
    info: Mapping[str, Json] = field(default_factory=dict)


class Environment:
    """Base class of environments. Single use; exchanges messages, never tokens. Enter it with `Session.enter`.

    Raise `ToolError` for a failure that the policy did not cause: the episode then fails, and is left out of training.
    """

    tools: Toolbox = NO_TOOLS
    """Tools that the agent may call in this environment."""
    opening: Prompt = ""
    """The first prompt, as returned by `reset`; set by `Session.enter`."""

    async def reset(self, task: Task, seed: int) -> Prompt:
        """Start the episode, and return the agent's first prompt. All episodes of a group get the same seed."""
        raise NotImplementedError(f"{type(self).__name__} cannot begin: implement `reset`")

    async def step(self, reply: str) -> Step:
        """Apply the agent's reply."""
        raise NotImplementedError(f"{type(self).__name__} takes no replies: implement `step`")

    async def close(self) -> None:
        """Release all resources. Called once per episode, however it ended, even if `reset` raised."""


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


def credential(key: str, variable: str) -> str:
    """Credential in the environment variable that the configuration names in `key`. Raises `ConfigError` if there is
    none."""
    if not (value := os.environ.get(variable)):
        raise ConfigError(f"{key}: the environment has no {variable}; set it before the run, or its cluster, starts")
    return value


def needs(package: str, extra: str) -> ModuleType:
    """Import an optional package. Raises `ConfigError` that names the extra to install."""
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{error}; pip install rlsys[{extra}]") from error


def join_observation(prompt: Prompt, observation: str) -> Prompt:
    """Join a task's prompt and the first observation into the agent's first prompt."""
    if isinstance(prompt, str):
        return "\n".join(filter(None, (prompt, observation)))
    return (
        append_paragraph(prompt, observation) if prompt[-1]["role"] == "user" else (*prompt, *messages_of(observation))
    )


def _class_at(spec: str) -> Callable[..., Environment]:
    module, _, name = spec.partition(":")
    import_from_here()
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(f"`{scheme}:...`" for scheme in ADAPTERS)
        raise ConfigError(f"environment {spec!r}: {error}; give {known} or `module:Name`") from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"environment {spec!r} is not a subclass of rlsys.agents.environment.Environment")
    return found
