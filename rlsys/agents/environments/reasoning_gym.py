"""Tasks of reasoning-gym as an environment: each group gets a new task, made from its seed.

    workflow: {type: play, environment: "reasoning_gym:basic_arithmetic", args: {max_digits: 3}}

The task's prompt comes first, then the question. For a fixed set of tasks, write them to a file instead, and score
with the reward function `reasoning_gym`, see `rlsys.rewards.reasoning_gym_reward`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rlsys.agents.environment import Environment, Step, join_observation, needs
from rlsys.agents.tools import in_thread
from rlsys.errors import ConfigError
from rlsys.types import Json, Prompt, Task


class ReasoningGym(Environment):
    """Environment of one question; the data set that made the question scores the reply from 0 to 1."""

    def __init__(self, name: str, *, tag: str = "answer", **args: Json) -> None:
        """The answer is the last `<tag>...</tag>` of a reply, else the whole reply; `args` go to `create_dataset`.

        Raises `ConfigError` for an unknown data set; `reset` raises it if the data set does not take these arguments.
        """
        self._gym = needs("reasoning_gym", "gym")
        if name not in (known := needs("reasoning_gym.factory", "gym").DATASETS):
            close = get_close_matches(name, known, n=3) or known
            raise ConfigError(
                f"environment 'reasoning_gym:{name}': there is no such task; there are {', '.join(close)}"
            )
        self._name, self._tag, self._args = name, tag, args
        self._made: Any = None

    async def reset(self, task: Task, seed: int) -> Prompt:
        self._made = await in_thread(self._create, {"seed": seed % 2**32})
        return join_observation(task.prompt, self._made[0]["question"])

    async def step(self, reply: str) -> Step:
        extracted = self._gym.utils.extract_answer(reply, tag_name=self._tag)
        answer = reply.strip() if extracted is None else extracted
        score = await in_thread(self._made.score_answer, {"answer": answer, "entry": self._made[0]})
        return Step("", reward=float(score), is_done=True)

    def _create(self, seed: int) -> Any:  # noqa: ANN401  (a class of the package)
        try:
            return self._gym.create_dataset(self._name, size=1, seed=seed, **self._args)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"environment 'reasoning_gym:{self._name}': {error}") from error
