"""An engine without a model: a function supplies the tokens, one per request and tick.

For tests of workflows and workers: it fulfils the whole contract of `Engine` (versions, pause, load, abort, close).
"""

from __future__ import annotations

import sys
from asyncio import Event, TimerHandle, get_running_loop
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from rlsys.errors import WorkerDied, WorkerError
from rlsys.routing.requests import Completion, Request
from rlsys.types import EngineStats, PolicyVersion
from rlsys.weight_sync.manifest import TensorSpec
from workers.engines.engine import ModelShapes, check_weights
from workers.engines.stepping import EngineJob, RequestLimits, progress_of
from workers.transport.checksums import checksum_of, spec_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class _Job(EngineJob):
    script: Iterator[int]


class ScriptedEngine:
    """Answers each request with `reply(request)`: token ids, or text whose characters are used as token ids.

    A reply that ends before `max_new_tokens` finishes with `stop`, else with `length`; every logprob is 0. A request
    with `begun` tokens continues at that place of its reply. `num_slots` requests run, the others wait. A tick lasts
    `tick_s`. `load` expects `shapes`, by tensor name.
    """

    def __init__(
        self,
        reply: Callable[[Request], str | Sequence[int]],
        *,
        num_slots: int = 64,
        max_context: int = 4096,
        tick_s: float = 0.0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        resident_versions: int = 1,
        version: PolicyVersion = 0,
        name: str = "scripted",
    ) -> None:
        self.version = version
        self._reply, self._num_slots, self._tick_s = reply, num_slots, tick_s
        self._limits = RequestLimits(max_context, sys.maxunicode + 1)
        self._shapes, self._resident_versions, self._name = shapes, resident_versions, name
        self._weights: Mapping[str, Tensor] = {}
        self._jobs: list[_Job] = []
        self._timer: TimerHandle | None = None
        self._num_tokens = 0
        self._is_paused = self._is_closed = False
        self._awake = Event()
        self._awake.set()
        self._job_left = Event()

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return tuple(sorted({self.version, *(job.version for job in self._jobs if job.marks)}))

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        self._limits.check(self._name, request)
        reply = self._reply(request)
        script = islice(map(ord, reply) if isinstance(reply, str) else reply, request.num_begun, None)
        job = _Job(request, get_running_loop().create_future(), script=script)
        self._jobs.append(job)
        self._schedule()
        try:
            return await job.future
        finally:
            self._withdraw(job)

    def _withdraw(self, job: _Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self._job_left.set()

    def abort(self, request_id: str) -> None:
        for job in [job for job in self._jobs if job.request.id == request_id]:
            self._finish(job, "abort")

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
        self._check_open()
        return progress_of(self._jobs, known)

    async def pause(self) -> None:
        self._check_open()
        self._is_paused = True
        self._unschedule()

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.stage`. Unblocked by requests ending."""
        self._check_open()
        self._check(weights)
        while self._resident_versions > 1 and not self._has_room():
            self._job_left.clear()
            await self._job_left.wait()
            self._check_open()

    async def sleep(self) -> None:
        self._check_open()
        self._awake.clear()
        self._unschedule()

    async def wake(self) -> None:
        self._check_open()
        self._awake.set()
        self._schedule()

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        await self._awake.wait()
        self._check_open()
        self._check(weights)
        if self._resident_versions == 1:
            for job in self._jobs:
                if job.marks and job.version != version:
                    job.marks.append((len(job.output_ids), version))
        elif version not in self.versions and not self._has_room():
            held = ", ".join(map(str, self.versions))
            detail = f"requests run on each of the versions held: {held}; wait in `stage`, or raise resident_versions"
            raise WorkerError(self._name, f"loading version {version}", detail)
        self.version, self._weights = version, weights

    async def checksums(self) -> Mapping[TensorSpec, int]:
        await self._awake.wait()
        self._check_open()
        return {spec_of(name, tensor): checksum_of(tensor) for name, tensor in self._weights.items()}

    def _has_room(self) -> bool:
        return len(self.versions) < self._resident_versions

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        if self._shapes is not None:
            check_weights(self._name, weights, ModelShapes(self._shapes, frozenset(self._shapes)))

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        await self._awake.wait()
        self._check_open()
        return (0.0,) * (len(token_ids) - 1)

    async def resume(self) -> None:
        self._check_open()
        self._is_paused = False
        self._schedule()

    def stats(self) -> EngineStats:
        num_running = sum(bool(job.marks) for job in self._jobs)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._jobs) - num_running,
            kv_used=num_running / self._num_slots,
            num_tokens=self._num_tokens,
        )

    async def close(self) -> None:
        self._is_closed = True
        self._unschedule()
        self._awake.set()
        for job in self._jobs:
            if not job.future.done():
                job.future.set_exception(self._closed())
        self._jobs.clear()
        self._job_left.set()

    def _tick(self) -> None:
        """Sample the next token of every running job."""
        self._timer = None
        for job in self._jobs[: self._num_slots]:
            if not job.marks:
                job.marks.append((0, job.request.version_among(self.versions, self.version)))
            token = next(job.script, None)
            if token is None:
                self._finish(job, "stop")
                continue
            job.output_ids.append(token)
            job.logprobs.append(0.0)
            self._num_tokens += 1
            if job.request.num_begun + len(job.output_ids) == job.request.sampling.max_new_tokens:
                self._finish(job, "length")
        self._schedule()

    def _schedule(self) -> None:
        if self._jobs and self._timer is None and not self._is_paused and self._awake.is_set():
            self._timer = get_running_loop().call_later(self._tick_s, self._tick)

    def _unschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self, job: _Job, finish: Literal["stop", "length", "abort"]) -> None:
        self._withdraw(job)
        if not job.future.done():
            job.future.set_result(job.completion(finish))

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed()

    def _closed(self) -> WorkerDied:
        return WorkerDied(self._name, "sampling requests", "the engine was closed")
