"""The two servers of OpenAI's paths before the same policy, and raw requests to them: `Gateway` and `PolicyServer`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from rlsys.agents.agent import Policy
from rlsys.gateway.gateway_server import HOST, Endpoint, Gateway
from rlsys.gateway.http_front import DEFAULT_LIMITS
from rlsys.gateway.policy_server import PolicyServer
from rlsys.testing import ScriptedPolicy
from rlsys.util.connection_limits import ConnectionLimits
from tests.gateways import session_of, user

T = TypeVar("T")
ServerName: TypeAlias = Literal["gateway", "serve"]
SERVERS: tuple[ServerName, ...] = ("gateway", "serve")
KEY = "a token of some length"
HEALTHY = json.dumps({"model": "policy", "messages": [user("hi")]}).encode()


@dataclass(frozen=True)
class Target:
    """Server that listens."""

    port: int
    key: str
    root: str
    """Start of its paths: `/v1`, or `/s/0/v1`."""
    endpoint: Endpoint | None = None
    """Of the gateway's only session."""

    def request(self, body: bytes, *headers: str, path: str = "/chat/completions", access: str | None = None) -> bytes:
        """A request with its body. A path without a slash at its start is taken as it is."""
        where = f"{self.root}{path}" if path.startswith("/") else path
        head = [f"POST {where} HTTP/1.1", f"Host: {HOST}", "Connection: close"]
        head.append(f"Authorization: Bearer {self.key}" if access is None else access)
        if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
            head.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*filter(None, head), *headers, "", ""]).encode("latin-1", "replace") + body

    async def answer_to(self, sent: bytes) -> tuple[int, bytes]:
        """Status and body of the answer, which ends with the connection; 0 for a connection that is closed."""
        got = b""
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(HOST, self.port)
            try:
                writer.write(sent)
                await writer.drain()
                got = await reader.read()
            finally:
                writer.close()
        head, _, body = got.partition(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head, _, body = body.partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head else 0), body


@asynccontextmanager
async def listening(name: ServerName, policy: Policy, limits: ConnectionLimits) -> AsyncIterator[Target]:
    if name == "gateway":
        gateway = Gateway(limits)
        await gateway.start()
        try:
            async with gateway.serve(session_of(policy)) as endpoint:
                port = int(endpoint.base_url.split(":")[2].split("/")[0])
                yield Target(port, endpoint.api_key, "/s/0/v1", endpoint)
        finally:
            await gateway.close()
        return
    server = PolicyServer(lambda drawing: policy, "policy", KEY, limits)
    try:
        yield Target(await server.listen(HOST, 0), KEY, "/v1")
    finally:
        await server.close()


def attack(
    name: ServerName,
    scenario: Callable[[Target], Awaitable[T]],
    limits: ConnectionLimits = DEFAULT_LIMITS,
    policy: Policy | None = None,
) -> T:
    """What the scenario returns. After it a healthy request is answered, the event loop has got no error, and nothing
    was raised in the gateway's workflow."""
    problems: list[dict[str, object]] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with listening(name, policy or ScriptedPolicy(lambda prompt: "fine"), limits) as target:
            result = await scenario(target)
            while (status := (await target.answer_to(target.request(HEALTHY)))[0]) in (0, 503):
                pass  # the server has not seen earlier connections end
            assert status == 200
            if target.endpoint is not None:
                await target.endpoint.while_sound(asyncio.sleep(0))
        return result

    result = asyncio.run(asyncio.wait_for(main(), 100))
    assert not problems
    return result
