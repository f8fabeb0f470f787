"""Connections of the dashboard: their limits, which uvicorn has only in part."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlsys.util.connection_limits import SPARE, ConnectionLimits

DEFAULT_LIMITS = ConnectionLimits(most=256, request_s=10.0)
"""They leave room for browsers. The dashboard reads no bodies."""


def protocol_of(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol with what it lacks: deadlines for headers and for reading answers, and an end of
    connections far over the limit. To those a little over it uvicorn answers 503."""
    most = limits.num_open + SPARE

    class Connection(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore[bad-override]
            super().connection_made(transport)
            self._expect()
            if len(self.connections) > most:
                transport.abort()

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
