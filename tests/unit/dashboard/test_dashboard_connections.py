"""Connections that are held open, and their number."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rlsys.util.connection_limits import SPARE, ConnectionLimits
from rlsys.util.logs import LINES_PER_MINUTE, BoundedLog
from tests.dashboards import served
from tests.histories import small_run
from tests.processes import is_reset

pytestmark = pytest.mark.slow

HASTY = ConnectionLimits(most=3, request_s=0.3, answer_s=0.3)
REQUEST = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
def address(tmp_path: Path):
    small_run(tmp_path / "run")
    with served(tmp_path, limits=HASTY) as url:
        yield urlsplit(url).hostname, urlsplit(url).port


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET /", REQUEST + b"X-Slow: "], ids=["nothing", "a line", "headers"])
def test_a_request_that_never_ends_is_hung_up_on(address, sent: bytes) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.sendall(sent)
        assert rest_of(connection) == b""


def test_a_second_request_must_arrive_in_time_too(address) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.sendall(REQUEST + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"GET /api")
        assert b"HTTP/1.1" not in rest_of(connection)


def test_an_idle_connection_is_closed(address) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.sendall(REQUEST + b"\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answers_is_hung_up_on(address) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.setblocking(False)
        with suppress(BlockingIOError):  # until the server reads no more, since its answers are not read
            while True:
                connection.send((REQUEST + b"\r\n") * 1000)
        assert is_reset(connection)


def test_requests_beyond_the_limit_of_connections_get_503(address) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(HASTY.most)]
        held[-1].sendall(REQUEST + b"Connection: close\r\n\r\n")
        assert rest_of(held[-1]).startswith(b"HTTP/1.1 503")


def test_connections_far_over_the_limit_are_closed_at_once(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    with served(tmp_path, limits=ConnectionLimits(most=3)) as url, ExitStack() as stack:
        place = urlsplit(url).hostname, urlsplit(url).port
        held = [stack.enter_context(socket.create_connection(place, 10)) for _ in range(3 + SPARE + 1)]
        assert rest_of(held[-1]) == b"", "long before the deadline of its request"


def test_the_log_of_a_minute_is_bounded() -> None:
    log, record = BoundedLog(), logging.makeLogRecord({"msg": "refused"})
    assert sum(log.filter(record) for _ in range(10 * LINES_PER_MINUTE)) <= 2 * LINES_PER_MINUTE
