"""Environments for tests: an OpenEnv server, one of Gymnasium's, and some that break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import gymnasium
from websockets.asyncio.server import ServerConnection, serve

from rlsys.agents.environment import Environment, Step
from rlsys.testing import FakeEnvironment
from rlsys.types import Prompt, Task


@asynccontextmanager
async def openenv_server(fault: str = "") -> AsyncIterator[str]:
    """The URL of a server that speaks OpenEnv's protocol, one `FakeEnvironment` a session.

    `fault`: `garbage` answers in something else, `deep` in JSON that no parser takes, `leave` closes the connection at
    the first step, `full` takes no session, `broken` says that the environment raised.
    """

    async def session(connection: ServerConnection) -> None:
        world, opening = FakeEnvironment(), ""
        async for text in connection:
            message = json.loads(text)
            kind, data = message["type"], message.get("data", {})
            if kind == "close" or (kind == "step" and fault == "leave"):
                return
            if fault == "garbage" and kind == "step":
                await connection.send("<html>")
            elif fault == "deep" and kind == "step":
                await connection.send("[" * 100_000)
            elif fault == "full":
                await connection.send(_error("CAPACITY_REACHED", "no room for another session"))
            elif fault == "broken" and kind == "step":
                await connection.send(_error("EXECUTION_ERROR", "division by zero"))
            elif kind == "reset":
                opening = await world.reset(Task(id="t", prompt=""), data["seed"])
                await connection.send(_observation(Step(opening)))
            elif set(data) != {"guess"}:
                await connection.send(_error("VALIDATION_ERROR", "guess: Field required"))
            else:
                await connection.send(_observation(await world.step(str(data["guess"]))))

    async with serve(session, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _observation(step: Step) -> str:
    told = {"text": step.observation}
    return json.dumps(
        {"type": "observation", "data": {"observation": told, "reward": step.reward, "done": step.is_done}}
    )


def _error(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})


class GuessEnv(gymnasium.Env):
    """`FakeEnvironment` as Gymnasium has it: numbers in, text out."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012  (as its base declares it)

    def __init__(self, render_mode: str | None = None) -> None:
        self.action_space = gymnasium.spaces.Discrete(10, start=1)
        self.observation_space = gymnasium.spaces.Text(30)
        self.render_mode = render_mode
        self.world = FakeEnvironment()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        opening = asyncio.run(self.world.reset(Task(id="t", prompt=""), seed))
        assert isinstance(opening, str)
        return opening, {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        step = asyncio.run(self.world.step(str(action)))
        assert isinstance(step.observation, str)
        return step.observation, step.reward or 0.0, step.is_done, step.is_truncated, {}

    def render(self) -> str:
        return f"[{10 - self.world.tries % 10}]"


gymnasium.register("tests/Guess-v0", entry_point="tests.worlds:GuessEnv", disable_env_checker=True)


class Broken(Environment):
    """Raises, hangs or gives no number where it is told to."""

    closed: ClassVar[list[str]] = []
    """What each instance was to break, as it is closed."""

    def __init__(self, what: str, how: str = "raise") -> None:
        self.what, self.how = what, how

    async def reset(self, task: Task, seed: int) -> Prompt:
        await self._break("reset")
        return task.prompt

    async def step(self, reply: str) -> Step:
        await self._break("step")
        return Step("", reward=float("nan") if self.how == "nan" else 1.0, is_done=True)

    async def close(self) -> None:
        self.closed.append(self.what)
        await self._break("close")

    async def _break(self, what: str) -> None:
        if what == self.what and self.how == "hang":
            await asyncio.Event().wait()
        if what == self.what and self.how == "raise":
            raise ZeroDivisionError("by zero")
