"""Environments on an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), one WebSocket session each.

    workflow: {type: play, environment: "openenv:http://127.0.0.1:8000", args: {action: message}}

The protocol: the client sends `{"type": "reset" | "step" | "close", "data": {...}}`, where the data of `step`
are the action; the server answers `{"type": "observation", "data": {"observation": {...}, "reward": 1.0,
"done": false}}`, or `{"type": "error", "data": {"message": "...", "code": "..."}}`.

The server must allow enough concurrent sessions (its `max_concurrent_envs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlsys.agents.environment import Environment, Step, credential, join_observation, needs
from rlsys.agents.tool_calls import STRICT_JSON
from rlsys.errors import BUSY, ConfigError, EndpointDown, ToolError
from rlsys.types import Json, Prompt, Task

_MAX_MESSAGE_BYTES = 16 << 20
_ABOUT_THE_STEP = ("done", "reward", "metadata")


class OpenEnv(Environment):
    """One session on a server."""

    def __init__(
        self,
        url: str,
        *,
        action: str | None = None,
        reset: Mapping[str, Json] | None = None,
        api_key_env: str | None = None,
    ) -> None:
        """`action` is the field of an action that the reply fills; None: the reply must be an action, a JSON object.

        `reset` is sent with the seed. `api_key_env` names the environment variable with a key that the server gets as a
        bearer token. Raises `ConfigError` for an invalid URL, or a variable that is not set.
        """
        self._websockets = needs("websockets.asyncio.client", "openenv")
        self._errors = needs("websockets.exceptions", "openenv").WebSocketException
        self._refusal = needs("websockets.exceptions", "openenv").InvalidStatus
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ConfigError(f"environment 'openenv:{url}': give the server's address, such as http://127.0.0.1:8000")
        self._url = parts._replace(
            scheme=parts.scheme.replace("http", "ws"), path=parts.path.rstrip("/") + "/ws"
        ).geturl()
        self._proxy = None if parts.hostname in ("localhost", "127.0.0.1", "::1") else True
        self._action, self._reset = action, dict(reset or {})
        self._headers = {"Authorization": f"Bearer {credential('api_key_env', api_key_env)}"} if api_key_env else None
        self._connection: Any = None

    async def reset(self, task: Task, seed: int) -> Prompt:
        try:
            self._connection = await self._websockets.connect(
                self._url, additional_headers=self._headers, proxy=self._proxy, max_size=_MAX_MESSAGE_BYTES
            )
        except (OSError, self._errors) as error:
            status = error.response.status_code if isinstance(error, self._refusal) else 503
            if status < 500 and status not in BUSY:
                raise ToolError(f"{self._url} refuses the connection: {error}") from error
            raise EndpointDown(self._url, str(error), is_busy=status in BUSY) from error
        data = await self._request_data("reset", {"seed": seed % 2**31, **self._reset})
        return join_observation(task.prompt, _observation_text(data))

    async def step(self, reply: str) -> Step:
        action = {self._action: reply} if self._action else _object_in(reply)
        if action is None:
            return Step("Your reply is not an action: give one JSON object, and nothing else.")
        try:
            data = await self._request_data("step", action)
        except _Refused as error:
            return Step(f"Your action is refused: {error}")
        reward = data.get("reward")
        return Step(_observation_text(data), None if reward is None else float(reward), bool(data.get("done", False)))

    async def close(self) -> None:
        """End the session. A connection that is already lost is not an error."""
        if self._connection is None:
            return
        try:
            await self._connection.send(json.dumps({"type": "close"}))
        except self._errors:
            pass
        finally:
            await self._connection.close()

    async def _request_data(self, what: str, data: Mapping[str, Json]) -> dict[str, Any]:
        """Send a message, and return the data of the answer.

        If the connection is lost, raises `EndpointDown` for a reset, and `ToolError` for a step, which may have caused
        it. Raises `ToolError` for an answer of another form, `_Refused` for an invalid action.
        """
        try:
            await self._connection.send(json.dumps({"type": what, "data": data}))
            answer = STRICT_JSON.decode(await self._connection.recv(decode=True))
            kind, given = answer["type"], dict(answer["data"])
        except self._errors as error:
            problem = f"no answer to {what!r}: {type(error).__name__}: {error}"
            if what == "step":
                raise ToolError(f"{self._url} gave {problem}") from error
            raise EndpointDown(self._url, problem) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ToolError(f"{self._url} gave no answer to {what!r}: {type(error).__name__}: {error}") from error
        if kind != "error":
            return given
        problem = f"{given.get('message')} ({given.get('code')})"
        if what == "step" and given.get("code") == "VALIDATION_ERROR":
            raise _Refused(problem)
        raise ToolError(f"{self._url} answers to {what!r}: {problem}")


class _Refused(Exception):
    """The server refused this action, by the policy's mistake."""


def _object_in(reply: str) -> dict[str, Json] | None:
    """Parse the action in a reply; None if it is not one JSON object that can be sent."""
    try:
        value = STRICT_JSON.decode(reply)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses unpaired surrogates and 1e999
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _observation_text(data: Mapping[str, Any]) -> str:
    """Write an observation for the model: its only text field, or else its fields as JSON."""
    observation = data.get("observation", {})
    if not isinstance(observation, Mapping):
        return str(observation)
    shown = {name: value for name, value in observation.items() if name not in _ABOUT_THE_STEP}
    only = next(iter(shown.values()), "") if len(shown) <= 1 else None
    return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False)
