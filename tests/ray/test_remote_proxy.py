"""A worker in a process of its own: answers, references, streams, and errors that arrive as what they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial

import pytest

from rlsys.errors import DeadlineExceeded, ModelError, WorkerDied, WorkerError
from rlsys.util.deadlines import remote
from workers.ray.call_stream import CallStream, answer_in_chunks
from workers.ray.cluster import NO_MATHS
from workers.ray.worker_process import Remote, start


class Model:
    """Has no async method: one call at a time."""

    def __init__(self, text: str, more: str = "") -> None:
        if not text:
            raise ModelError("no such model")
        self.text = text + more

    @remote("repeating {times} times")
    def repeat(self, times: int) -> str:
        return self.text * times

    @remote("reading {path}")
    def read(self, path: str) -> None:
        raise OSError(f"no {path} here")

    def column(self, size: int) -> tuple[int, list[int]]:
        return size, list(range(size))

    def total(self, column: list[int]) -> int:
        return sum(column)


class Server:
    """Has async methods: many calls at once."""

    def __init__(self) -> None:
        self.opened, self.model = asyncio.Event(), Model("ab")

    async def wait(self) -> None:
        await self.opened.wait()

    async def open(self, *, key: int) -> int:
        self.opened.set()
        return key

    def double_each(self, numbers: list[int]) -> AsyncIterator[object]:
        return answer_in_chunks(numbers, self._double)

    async def _double(self, number: int) -> tuple[int, str]:
        return 2 * number, f"payload of {number}"

    @remote("hanging for {reason}", patience=0.5)
    async def hang(self, reason: str) -> None:
        await asyncio.Event().wait()

    async def die(self) -> None:
        os._exit(1)


@pytest.fixture
def model(cluster) -> Iterator[Remote[Model]]:
    made = start(Model, "model-0", partial(Model, "ab"), NO_MATHS, 60.0)
    yield made
    made.kill()


@pytest.fixture
def server(cluster) -> Iterator[Remote[Server]]:
    made = start(Server, "server-0", Server, NO_MATHS, 60.0, restarts=True)
    yield made
    made.kill()


def test_answers_come_back_and_references_stay_in_the_store(model):
    async def main() -> None:
        await model.setup("!")
        assert await model.call(Model.repeat, 2) == "ab!ab!"
        receipt, (column,) = await model.split(Model.column, 1, 4)
        assert receipt == 4
        assert await model.call(Model.total, column) == 6

    asyncio.run(main())


def test_errors_name_the_worker_and_the_phase(model, server):
    async def main() -> None:
        with pytest.raises(WorkerError, match=r"(?s)model-0 while reading a\.json: .*OSError: no a\.json here"):
            await model.call(Model.read, "a.json")
        with pytest.raises(DeadlineExceeded, match=r"server-0 while hanging for fun: no answer within 0\.2 s"):
            await server.within(0.4).call(Server.hang, "fun")

    asyncio.run(main())


def test_a_constructor_error_of_a_worker_keeps_its_type(cluster):
    async def main() -> None:
        broken = start(Model, "model-0", partial(Model, ""), NO_MATHS, 60.0)
        with pytest.raises(ModelError, match="no such model"):
            await broken.setup()
        await broken.end()

        async def until_the_kill_arrives() -> None:
            while True:
                with suppress(ModelError):
                    await broken.call(Model.repeat, 1)

        with pytest.raises(WorkerDied, match="model-0 while repeating 1 times"):
            await until_the_kill_arrives()

    asyncio.run(main())


def test_async_methods_serve_many_calls_at_once(server):
    async def main() -> None:
        waiting = asyncio.ensure_future(server.proxy.wait())
        assert await server.proxy.open(key=3) == 3
        await waiting
        assert await server.at(Model, "model").call(Model.repeat, 1) == "ab"

    asyncio.run(main())


def test_a_stream_answers_each_request_and_keeps_its_payload(server):
    async def main() -> None:
        stream = CallStream[int, int](
            "server-0", "doubling", lambda numbers: server.stream(Server.double_each, numbers)
        )
        answers = await asyncio.gather(*(stream.call(number) for number in range(3)))
        assert [answer for answer, _ in answers] == [0, 2, 4]
        assert [(await ref.chunk)[ref.index] for _, ref in answers] == [f"payload of {number}" for number in range(3)]

    asyncio.run(main())


def test_a_process_that_ray_restarts_builds_its_worker_again(server):
    async def main() -> None:
        await server.proxy.open(key=1)
        with pytest.raises(WorkerDied, match="server-0"):
            await server.call(Server.die)
        while True:
            try:
                await server.call(Server.open, key=2)
                break
            except WorkerDied:
                await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(main(), 200))
