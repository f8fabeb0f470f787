"""Odd and damaged requests to the dashboard, as bytes: each is answered or refused, and none fails anything."""

from __future__ import annotations

import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from urllib.parse import quote, urlsplit

import pytest

from rlsys.util.connection_limits import ConnectionLimits
from tests.damage import ODD_HEADERS, ODD_JSON, ODD_VALUES, ODD_YAML, with_other_bytes
from tests.dashboards import served
from tests.histories import small_run

pytestmark = pytest.mark.slow

BY_DAY = 40
LONGEST_S, MOST_MB = 10.0, 500
PATHS = {
    "runs": {}, "run": {"run": "small"}, "metrics": {"run": "small"}, "alerts": {"run": "small"},
    "series": {"run": "small", "name": "reward/mean", "points": "10", "x": "step", "from": "0", "to": "9"},
    "groups": {"run": "small", "step": "3"}, "group": {"run": "small", "step": "1", "group_id": "0", "dataset": ""},
    "episode": {"run": "small", "step": "1", "group_id": "0", "episode": "0"},
    "task": {"run": "small", "task": "task-0"}, "ledger": {"run": "small"}, "failures": {"run": "small"},
    "cluster": {"run": "small", "from": "0", "to": "2e9", "width": "300"}, "evaluations": {"run": "small"},
    "machine": {"run": "small", "points": "20"}, "compare": {"run": "small"}, "tables": {"run": "small"},
    "table": {"run": "small", "table": "groups", "filter": "reward > 0", "search": "task", "order": "step desc",
        "show": "task", "group": "task", "from": "1", "to": "9", "offset": "0", "limit": "5"},
    "query": {"run": "small", "q": "select * from episodes where text like '%1%' order by reward"},
}  # fmt: skip
ODD_PATHS = (
    "/", "/index.html", "/app.js", "//", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/%00", "/%ff", "*",
    "x" * 9000, "/api", "/api/none", "/api/runs/", "/views/..", "/vendor/%5c..%5c..", "http://other/api/runs",
    "/api/%72uns", "/api/runs#x",
)  # fmt: skip
ODD_TEXTS = (
    *map(str, ODD_VALUES), *ODD_JSON, *ODD_YAML, "%", "%zz", "../small", "/etc/passwd", "small/",
    "*", "nan", "-inf", "1e999", "'", '"', "select", "(?R)", "a{2147483648}", "matches '('", "\x00", "é" * 3000,
    "small&run=small", "0x10", "1_000", " 1", "٣", "9" * 4000,
)  # fmt: skip
METHODS = ("GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "G" * 9000)
HEADERS = (
    *ODD_HEADERS, "Sec-Fetch-Site: cross-site", "Origin: http://other", "Origin: null", "Last-Event-ID: " + "9" * 5000,
    "Range: bytes=0-1,2-3", "If-None-Match: *", "If-Modified-Since: yesterday", "Accept-Encoding: *;q=-1",
    "Cookie: rlsys=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("asked") / "runs"
    small_run(folder / "small")
    with served(folder, limits=ConnectionLimits(request_s=0.5, body_s=0.5)) as url:
        yield url


def odd_request(random: Random, host: str) -> bytes:
    """A request with something wrong in its values, its path, its method, its headers or its bytes."""
    name = random.choice([*PATHS])
    values = dict(PATHS[name])
    for _ in range(random.choice([0, 1, 1, 2])):
        values[random.choice([*values, "run", "x"])] = random.choice(ODD_TEXTS)
    if values and random.random() < 0.1:
        values.pop(random.choice([*values]))
    encoded = "&".join(f"{key}={quote(text, errors='surrogatepass')}" for key, text in values.items())
    path = random.choice(ODD_PATHS) if random.random() < 0.1 else f"/api/{name}?{encoded}"
    method = random.choice(METHODS) if random.random() < 0.2 else "GET"
    headers = random.sample(HEADERS, 2) if random.random() < 0.2 else []
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    whole = "\r\n".join(lines).encode("latin-1", errors="replace")
    chance = random.random()
    if chance < 0.1:
        return with_other_bytes(whole, random)
    return whole[: random.randrange(len(whole))] if chance < 0.15 else whole


def status_of(sent: bytes, host: str, port: int) -> int:
    """Status of the answer to these bytes; 0 if the connection was closed without one."""
    received = b""
    with socket.create_connection((host, port), timeout=LONGEST_S) as connection, suppress(ConnectionError):
        connection.sendall(sent)
        while part := connection.recv(2**16):
            received += part
    return int(received.split(b" ", 2)[1]) if received.startswith(b"HTTP/1.1 ") else 0


def ask_odd(url: str, seed: str, num: int) -> Counter[int]:
    """Count the statuses of odd requests. Each is answered within `LONGEST_S`, none with a failure of the server."""
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    random, statuses = Random(seed), Counter[int]()
    for _ in range(num):
        sent = odd_request(random, address.netloc)
        begin_s = time.monotonic()
        status = status_of(sent, address.hostname, address.port)
        assert status < 500, sent[:2000]
        assert time.monotonic() - begin_s < LONGEST_S, sent[:2000]
        statuses[status] += 1
    healthy = f"GET /api/run?run=small HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode()
    assert status_of(healthy, address.hostname, address.port) == 200
    return statuses


def test_odd_requests_are_answered_and_fail_nothing(url: str) -> None:
    assert ask_odd(url, "day", BY_DAY)[200]


@pytest.mark.nightly
def test_thousands_of_odd_requests_cost_little(url: str) -> None:
    ask_odd(url, "warm", BY_DAY)
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    statuses = ask_odd(url, "night", 3000)
    assert min(statuses[200], statuses[404], statuses[422] + statuses[400]) > 100, statuses
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mb < MOST_MB
