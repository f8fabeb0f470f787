"""Text environments of Gymnasium: observations and actions as text.

    workflow: {type: play, environment: "gymnasium:FrozenLake-v1", args: {actions: [left, down, right, up]}}

With `render_mode: ansi` an observation is the environment's rendering, else the value itself. For a `Text` space the
action is the reply; for a `Discrete` space it is the last action name or number in the reply. A reply without an action
gets the list of actions, and no step is made. The task's prompt comes first: the rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlsys.agents.environment import Environment, Step, join_observation, needs
from rlsys.agents.tools import in_thread
from rlsys.errors import ConfigError
from rlsys.types import Json, Prompt, Task
from rlsys.util.importing import import_from_here


class Gymnasium(Environment):
    """Environment of `gymnasium.make`. Its calls run in threads, one at a time."""

    def __init__(self, name: str, *, actions: Sequence[str] = (), **args: Json) -> None:
        """`actions` names the actions of a `Discrete` space, in order; `args` go to `gymnasium.make`.

        Raises `ConfigError` for an environment that does not exist, or whose actions cannot be written as text.
        """
        gymnasium = needs("gymnasium", "gymnasium")
        if ":" in name:  # a module to import, which registers the environment
            import_from_here()
        try:
            self.world: Any = gymnasium.make(name, **args)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"environment 'gymnasium:{name}': {error}") from error
        what, space = f"environment 'gymnasium:{name}'", self.world.action_space
        self._takes_text = isinstance(space, gymnasium.spaces.Text)
        if not self._takes_text and not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(f"{what} takes actions in {space}; give one with Discrete or Text")
        if actions and (self._takes_text or len(actions) != space.n):
            raise ConfigError(f"{what}: {len(actions)} names of actions do not fit {space}")
        numbers = () if self._takes_text else range(int(space.start), int(space.start + space.n))
        self._actions = {str(word): number for word, number in zip(actions or numbers, numbers, strict=True)}

    async def reset(self, task: Task, seed: int) -> Prompt:
        observation, _ = await in_thread(self.world.reset, {"seed": seed % 2**32})
        return join_observation(task.prompt, await self._observation_text(observation))

    async def step(self, reply: str) -> Step:
        action = reply if self._takes_text else self._action_in(reply)
        if action is None:
            return Step(f"No action is named in your reply. The actions are {', '.join(self._actions)}.")
        observation, reward, is_done, is_truncated, _ = await in_thread(self.world.step, {"action": action})
        return Step(await self._observation_text(observation), float(reward), bool(is_done), bool(is_truncated))

    async def close(self) -> None:
        await in_thread(self.world.close, {})

    async def _observation_text(self, observation: object) -> str:
        if self.world.render_mode == "ansi":
            return str(await in_thread(self.world.render, {})).strip("\n")
        return str(observation)

    def _action_in(self, reply: str) -> int | None:
        words = "|".join(map(re.escape, sorted(self._actions, key=len, reverse=True)))
        found = re.findall(rf"(?<![\w.-])(?:{words})(?!\w|\.\d)", reply, re.IGNORECASE)
        by_word = {word.lower(): number for word, number in self._actions.items()}
        return by_word[found[-1].lower()] if found else None
