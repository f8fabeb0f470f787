"""Ready-made reward function that asks a server of yours: one request for the completions of a task.

    POST http://host:8000/score
    {"task_id": "7", "source": "", "prompt": "2+3?", "answer": "5", "info": {"level": 1}, "completions": ["5", "6"]}

    {"rewards": [1.0, {"score": 0.0, "format": 1.0}]}

`prompt` is a text or a list of messages, and `info` has the other columns of the row. An entry of `rewards` is what a
function in a file could return: a number, an object with `score` and named parts, or null where it does not apply.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import orjson

from rlsys.errors import BUSY, CannotScore, EndpointDown
from rlsys.rewards.reward_registry import SERVER_TIMEOUT_S
from rlsys.types import Json, Message, Prompt

FIRST_WAIT_S = 0.5
"""Seconds before the first retry; each further one waits twice as long."""
_SHOWN = 200
"""Longest part of an answer in an error, in characters."""


class _TryAgain(Exception):
    """The server did not answer, or asked to be asked later."""

    def __init__(self, why: str, after_s: float | None = None, *, is_busy: bool = False) -> None:
        super().__init__(why)
        self.after_s, self.is_busy = after_s, is_busy


@dataclass(frozen=True, kw_only=True)
class RewardServer:
    """Rewards from a server over HTTP, see above.

    A request that is refused with 408, 429 or 5xx, or gets no answer, is made again: after `Retry-After`, or after
    twice as long each time. Without an answer in the end, the group waits for the server; with one that has not as many
    rewards as completions, they cannot be scored. All attempts must fit in `reward.timeout_s`.
    """

    url: str
    """Where to post, e.g. `http://127.0.0.1:8000/score`."""
    api_key_env: str | None = None
    """Environment variable with a key, sent as `Authorization: Bearer KEY`; None: the server needs no key."""
    timeout_s: float = SERVER_TIMEOUT_S
    """Deadline of a request with its retries, seconds; less than `reward.timeout_s`."""
    retries: int = 3
    """Retries of a failed request."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for invalid fields."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} is no address such as http://127.0.0.1:8000/score")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"api_key_env: the environment has no {self.api_key_env}")
        if not 0 < self.timeout_s < math.inf or self.retries < 0:
            raise ValueError("timeout_s should be above 0, and retries at least 0")

    async def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | Sequence[Message]],
        answer: Sequence[str | None],
        info: Sequence[Mapping[str, Json]],
        task_id: Sequence[str],
        source: Sequence[str],
    ) -> object:
        """Ask for the rewards of the completions of one task. Raises `CannotScore`, `EndpointDown`."""
        body = orjson.dumps(
            {
                "task_id": task_id[0],
                "source": source[0],
                "prompt": prompts[0],
                "answer": answer[0],
                "info": info[0],
                "completions": [text if isinstance(text, str) else text[0]["content"] for text in completions],
            }
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self._answer(body)
        except TimeoutError as error:
            raise EndpointDown(self.url, f"no answer within {self.timeout_s:g} s") from error
        if not isinstance(reply, dict) or "rewards" not in reply:
            raise CannotScore(f"{self.url} answered {_value_excerpt(reply)}, which has no `rewards`")
        return reply["rewards"]

    async def _answer(self, body: bytes) -> object:
        """Post until there is an answer. Waits between attempts; unblocked by the last of them."""
        headers = {"Content-Type": "application/json"}
        if self.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None)) as client:
            attempt = 0
            while True:
                try:
                    return await self._post_once(client, body)
                except _TryAgain as error:
                    if attempt == self.retries:
                        detail = f"asked {attempt + 1} times: {error}"
                        raise EndpointDown(self.url, detail, is_busy=error.is_busy) from None
                    await asyncio.sleep(FIRST_WAIT_S * 2**attempt if error.after_s is None else error.after_s)
                attempt += 1

    async def _post_once(self, client: aiohttp.ClientSession, body: bytes) -> object:
        """Post once. Raises `_TryAgain`, or `CannotScore` for a refusal that would be repeated."""
        try:
            async with client.post(self.url, data=body, allow_redirects=False) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise _TryAgain(str(error)) from error
        if response.status in (408, 429) or response.status >= 500:
            after_s = _seconds(response.headers.get("Retry-After"))
            is_busy = response.status in BUSY
            raise _TryAgain(f"HTTP {response.status}: {text[:_SHOWN]}", after_s, is_busy=is_busy)
        if response.status != 200:
            raise CannotScore(f"{self.url} answered HTTP {response.status}: {text[:_SHOWN]}")
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            raise CannotScore(f"{self.url} answered {_value_excerpt(text)}, which is not JSON") from None


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a `Retry-After`; None for a date, or without one."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else None


def _value_excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
