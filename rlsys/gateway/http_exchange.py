"""HTTP of OpenAI's paths: reading a request, and sending its answer, whole or as events while the reply is sampled."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import orjson
from aiohttp import web

from rlsys.gateway.answers import AnswerForm, Choice, Refused
from rlsys.gateway.conversations import TellChoice
from rlsys.types import Json
from rlsys.util.bearer_token import bearer_token

RETRY_AFTER_S = 1
Replies: TypeAlias = tuple[Choice, ...]
Samples: TypeAlias = Callable[[TellChoice | None], Awaitable[Replies]]
"""Samples the replies to a request; raises `Refused`."""


def json_response(body: bytes) -> web.Response:
    """Answer with a JSON object."""
    return web.Response(body=body, content_type="application/json")


async def stream_response(
    request: web.Request, answer: AnswerForm, sample: Samples, write_s: float
) -> web.StreamResponse:
    """Answer with events while the replies are sampled.

    Consumes the texts so far; produces events. Waits for news of the reply, and for the client to read; unblocked by
    the end of the reply, by `write_s` without reading, or by the end of the connection, which cancels the sampling. A
    refusal before the first text is raised, and has its status; a later one is the last event.
    """
    texts: dict[int, str] = {}
    news = asyncio.Event()

    def tell(index: int, text: str) -> None:
        texts[index] = text
        news.set()

    async def sample_and_wake() -> Replies:
        try:
            return await sample(tell)
        finally:
            news.set()

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    work = asyncio.create_task(sample_and_wake())
    try:
        while not work.done():
            await news.wait()
            news.clear()
            if texts and not work.done():
                opening = b"" if response.prepared else answer.opening()
                chunk = b"".join(answer.news(index, text) for index, text in sorted(texts.items()))
                texts.clear()
                await _write(request, response, opening + chunk, write_s)
            await asyncio.sleep(0)  # `work` ends in the next turn of the event loop
        if not response.prepared:
            return web.Response(body=answer.opening() + answer.closing(await work), content_type="text/event-stream")
        try:
            rest = answer.closing(await work)
        except Refused as error:
            rest = answer.failure(error)
        await _write(request, response, rest, write_s)
        return response
    finally:
        work.cancel()
        await asyncio.wait((work,))


async def _write(request: web.Request, response: web.StreamResponse, data: bytes, write_s: float) -> None:
    """Write a part of an answer. Waits for the client to read; unblocked by its deadline, which ends the connection."""
    try:
        async with asyncio.timeout(write_s):
            if not response.prepared:
                await response.prepare(request)
            if data:
                await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read the answer") from None


def has_token(request: web.Request, token: str) -> bool:
    """Return True if a request has this bearer token. Comparison takes constant time."""
    given = bearer_token(request.headers.getall("Authorization", ())) or ""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def refusal_response(refused: Refused) -> web.Response:
    """Answer with an error in OpenAI's form."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == 503 else None
    body = orjson.dumps(refused.body)
    response = web.Response(status=refused.status, body=body, content_type="application/json", headers=headers)
    if refused.status == 408 or refused.code == "too_many_connections":
        response.force_close()
    return response


def model_object(name: str, created: int) -> dict[str, Json]:
    """Description of a model in OpenAI's form."""
    return {"id": name, "object": "model", "created": created, "owned_by": "rlsys"}
