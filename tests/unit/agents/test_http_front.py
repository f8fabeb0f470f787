"""Attempts on both servers of OpenAI's paths: too much, too slow, without access, compressed. Each sees itself fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from contextlib import suppress

import pytest

from rlsys.gateway.gateway_server import HOST
from rlsys.gateway.http_front import MAX_BODY
from rlsys.util.connection_limits import SPARE, ConnectionLimits
from rlsys.util.logs import LINES_PER_MINUTE
from tests.growth import cpu_s
from tests.served_policies import HEALTHY, SERVERS, ServerName, Target, attack

pytestmark = pytest.mark.slow

HASTY = ConnectionLimits(request_s=0.3, body_s=0.1, answer_s=0.3)
UNFINISHED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> ServerName:
    return request.param


def error_of(body: bytes) -> str:
    """Message of an error in OpenAI's form."""
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


def test_unfinished_headers_do_not_block_a_server(server: ServerName, caplog: pytest.LogCaptureFixture):
    limits = ConnectionLimits(most=10, request_s=0.3)

    async def scenario(target: Target) -> int:
        held = []
        for _ in range(limits.most + 5 * SPARE):
            held.append(await asyncio.open_connection(HOST, target.port))
            held[-1][1].write(UNFINISHED)
        open_at_once = sum(not reader.at_eof() and reader.exception() is None for reader, _ in held)
        for reader, writer in held:  # the server closes each
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        return open_at_once

    with caplog.at_level(logging.DEBUG):
        assert attack(server, scenario, limits) < limits.most + 2 * SPARE
    assert sum(len(record.getMessage()) for record in caplog.records if record.name != "asyncio") < 20_000


def test_half_of_the_open_files_stay_free_for_the_work():
    assert ConnectionLimits(most=10**9).num_open < 10**9
    assert ConnectionLimits(most=3).num_open == 3


def test_a_late_connection_is_told_that_too_many_are_open(server: ServerName):
    async def scenario(target: Target) -> tuple[int, bytes]:
        held = [await asyncio.open_connection(HOST, target.port) for _ in range(2)]
        answer = await target.answer_to(target.request(HEALTHY))
        for _, writer in held:
            writer.close()
        return answer

    status, body = attack(server, scenario, ConnectionLimits(most=2))
    assert status == 503 and error_of(body) == "2 connections are open"


def test_headers_that_trickle_are_cut_off(server: ServerName):
    async def scenario(target: Target) -> float:
        begin_s = time.monotonic()
        reader, writer = await asyncio.open_connection(HOST, target.port)
        writer.write(UNFINISHED)

        async def trickle() -> None:
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0)

        trickling = asyncio.create_task(trickle())
        with suppress(ConnectionError):
            await reader.read()
        trickling.cancel()
        return time.monotonic() - begin_s

    assert attack(server, scenario, HASTY) < 10


def test_many_or_long_headers_are_refused(server: ServerName):
    async def scenario(target: Target) -> list[tuple[int, bytes]]:
        many = [f"X-{number}: y" for number in range(200)]
        return [await target.answer_to(target.request(HEALTHY, *odd)) for odd in (many, ["X: " + 10_000 * "y"])]

    for status, body in attack(server, scenario):
        assert status == 400 and error_of(body).startswith("the request cannot be read: ")


def test_a_body_that_does_not_arrive_ends_with_408(server: ServerName):
    async def scenario(target: Target) -> tuple[int, bytes]:
        return await target.answer_to(target.request(b"{", "Content-Length: 100"))

    status, body = attack(server, scenario, HASTY)
    assert status == 408 and error_of(body) == "the body did not arrive within 0.1 s"


def test_compressed_bodies_are_refused_and_not_decompressed(server: ServerName):
    bomb = gzip.compress(bytes(1 << 28))
    once_s = cpu_s(gzip.decompress, bomb)

    async def scenario(target: Target) -> list[tuple[int, bytes]]:
        codings = ("gzip", "deflate", "br", "zstd", "nonsense", "identity, gzip", "GZIP")
        begin_s = time.process_time()
        answers = [await target.answer_to(target.request(bomb, f"Content-Encoding: {each}")) for each in codings]
        answers.append(await target.answer_to(target.request(HEALTHY, "Content-Encoding: gzip")))
        assert time.process_time() - begin_s < 2 * once_s, "eight bombs"
        stranger = target.request(bomb, "Content-Encoding: gzip", access="Authorization: Bearer wrong")
        assert (await target.answer_to(stranger))[0] == 401
        assert (await target.answer_to(target.request(HEALTHY, "Content-Encoding: identity")))[0] == 200
        return answers

    for status, body in attack(server, scenario):
        assert status == 415 and "Content-Encoding" in error_of(body)


def test_access_is_checked_before_the_body_is_read(server: ServerName):
    async def scenario(target: Target) -> list[int]:
        wrong = "Authorization: Bearer wrong"
        begun = target.request(b"{", "Content-Length: 100", access=wrong)
        waiting = target.request(b"", "Content-Length: 100", "Expect: 100-continue", access=wrong)
        huge = target.request(b"", f"Content-Length: {1 << 40}", access=wrong)
        answers = []
        for sent in (begun, waiting, huge):
            reader, writer = await asyncio.open_connection(HOST, target.port)
            writer.write(sent)
            answers.append(int((await reader.readline()).split()[1]))
            writer.close()
        return answers

    assert attack(server, scenario) == [401, 401, 401]


@pytest.mark.parametrize("form", ["{}", "Bearer", "Bearer ", "Bearer{}", "Basic {}", "Bearer x{}", "Bearer {}x", "é"])
def test_only_a_bearer_token_gives_access(server: ServerName, form: str):
    async def scenario(target: Target) -> tuple[int, bytes]:
        access = f"Authorization: {form.format(target.key)}"
        return await target.answer_to(target.request(HEALTHY, access=access))

    status, body = attack(server, scenario)
    assert status == 401 and "token" in error_of(body)


def test_two_tokens_or_none_give_no_access(server: ServerName):
    async def scenario(target: Target) -> set[int]:
        second = f"Authorization: Bearer {target.key}"
        both = await target.answer_to(target.request(HEALTHY, second, access="Authorization: Bearer wrong"))
        none = await target.answer_to(target.request(HEALTHY, access=""))
        other = await target.answer_to(target.request(HEALTHY, f"x-api-key: {target.key}", access=""))
        return {status for status, _ in (both, none, other)}

    assert attack(server, scenario) == {401}


def test_every_error_of_http_is_in_the_form_of_the_api(server: ServerName):
    async def scenario(target: Target) -> list[tuple[int, bytes]]:
        sent = (
            b"nonsense\r\n\r\n",
            target.request(HEALTHY, "Content-Length: -1"),
            target.request(HEALTHY, path="/nothing"),
            target.request(HEALTHY, path="/models"),
            target.request(HEALTHY, "Expect: the unexpected"),
            target.request(bytes(MAX_BODY + 1)),
        )
        return [await target.answer_to(each) for each in sent]

    answers = attack(server, scenario)
    assert [status for status, _ in answers] == [400, 400, 404, 405, 417, 413]
    assert all(error_of(body) for _, body in answers)


def test_a_client_may_wait_until_it_is_asked_for_the_body(server: ServerName):
    async def scenario(target: Target) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, target.port)
        head, _, body = target.request(HEALTHY, "Expect: 100-continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        return asked

    assert attack(server, scenario) == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_damaged_requests_of_strangers_do_not_fill_the_log(server: ServerName, caplog: pytest.LogCaptureFixture):
    async def scenario(target: Target) -> None:
        for _ in range(3 * LINES_PER_MINUTE):
            assert (await target.answer_to(b"nonsense\r\n\r\n"))[0] == 400

    with caplog.at_level(logging.DEBUG):
        attack(server, scenario)
    assert sum(record.name.startswith(("aiohttp", "rlsys")) for record in caplog.records) <= 2 * LINES_PER_MINUTE
