"""Front of the HTTP servers with OpenAI's paths: limits, deadlines, access and bodies. Their handlers come after it.

A request passes the limit of connections, then the check of its path and its token, and only then is its body read. No
body is decompressed. Every error is in OpenAI's form, also those of HTTP itself:

| status | when |
| --- | --- |
| 400 | the request, its headers or its body are damaged |
| 404, 405 | no such path or method |
| 408 | the body takes longer than `ConnectionLimits.body_s` to arrive |
| 413 | the body is larger than `MAX_BODY` |
| 415 | the body is compressed: `Content-Encoding` is anything but `identity` |
| 417 | the header `Expect` asks for anything but `100-continue` |
| 500 | a bug; the log has its traceback |
| 503 | `too_many_connections`: more than `ConnectionLimits.num_open` |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from rlsys.gateway.answers import AnswerForm, Refused
from rlsys.gateway.http_exchange import Samples, json_response, refusal_response, stream_response
from rlsys.util.connection_limits import SPARE, ConnectionLimits
from rlsys.util.logs import BoundedLog

MAX_BODY = 8 << 20
"""Largest request, in bytes: two million tokens of text. Its JSON takes at most some 300 MB while it is read."""
_MAX_HEADERS, _MAX_HEADER = 128, 8190
"""Header lines of a request, and bytes of one."""
_BACKLOG = 128
DEFAULT_LIMITS = ConnectionLimits()
Admits: TypeAlias = Callable[[web.Request], object]
"""Checks the token of a request with a known path. Raises `Refused`: then its body is not read."""
_LOG = logging.getLogger(__name__)
_LOG.addFilter(BoundedLog())
_LOOP_LOG = BoundedLog()
"""For asyncio's errors: one for each connection that it cannot accept."""


class HttpFront:
    """Listening socket of one server, in the running event loop, and what all its requests pass."""

    def __init__(self, routes: Iterable[web.RouteDef], admits: Admits, limits: ConnectionLimits) -> None:
        self._admits, self._limits = admits, limits
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._admit])
        app.add_routes([web.route(r.method, r.path, r.handler, expect_handler=_check_expectation) for r in routes])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        self._socket: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Listen on a port, or on any free one if it is 0. Returns the port. Raises `OSError`."""
        logging.getLogger("asyncio").addFilter(_LOOP_LOG)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._handle, server.request_handler = server.request_handler, self._answer
        loop = asyncio.get_running_loop()
        connect = partial(_Connection, server, self._limits, self._limits.num_open, loop)
        self._socket = await loop.create_server(connect, host, port, backlog=_BACKLOG)
        return self._socket.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Close the socket and every connection."""
        if self._socket is not None:
            self._socket.close()
        await self._runner.cleanup()

    async def body(self, request: web.Request) -> bytes:
        """Read a body. Waits for the client; unblocked by the body, its deadline, or the end of the connection."""
        try:
            async with asyncio.timeout(self._limits.body_s):
                if "Expect" in request.headers:
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0  # the answer has not begun
                return await request.read()
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise Refused(400, f"the body cannot be read: {error}") from None

    async def send(
        self, request: web.Request, answer: AnswerForm, sample: Samples, *, is_streamed: bool | None
    ) -> web.StreamResponse:
        """Answer with the replies that `sample` returns: whole, or as events while they are sampled."""
        if is_streamed:
            return await stream_response(request, answer, sample, self._limits.answer_s)
        return json_response(answer.whole(await sample(None)))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. Waits for its handler, and for the client to read the answer; unblocked by both, by
        `answer_s` without reading, or by the end of the connection."""
        try:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            connection.check_room()
            response = await self._handle(request)
        except Refused as error:
            response = refusal_response(error)
        except web.HTTPException as error:
            response = refusal_response(Refused(error.status, error.text or error.reason))
        try:
            async with asyncio.timeout(self._limits.answer_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request without access, or with a compressed body, before its body is read."""
        if request.match_info.http_exception is None:
            self._admits(request)
        if any(coding.strip().lower() != "identity" for coding in request.headers.getall("Content-Encoding", ())):
            raise Refused(415, "bodies are not decompressed: send it as it is, without `Content-Encoding`")
        return await handler(request)


async def _check_expectation(request: web.Request) -> None:
    """Refuse an unknown expectation. `HttpFront.body` asks the client to go on, once the request is admitted."""
    if (expectation := request.headers["Expect"]).lower() != "100-continue":
        raise Refused(417, f"`Expect: {expectation}` is not supported: leave it out")


class _Connection(web.RequestHandler):
    """Connection of a client, which is closed at once if too many are open."""

    __slots__ = ("_is_late", "_most", "_server")

    def __init__(
        self, server: web.Server, limits: ConnectionLimits, most: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # pyrefly: ignore[bad-argument-type]  (as of `web.AppRunner`)
            logger=_LOG,
            keepalive_timeout=limits.request_s,
            lingering_time=limits.body_s,
            auto_decompress=False,
            max_headers=_MAX_HEADERS,
            max_field_size=_MAX_HEADER,
        )
        self._server, self._most, self._is_late = server, most, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        num_open = len(self._server.connections)
        self._is_late = num_open > self._most
        if num_open > self._most + SPARE and self.transport is not None:
            self.transport.abort()

    def check_room(self) -> None:
        """Raise `Refused` if this connection is one too many; earlier ones are served on."""
        if self._is_late and len(self._server.connections) > self._most:
            raise Refused(503, f"{self._most} connections are open", code="too_many_connections")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log an error, and answer it in OpenAI's form: a damaged request, or a bug."""
        super().handle_error(request, status, exc, message)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            text = "the server failed, see its log"
        else:
            text = f"the request cannot be read: {message}"
        response = refusal_response(Refused(status, text))
        response.force_close()
        return response
