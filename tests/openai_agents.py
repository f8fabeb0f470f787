"""Agents with an OpenAI client: functions and a program, for tests of the workflow `openai_agent`."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import openai
from openai import AsyncOpenAI

from rlsys.types import Task

PROGRAM = """
import json, os, sys, urllib.request
asked = sys.stdin.read()
body = json.dumps({"model": sys.argv[1], "messages": [{"role": "user", "content": asked}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("much text, which nobody reads" * 10_000)
sys.exit(f"cannot use {said!r}" if said == "no" else 0)
"""
"""Asks once what its input says, the model that its first argument names; fails if the reply is `no`."""


def client_of(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=10)


async def ask(base_url: str, api_key: str, *texts: str) -> str:
    said = ""
    messages: list[Any] = []
    async with client_of(base_url, api_key) as client:
        for text in texts:
            messages.append({"role": "user", "content": text})
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(reply.choices[0].message)
            said = reply.choices[0].message.content or ""
    return said


async def rewarded(task: Task, prompt: str, base_url: str, api_key: str) -> float:
    return float(await ask(base_url, api_key, prompt) == task.answer)


async def in_words(prompt: str, base_url: str, api_key: str) -> str:
    return (await ask(base_url, api_key, prompt)).upper()


async def two_turns(base_url: str, api_key: str, **_: object) -> None:
    await ask(base_url, api_key, "a", "b")


async def silent(prompt: str) -> None:
    pass


async def endless(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "a")
    await asyncio.Event().wait()


async def stubborn(base_url: str, api_key: str) -> None:
    """Turns until it is refused one, which it does not expect."""
    await ask(base_url, api_key, *"abcdef")


async def careless(base_url: str, api_key: str) -> None:
    """Makes nothing of a failure."""
    with suppress(openai.APIError):
        await ask(base_url, api_key, "a")


async def buggy(base_url: str, api_key: str) -> int:
    return 1 // len((await ask(base_url, api_key, "a"))[:0])


class MaxTurnsExceeded(Exception):
    """As the agent framework `openai-agents` raises it."""


async def gives_up(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "a", "b")
    raise MaxTurnsExceeded("Max turns (2) exceeded")


async def exits(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "a")
    sys.exit("cannot go on")


async def odd(base_url: str, api_key: str) -> list[str]:
    return [await ask(base_url, api_key, "a")]


async def asks_too_much(prompt: str, temperature: float) -> None: ...


def not_async(prompt: str) -> None: ...


async def odd_from_the_start(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "odd")


async def led_astray(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "a", "odd")


async def hasty(base_url: str, api_key: str) -> float:
    """Takes the first of two replies, and wants the other no more."""
    asked = [asyncio.create_task(ask(base_url, api_key, text)) for text in ("slow", "fast")]
    _, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(pending)
    return 1.0


async def refused_beside_a_reply(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "a")
    for answer in await asyncio.gather(*_long_and_short(base_url, api_key), return_exceptions=True):
        if isinstance(answer, Exception):
            raise RuntimeError("no answer") from answer


async def refused_in_a_group(base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, "a")
    async with asyncio.TaskGroup() as group:
        for each in _long_and_short(base_url, api_key):
            group.create_task(each)


def _long_and_short(base_url: str, api_key: str) -> tuple[Coroutine[Any, Any, str], ...]:
    return ask(base_url, api_key, "long"), ask(base_url, api_key, "short")


async def buggy_after_a_refusal(base_url: str, api_key: str) -> int:
    await ask(base_url, api_key, "a")
    try:
        await ask(base_url, api_key, "long")
    except openai.BadRequestError:
        return 1 // 0
    return 1


async def concluding(base_url: str, api_key: str) -> None:
    """Offers tools first, then none; and asks something else in between."""
    look: Any = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    async with client_of(base_url, api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "find"}]
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[look])
        messages += [reply.choices[0].message, {"role": "user", "content": "conclude"}]
        await ask(base_url, api_key, "aside")
        await client.chat.completions.create(model="policy", messages=messages)


async def summing_up(base_url: str, api_key: str) -> None:
    """Ends with a conversation of its own."""
    found = await ask(base_url, api_key, "find", "more")
    await ask(base_url, api_key, "aside")
    await ask(base_url, api_key, f"sum up: {found}")


async def by_hand(base_url: str, api_key: str) -> float:
    """Two turns over a connection of its own, without a client, which costs more than all the rest."""
    host, path = base_url.removeprefix("http://").split("/", 1)
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
    messages: list[Any] = []
    for text in "ab":
        messages.append({"role": "user", "content": text})
        body = json.dumps({"model": "policy", "messages": messages})
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        length = re.search(rb"Content-Length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        assert length is not None
        messages.append(json.loads(await reader.readexactly(int(length[1])))["choices"][0]["message"])
    writer.close()
    return 1.0


async def deaf(base_url: str, api_key: str) -> None:
    """Does not end when it is told to, the first time."""
    with suppress(asyncio.CancelledError):
        await endless(base_url, api_key)
    await asyncio.Event().wait()
