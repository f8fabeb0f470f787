"""The engine for tests and laptops, and the reference for others: continuous batching over a Hugging Face model."""

from __future__ import annotations

from asyncio import Future, get_running_loop, to_thread
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from rlsys.errors import WorkerError
from rlsys.types import EngineStats, PolicyVersion, VersionSpan
from workers.engines.decoder import Decoder
from workers.engines.engine import Completion
from workers.engines.request_limits import RequestLimits
from workers.engines.resident_weights import LaidOut, Residents
from workers.engines.stepping import EngineJob, SteppingEngine
from workers.engines.weight_check import ModelShapes, check_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PREFILL_TOKENS = 4096
"""Tokens of one prefill; a longer prompt is prefilled alone."""


class LocalEngine(SteppingEngine):
    """Samples from `model`, up to `num_slots` requests at a time, on the device of the model.

    The engine owns the model; its thread runs until `close`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context: int,
        stop_token_ids: frozenset[int],
        kv_cache: Literal["keep", "recompute"] = "keep",
        resident_versions: int = 1,
        step_s: float = 600.0,
        load_s: float = 600.0,
        version: PolicyVersion = 0,
        name: str,
    ) -> None:
        """`kv_cache`: keep or recompute the cache of running requests when new weights replace the old; no effect with
        several `resident_versions`. `step_s` and `load_s` are the deadlines of a step and of a load, in seconds."""
        self._kv_cache, self._resident_versions, self._load_s = kv_cache, resident_versions, load_s
        self._shapes, self._residents = ModelShapes.of(model), Residents(model, version)
        self._staged: tuple[Mapping[str, Tensor], LaidOut] | None = None
        self._seeking_room: list[Future[None]] = []
        self._decoder = Decoder(model, num_slots=num_slots, max_context=max_context, stop_token_ids=stop_token_ids)
        limits = RequestLimits(max_context, self._decoder.num_vocab, stop_token_ids)
        super().__init__(name, version=version, num_slots=num_slots, limits=limits, step_s=step_s)

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return self._residents.versions

    async def stage(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.stage`: with several resident versions, lays out the new set in a separate thread."""
        check_weights(self._name, weights, self._shapes)
        if self._resident_versions == 1 or (self._staged is not None and self._staged[0] is weights):
            return
        self._staged = None
        future: Future[None] = get_running_loop().create_future()
        self._post(partial(self._seek_room, future), future, "waiting for room for one more version")
        await future
        self._staged = weights, await to_thread(self._residents.lay_out, weights)

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """See `Engine.load`. The hash is that of the model's parameters after the change."""
        load = self._replace if self._resident_versions == 1 else self._add
        return await self._ask(f"loading version {version}", partial(load, version, weights), self._load_s)

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        return await self._ask("scoring", partial(self._score, token_ids))

    def stats(self) -> EngineStats:
        num_running = len(self._decoder.jobs)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._waiting),
            kv_used=num_running / self._num_slots,
            num_tokens=self._decoder.num_tokens,
        )

    # ------------------------------------------------------------------------------------------- on the step thread

    def _start_up(self) -> None:
        self._decoder.warm_up()

    def _running(self) -> Sequence[EngineJob]:
        return self._decoder.jobs

    def _progress(self) -> Iterable[tuple[EngineJob, Sequence[int], Sequence[float]]]:
        return self._decoder.progress()

    def _advance(self) -> None:
        """Admit arrivals, then step every version in turn."""
        if arrivals := self._arrivals():
            num_before = len(self._decoder.jobs)
            self._residents.use(arrivals[0].version)
            self._decoder.admit(arrivals)
            self._stream(slot for slot in range(num_before, len(self._decoder.jobs)) if self._is_fresh(slot))
            self._release(self._decoder.ended())
        for run in self._decoder.runs():
            self._residents.use(self._decoder.jobs[run.start].version)
            self._decoder.step(run)
        self._stream(range(len(self._decoder.jobs)))
        self._release(self._decoder.ended())

    def _arrivals(self) -> list[EngineJob]:
        """Take the next waiting jobs, of one version, that fit in the free slots and one prefill."""
        jobs: list[EngineJob] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(self._decoder.jobs) + len(jobs) < self._num_slots:
            job = self._waiting[0]
            version, prompt = self._version_for(job), job.request.prompt_ids
            prompts.add(prompt)
            longest = max(longest, len(prompt))
            if jobs and (len(prompts) * longest > PREFILL_TOKENS or version != jobs[0].version):
                break
            job.marks.append((0, version))
            jobs.append(self._waiting.popleft())
        return jobs

    def _version_for(self, job: EngineJob) -> PolicyVersion:
        """The version of a continued job's last token, if it is loaded; else the newest."""
        if job.request.num_begun and job.request.begun is not None:
            came_to = job.request.begun.versions[-1].version
            return came_to if came_to in self.versions else self._version
        return self._version

    def _is_fresh(self, slot: int) -> bool:
        return not self._decoder.jobs[slot].request.num_begun

    def _stream(self, slots: Iterable[int]) -> None:
        """Send the newest token of the streamed jobs in `slots`."""
        for slot in slots:
            job = self._decoder.jobs[slot]
            if job.stream is not None:
                token, logprob = self._decoder.newest(slot)
                self._emit(job, Completion((token,), (logprob,), (VersionSpan(job.version, 1),), None))

    def _release(self, slots: Sequence[int], *, is_aborted: bool = False, keep_cache: bool = False) -> None:
        for job, completion in self._decoder.release(slots, is_aborted=is_aborted, keep_cache=keep_cache):
            self._answer(job.future, completion)
        if slots:
            self._evict()

    def _cut(self, is_meant: Callable[[EngineJob], bool], *, keep_cache: bool) -> None:
        slots = [slot for slot, job in enumerate(self._decoder.jobs) if is_meant(job)]
        self._release(slots, is_aborted=True, keep_cache=keep_cache)

    def _score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self._residents.use(self._version)
        return self._decoder.score(token_ids)

    def _replace(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """Replace the weights; running jobs continue under the new ones."""
        check_weights(self._name, weights, self._shapes)
        held = self._residents.overwrite(version, weights)
        if self._kv_cache == "recompute" and self._decoder.jobs:
            self._decoder.recompute(PREFILL_TOKENS)
        self._become(version, self._decoder.counts())
        return held

    def _add(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """Add a set of weights; running jobs end on the old ones."""
        check_weights(self._name, weights, self._shapes)
        staged, self._staged = self._staged, None
        if version not in self.versions and not self._has_room():
            held = ", ".join(map(str, self.versions))
            detail = f"requests run on each of the versions held: {held}; wait in `stage`, or raise resident_versions"
            raise WorkerError(self._name, f"loading version {version}", detail)
        if staged is not None and staged[0] is weights:
            laid_out = staged[1]
        else:
            laid_out = self._residents.lay_out(weights)
        self._residents.add(version, laid_out.tensors)
        self._version = version
        self._evict()
        return laid_out.hash

    def _has_room(self) -> bool:
        return len(self.versions) < self._resident_versions

    def _seek_room(self, future: Future[None]) -> None:
        self._seeking_room.append(future)
        self._evict()

    def _evict(self) -> None:
        """Evict versions without running jobs, and unblock a `stage` that waits for room."""
        self._residents.evict_all_but({job.version for job in self._decoder.jobs})
        while self._seeking_room and self._has_room():
            self._answer(self._seeking_room.pop(), None)
