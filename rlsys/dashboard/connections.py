"""Limits of the dashboard's connections: their number, the time a request may take to arrive, and lines of its log."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LINES_PER_MINUTE = 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections. They leave room for browsers, and none for whoever holds connections open."""

    most: int = 256
    """Open connections. A request over one more is answered 503."""
    request_s: float = 10.0
    """Seconds from the first byte of a request, or from the connection, to the end of its headers."""
    idle_s: int = 5
    """Seconds between two requests of a connection."""


DEFAULT_LIMITS = ConnectionLimits()


def protocol_of(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol, which has no deadline for headers, with that deadline."""

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore[bad-override]
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._cancel()
            elif self._late is None:
                self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _expect(self) -> None:
            self._late = self.loop.call_later(limits.request_s, self.transport.close)

        def _cancel(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection


class BoundedLog(logging.Filter):
    """Filter that passes `LINES_PER_MINUTE` records a minute: who asks for errors all day must not fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._minute, self._num_passed = 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is one of the first of its minute."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._num_passed = minute, 0
        self._num_passed += 1
        return self._num_passed <= LINES_PER_MINUTE
