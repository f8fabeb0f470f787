"""Gateway under odd, damaged and unread requests: documented answers, and no hang. See also `test_http_front`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import TypeVar

import pytest

from rlsys.agents.session import Session
from rlsys.gateway.answers import MAX_TOLD
from rlsys.gateway.gateway_server import HOST, Endpoint, Gateway
from rlsys.gateway.http_front import DEFAULT_LIMITS
from rlsys.util.connection_limits import ConnectionLimits
from tests.damage import ODD_HEADERS, ODD_JSON, with_odd_value, with_other_bytes
from tests.gateways import CALL, WEATHER, session_of, user
from tests.processes import is_reset

pytestmark = pytest.mark.slow

T = TypeVar("T")

REQUESTS_PER_CASE = 25
ANSWERS = {200, 400, 401, 404, 405, 408, 410, 413, 415, 417}
"""Statuses that a damaged request may get, besides a closed connection."""
ODD_PATHS = (
    "/", "/s/0/v1/chat/completions/", "/s/1/v1/chat/completions", "/s/-1/v1/models", "/s/%ff/v1/models", "*",
    "/s/99999999999999999999/v1/models", "/s/\xff/v1/models", "/s/0/v1/models/%00", "/../etc/passwd", "x" * 9000,
)  # fmt: skip
BODY = {
    "model": "policy",
    "messages": [
        user("hi"),
        {"role": "assistant", "content": CALL, "tool_calls": [
            {"id": "call_0_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_0_0", "content": [{"type": "text", "text": "rain"}]},
    ],
    "tools": [WEATHER], "max_tokens": 5, "temperature": 0.5, "n": 1, "stream": False,
    "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 0, "tool_choice": "auto",
}  # fmt: skip


def request_to(endpoint: Endpoint, body: bytes, *headers: str, path: str = "/s/0/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", f"Host: {HOST}", f"Authorization: Bearer {endpoint.api_key}", "Connection: close"]
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, *headers, "", ""]).encode("latin-1") + body


def damaged(endpoint: Endpoint, random: Random) -> bytes:
    """A request with something wrong in its JSON, its headers, its path or its bytes."""
    body = json.dumps(with_odd_value(BODY, random)).encode()
    match random.randrange(6):
        case 0:
            return request_to(endpoint, body)
        case 1:
            odd = random.choice(ODD_JSON).encode()
            return request_to(endpoint, body.replace(b":", b": " + odd + b", ", 1) if random.random() < 0.5 else odd)
        case 2:
            return request_to(endpoint, body, *random.sample(ODD_HEADERS, random.choice([1, 1, 3])))
        case 3:
            return request_to(endpoint, body, path=random.choice(ODD_PATHS))
        case 4:
            return with_other_bytes(request_to(endpoint, body), random)
        case _:
            whole = request_to(endpoint, body)
            return whole[: random.randrange(len(whole))]


async def answer_to(endpoint: Endpoint, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer, which ends with the connection; 0 for a connection that is closed."""
    port = int(endpoint.base_url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection(HOST, port)
    got = b""
    with suppress(ConnectionError):
        writer.write(sent)
        await writer.drain()
        got = await reader.read()
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def served(
    scenario: Callable[[Endpoint, Session], Awaitable[T]],
    limits: ConnectionLimits = DEFAULT_LIMITS,
    reply: str = "fine",
) -> T:
    """What the scenario returns, in which the server left no error to its event loop."""
    problems: list[dict[str, object]] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        gateway, session = Gateway(limits), session_of(lambda prompt: reply)
        await gateway.start()
        try:
            async with gateway.serve(session) as endpoint:
                return await scenario(endpoint, session)
        finally:
            await gateway.close()

    result = asyncio.run(asyncio.wait_for(main(), 100))
    assert not problems
    return result


HEALTHY = json.dumps({"model": "policy", "messages": [user("hi")]}).encode()


def test_damaged_requests_are_answered_as_documented(fuzz_case: int):
    ask_damaged(Random(fuzz_case), REQUESTS_PER_CASE)


def ask_damaged(random: Random, num: int) -> None:
    """Send damaged requests to a gateway at the same time, and then a healthy one."""

    async def scenario(endpoint: Endpoint, session: Session) -> set[int]:
        requests = [damaged(endpoint, random) for _ in range(num)]
        answers = await asyncio.gather(*(answer_to(endpoint, sent) for sent in requests))
        assert (await answer_to(endpoint, request_to(endpoint, HEALTHY)))[0] == 200
        await endpoint.while_sound(asyncio.sleep(0))  # nothing was raised in the workflow
        return {status for status, _ in answers}

    statuses = served(scenario, ConnectionLimits(request_s=0.3, body_s=0.3))
    assert statuses <= {0, *ANSWERS}, statuses


def test_a_client_that_does_not_read_its_answers_is_hung_up_on():
    def is_cut_off(client: socket.socket, request: bytes) -> bool:
        with suppress(ConnectionError):
            client.sendall(request * 5000)  # the answers fill every buffer
        return is_reset(client)

    async def scenario(endpoint: Endpoint, session: Session) -> bool:
        name = 1500 * "x"  # the answer repeats it
        lines = [f"GET /s/0/v1/models/{name} HTTP/1.1", f"Host: {HOST}", f"Authorization: Bearer {endpoint.api_key}"]
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        with socket.create_connection((HOST, port), 20) as client:
            return await asyncio.to_thread(is_cut_off, client, "\r\n".join([*lines, "", ""]).encode())

    assert served(scenario, ConnectionLimits(answer_s=0.05))


def test_connections_over_the_cap_are_answered_503():
    async def scenario(endpoint: Endpoint, session: Session) -> None:
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        held = [await asyncio.open_connection(HOST, port) for _ in range(2)]
        status, body = await answer_to(endpoint, request_to(endpoint, HEALTHY))
        assert status == 503 and b"too_many_connections" in body
        reader, writer = held[0]
        writer.write(request_to(endpoint, HEALTHY))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200"), "an earlier connection is served"
        for _, writer in held:
            writer.close()
        while (await answer_to(endpoint, request_to(endpoint, HEALTHY)))[0] != 200:
            pass  # the server has not seen the connections end

    served(scenario, ConnectionLimits(most=2))


def test_requests_are_not_sent_back_in_errors():
    async def scenario(endpoint: Endpoint, session: Session) -> list[int]:
        long = "x" * 1_000_000
        bodies = [{"model": long}, {"model": "policy", "messages": [1] * 500_000}, {"messages": [{"role": long}]}]
        answers = [await answer_to(endpoint, request_to(endpoint, json.dumps(body).encode())) for body in bodies]
        assert {status for status, _ in answers} == {400}
        return [len(body) for _, body in answers]

    assert max(served(scenario)) < 2 * MAX_TOLD
