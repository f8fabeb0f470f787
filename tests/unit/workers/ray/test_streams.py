"""Calls to actors: every caller gets an answer, of the right kind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rlsys.errors import DeadlineExceeded, WorkerError
from rlsys.testing.virtual_clock import run_virtual
from workers.ray.call_stream import GATHER_S, CallStream, answer_in_chunks
from workers.ray.worker_process import call


def test_a_timeout_raised_in_the_worker_is_no_deadline():
    raised = RayTaskError("run", "the traceback", TimeoutError("a socket timed out")).as_instanceof_cause()

    async def fails() -> None:
        raise raised

    async def scenario(deadline_s: float | None) -> None:
        with pytest.raises(WorkerError, match=r"rollout-0 while rolling out: .*the traceback") as error:
            await call(fails(), "rollout-0", "rolling out", deadline_s)
        assert not isinstance(error.value, DeadlineExceeded)

    for deadline_s in (None, 600.0):
        asyncio.run(scenario(deadline_s))


def test_a_late_answer_is_a_deadline_error():
    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.01 s"):
            await call(asyncio.Event().wait(), "rollout-0", "rolling out", 0.01)

    asyncio.run(scenario())


def test_a_broken_stream_fails_every_pending_call():
    class Broken:
        def _get_next_ref_n(self, n: int) -> Any:
            raise ValueError("no such reference")

    async def scenario() -> None:
        stream: CallStream[int, int] = CallStream("rollout-0", "rolling out", lambda requests: Broken())
        answers = await asyncio.wait_for(asyncio.gather(stream.call(1), stream.call(2), return_exceptions=True), 100)
        assert [str(answer) for answer in answers] == ["rollout-0 while rolling out: ValueError: no such reference"] * 2

    asyncio.run(scenario())


def test_answers_that_end_together_are_one_chunk_and_late_ones_keep_none_waiting():
    async def scenario() -> None:
        ends = [asyncio.Event() for _ in range(4)]

        async def work(request: int) -> tuple[int, str]:
            await ends[request].wait()
            if request < 2:
                await asyncio.sleep(GATHER_S / 3)
                ends[request + 1].set()
            return 10 * request, f"payload {request}"

        chunks = answer_in_chunks(range(4), work)
        ends[0].set()
        assert await anext(chunks) == tuple(f"payload {i}" for i in range(3))
        assert await anext(chunks) == [(i, 10 * i) for i in range(3)]
        ends[3].set()
        assert [chunk async for chunk in chunks] == [("payload 3",), [(3, 30)]]

    run_virtual(scenario())


def test_an_answer_is_not_lost_to_an_error_of_another_request():
    async def scenario() -> None:
        async def work(request: int) -> tuple[int, str]:
            if request:
                raise ValueError("a bug")
            return 7, "payload"

        chunks = answer_in_chunks(range(2), work)
        assert [await anext(chunks), await anext(chunks)] == [("payload",), [(0, 7)]]
        with pytest.raises(ValueError, match="a bug"):
            await anext(chunks)

    run_virtual(scenario())
