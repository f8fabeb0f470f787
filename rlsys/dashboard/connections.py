"""Limits of the dashboard's connections: their number, and the time that requests and answers may take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections. They leave room for browsers, and none for whoever holds connections open."""

    most: int = 256
    """Open connections. A request over one more is answered 503."""
    request_s: float = 10.0
    """Seconds from the first byte of a request, or from the connection, to the end of its headers."""
    idle_s: int = 5
    """Seconds between two requests of a connection."""
    answer_s: float = 30.0
    """Seconds in which a client that reads too slowly has to catch up. Then the connection is closed."""


DEFAULT_LIMITS = ConnectionLimits()


def protocol_of(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol, which has no deadlines for headers and for reading answers, with both."""

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore[bad-override]
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._cancel()
            elif self._late is None:
                self._expect()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(limits.answer_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._catch_up()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            self._catch_up()
            super().connection_lost(exc)

        def _expect(self) -> None:
            self._late = self.loop.call_later(limits.request_s, self.transport.close)

        def _catch_up(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _cancel(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection
