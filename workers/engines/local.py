"""The engine of tests and laptops, and the reference for others: continuous batching in this process.

One thread owns all torch work; the event loop only posts to it and awaits futures.

    step thread    consumes: waiting jobs, commands      produces: completions, answers to commands
                   waits for: a job or a command, when idle or paused       unblocked by: `generate`, `_post`
"""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop, CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from rlsys.errors import TaskTooLong, WeightsMismatch, WorkerDied
from rlsys.types import PolicyVersion
from workers.engines.base import Completion, EngineStats, Request
from workers.engines.decoder import Decoder, Job
from workers.engines.weights import check_weights
from workers.transport.hashing import content_hash

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

T = TypeVar("T")

PREFILL_TOKENS = 4096
"""Tokens of one prefill; a longer prompt goes alone."""


class LocalEngine:
    """Samples from `model`, up to `num_slots` requests at a time, on the device that the model is on.

    The engine owns the model from here on; its thread runs until `close`. `version` is that of the weights the model
    came with, `name` the worker's in errors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context: int,
        stop_token_ids: frozenset[int],
        version: PolicyVersion = 0,
        name: str,
    ) -> None:
        self._model, self._version, self._name = model, version, name
        self._decoder = Decoder(model, num_slots=num_slots, max_context=max_context, stop_token_ids=stop_token_ids)
        self._waiting: deque[Job] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._pending: set[Future] = set()
        self._outbox: list[tuple[Future, object]] = []
        self._is_paused = self._is_closing = False
        self._lock = threading.Lock()
        self._end: tuple[str, Exception | None] | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"{name} steps", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- on the event loop

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Requests made in one turn of the event loop are admitted together."""
        self._refuse(request)
        loop = get_running_loop()
        job = Job(request, loop.create_future())
        self._submit(self._waiting, job, job.future)
        loop.call_soon(self._wake.set)
        try:
            return await job.future
        except CancelledError:
            with suppress(WorkerDied):
                self._post(partial(self._abort, lambda other: other is job))
            raise

    def abort(self, request_id: str) -> None:
        with suppress(WorkerDied):
            self._post(partial(self._abort, lambda job: job.request.id == request_id))

    async def pause(self) -> None:
        await self._ask(partial(self._set_paused, True))

    async def resume(self) -> None:
        await self._ask(partial(self._set_paused, False))

    async def load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """See `Engine.load`. A tied output layer may be left out; tensors are cast to the model's dtype."""
        return await self._ask(partial(self._load, version, weights))

    def stats(self) -> EngineStats:
        num_running = len(self._decoder.jobs)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._waiting),
            kv_used=num_running / self._decoder.num_slots,
            num_tokens=self._decoder.num_tokens,
        )

    async def close(self) -> None:
        with suppress(WorkerDied):  # the end of the thread is the answer
            await self._ask(self._set_closing)
        self._thread.join()

    def _refuse(self, request: Request) -> None:
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        limit, num_vocab = self._decoder.max_context, self._decoder.num_vocab
        if num_prompt + num_new > limit:
            raise TaskTooLong(
                self._name,
                f"taking request {request.id}",
                f"{num_prompt} prompt tokens + {num_new} new tokens exceed the context of {limit}: "
                "shorten the prompt, lower max_new_tokens or raise the engine's max_context",
            )
        if not (num_prompt and num_new > 0 and min(request.prompt_ids) >= 0 and max(request.prompt_ids) < num_vocab):
            raise ValueError(
                f"request {request.id} needs at least one prompt id, all in [0, {num_vocab}), and max_new_tokens >= 1; "
                f"got {num_prompt} ids, max_new_tokens {num_new}: is the tokenizer the model's?"
            )

    async def _ask(self, work: Callable[[], T]) -> T:
        """Have the step thread do `work` between two steps."""
        future: Future[T] = get_running_loop().create_future()
        self._post(partial(self._obey, work, future), future)
        return await future

    def _post(self, command: Callable[[], None], future: Future | None = None) -> None:
        self._submit(self._commands, command, future)
        self._wake.set()

    def _submit(self, queue: deque[T], item: T, future: Future | None) -> None:
        """Leave `item` to the step thread, which answers `future` whatever becomes of it."""
        with self._lock:
            if self._end:
                raise self._died(*self._end)
            if future:
                self._pending.add(future)
            queue.append(item)

    # ------------------------------------------------------------------------------------------- on the step thread

    def _main(self) -> None:
        end: tuple[str, Exception | None] = ("the engine was closed", None)
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  (the thread's boundary: all who wait are told, and all who come later)
            end = (f"a step raised {type(error).__name__}: {error}; restart the worker", error)
        with self._lock:
            self._end = end
        for future in tuple(self._pending):
            self._answer(future, self._died(*end))
        self._flush()

    def _serve(self) -> None:
        """One turn after the other: commands, a prefill of what waits, a step of what runs, answers.

        Consumes waiting jobs and commands; produces completions and answers. Waits for either while paused or without
        jobs; unblocked by `generate` and `_post`.
        """
        while not self._is_closing:
            if self._is_paused or not (self._waiting or self._decoder.jobs):
                self._wake.wait()
            self._wake.clear()
            while self._commands:
                self._commands.popleft()()
            if not self._is_paused:
                self._advance()
            self._flush()

    def _advance(self) -> None:
        if arrivals := self._arrivals():
            self._decoder.admit(arrivals)
            self._release(self._decoder.ended())
        if self._decoder.jobs:
            self._decoder.step()
            self._release(self._decoder.ended())

    def _arrivals(self) -> list[Job]:
        """The next jobs in line for which there is a free slot and room in one prefill."""
        jobs: list[Job] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(self._decoder.jobs) + len(jobs) < self._decoder.num_slots:
            prompt = self._waiting[0].request.prompt_ids
            prompts.add(prompt)
            longest = max(longest, len(prompt))
            if jobs and len(prompts) * longest > PREFILL_TOKENS:
                break
            job = self._waiting.popleft()
            job.marks.append((0, self._version))
            jobs.append(job)
        return jobs

    def _release(self, slots: Sequence[int], *, is_aborted: bool = False) -> None:
        for job, completion in self._decoder.release(slots, is_aborted=is_aborted):
            self._answer(job.future, completion)

    def _abort(self, is_meant: Callable[[Job], bool]) -> None:
        for job in [job for job in tuple(self._waiting) if is_meant(job)]:
            self._waiting.remove(job)
            self._answer(job.future, Completion((), (), (), "abort"))
        self._release([slot for slot, job in enumerate(self._decoder.jobs) if is_meant(job)], is_aborted=True)

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _set_closing(self) -> None:
        self._is_closing = True

    def _load(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        required = dict(self._model.named_parameters()).keys()
        own = dict(self._model.named_parameters(remove_duplicate=False))  # with the names of tied tensors
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        check_weights(self._name, weights, known=shapes, required=required)
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        for job, count in zip(self._decoder.jobs, self._decoder.counts(), strict=True):
            job.marks.append((count, version))
        self._version = version
        return content_hash({name: own[name] for name in weights})

    def _obey(self, work: Callable[[], object], future: Future) -> None:
        try:
            self._answer(future, work())
        except WeightsMismatch as refusal:
            self._answer(future, refusal)

    def _answer(self, future: Future, outcome: object) -> None:
        """Resolve `future` at the end of this turn: with a value, or an exception to raise."""
        self._pending.discard(future)
        self._outbox.append((future, outcome))

    def _flush(self) -> None:
        answers: dict[AbstractEventLoop, list[tuple[Future, object]]] = {}
        for future, outcome in self._outbox:
            answers.setdefault(future.get_loop(), []).append((future, outcome))
        self._outbox.clear()
        for loop, batch in answers.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, batch)

    def _died(self, detail: str, cause: Exception | None) -> WorkerDied:
        died = WorkerDied(self._name, "sampling", detail)
        died.__cause__ = cause
        return died


def _settle(answers: Sequence[tuple[Future, object]]) -> None:
    for future, outcome in answers:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
