"""Calls to actors: every caller gets an answer, of the right kind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rlsys.errors import DeadlineExceeded, WorkerError
from workers.ray.remote_proxy import CallStream, call


def test_a_timeout_that_the_worker_itself_raised_is_its_error_and_not_a_deadline():
    raised = RayTaskError("run", "the traceback", TimeoutError("a socket timed out")).as_instanceof_cause()

    async def fails() -> None:
        raise raised

    async def scenario(deadline_s: float | None) -> None:
        with pytest.raises(WorkerError, match=r"rollout-0 while rolling out: .*the traceback") as error:
            await call(fails(), "rollout-0", "rolling out", deadline_s)
        assert not isinstance(error.value, DeadlineExceeded)

    for deadline_s in (None, 600.0):
        asyncio.run(scenario(deadline_s))


def test_a_call_that_is_not_answered_in_time_is_a_deadline():
    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.01 s"):
            await call(asyncio.Event().wait(), "rollout-0", "rolling out", 0.01)

    asyncio.run(scenario())


def test_everybody_in_a_stream_that_breaks_in_an_unknown_way_is_told():
    class Broken:
        def _get_next_ref_n(self, n: int) -> Any:
            raise ValueError("no such reference")

    async def scenario() -> None:
        stream: CallStream[int, int] = CallStream("rollout-0", "rolling out", lambda requests: Broken())  # pyright: ignore
        answers = await asyncio.wait_for(asyncio.gather(stream.call(1), stream.call(2), return_exceptions=True), 5)
        assert [str(answer) for answer in answers] == ["rollout-0 while rolling out: ValueError: no such reference"] * 2

    asyncio.run(scenario())
