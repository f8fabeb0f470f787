"""Failing steps of an engine: no caller waits forever, and every error names the engine and the version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import pytest

from rlsys.errors import DeadlineExceeded, WorkerDied, WorkerError
from rlsys.routing.requests import Completion, Request
from rlsys.testing.virtual_clock import VirtualLoop, run_virtual
from rlsys.types import EngineStats, Sampling
from rlsys.util import deadlines
from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.engine import EngineSpec
from workers.engines.stepping import EngineJob, SteppingEngine

if TYPE_CHECKING:
    from torch import Tensor


class Stuck(SteppingEngine):
    """Its steps do what a test says; it samples nothing."""

    def __init__(self, step: Callable[[], None], step_s: float) -> None:
        self._step = step
        self.looked = asyncio.Queue[None]()
        """One entry for every time the deadline was looked at."""
        self.jobs: list[EngineJob] = []
        spec = EngineSpec(model_path="", slots=8, max_context=64, step_s=step_s)
        super().__init__("rollout-7", spec, version=4, num_vocab=9, stop_token_ids=frozenset())

    def _watch(self) -> None:
        super()._watch()
        self.looked.put_nowait(None)

    def _is_busy(self) -> bool:
        return bool(self.jobs)

    def _advance(self) -> None:
        self.jobs += self._waiting
        self._waiting.clear()
        self._step()

    def _running(self) -> list[EngineJob]:
        return self.jobs

    def _cut(self, is_meant: Callable[[EngineJob], bool]) -> None:
        for job in [job for job in self.jobs if is_meant(job)]:
            self.jobs.remove(job)
            self._answer(job.future, Completion((), (), (), "abort"))

    def stats(self) -> EngineStats:
        return EngineStats(len(self.jobs), len(self._waiting), 0.0, 0)

    async def stage(self, weights: Mapping[str, Tensor]) -> None: ...

    async def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        await self._ask(f"loading version {version}", lambda: None)

    async def checksums(self) -> dict[TensorSpec, int]:
        return {}


def ask(name: str) -> Request:
    return Request(name, (1, 2), Sampling(max_new_tokens=5), seed=0)


async def ends_of(engine: Stuck) -> list[WorkerError]:
    """How two requests and a later one ended."""
    calls = [asyncio.create_task(engine.generate(ask(name))) for name in "ab"]
    ends: list[object] = [*await asyncio.gather(*calls, return_exceptions=True)]
    ends += await asyncio.gather(engine.generate(ask("late")), return_exceptions=True)
    assert all(isinstance(end, WorkerError) for end in ends)
    return [end for end in ends if isinstance(end, WorkerError)]


def test_a_hanging_engine_fails_every_request_within_its_deadline() -> None:
    evict = threading.Event()

    def hang() -> None:
        evict.wait()

    async def main() -> list[WorkerError]:
        engine = Stuck(hang, step_s=0.2)
        ends = await ends_of(engine)
        await engine.close()  # does not wait for the step either
        return ends

    ends = asyncio.run(asyncio.wait_for(main(), 100))
    evict.set()
    for end, name in zip(ends, ("a", "b", "late"), strict=True):
        assert isinstance(end, DeadlineExceeded)
        assert str(end).startswith(f"rollout-7 while sampling request {name} on version 4: no step ended within 0.2 s")


def test_a_dead_engine_fails_every_request_by_name_and_version() -> None:
    def explode() -> None:
        raise MemoryError("out of it")

    async def main() -> list[WorkerError]:
        engine = Stuck(explode, step_s=60.0)
        ends = await ends_of(engine)
        with pytest.raises(WorkerDied, match="while loading version 5 on version 4"):
            await engine.load(5, {})
        await engine.close()
        return ends

    for end, name in zip(asyncio.run(asyncio.wait_for(main(), 100)), ("a", "b", "late"), strict=True):
        assert isinstance(end, WorkerDied)
        assert f"rollout-7 while sampling request {name} on version 4: a step raised MemoryError: out of it" in str(end)
        assert isinstance(end.__cause__, MemoryError)


def test_progress_leaves_out_what_has_sampled_nothing() -> None:
    stepped = threading.Event()

    async def main() -> Mapping[str, Completion]:
        engine = Stuck(stepped.set, step_s=60.0)
        call = asyncio.create_task(engine.generate(ask("a")))
        await asyncio.to_thread(stepped.wait)
        assert engine.jobs
        progress = await engine.progress({"a": 0})
        await engine.close()
        await asyncio.gather(call, return_exceptions=True)
        return progress

    assert asyncio.run(asyncio.wait_for(main(), 100)) == {}


def test_an_idle_engine_is_not_taken_for_a_stuck_one() -> None:
    async def main() -> Completion:
        engine = Stuck(lambda: None, step_s=0.05)
        await engine.pause()
        call = asyncio.create_task(engine.generate(ask("a")))
        for _ in range(12):
            await engine.looked.get()
        assert not call.done()
        engine.abort("a")
        done = await call
        await engine.close()
        return done

    assert asyncio.run(asyncio.wait_for(main(), 100)).finish == "abort"


def test_suspended_time_does_not_count_against_a_step() -> None:
    began, evict = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        evict.wait()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        engine = Stuck(hang, step_s=100.0)
        call = asyncio.create_task(engine.generate(ask("a")))
        while not began.is_set():  # noqa: ASYNC110  (the step thread tells nobody)
            await asyncio.sleep(0)
        start_s = deadlines.now()
        for _ in range(3):
            await deadlines.sleep(25.0)
            loop.jump(3600.0)
        assert not call.done()
        with pytest.raises(DeadlineExceeded, match=r"no step ended within 100 s"):
            await call
        assert deadlines.now() - start_s <= 130.0
        evict.set()
        await engine.close()

    run_virtual(main())
