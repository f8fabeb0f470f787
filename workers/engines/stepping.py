"""Base of engines that sample in this process: one thread runs all steps, and the event loop posts to it.

    step thread    consumes: waiting jobs, commands      produces: tokens, completions, answers to commands
                   waits for: a job or a command, when idle or paused       unblocked by: `generate`, `_post`

Subclasses define a step. Admission, pausing, abortion, deadlines and shutdown are common.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, CancelledError, Event, Future, get_running_loop, to_thread
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

from rlsys.errors import DeadlineExceeded, RlsysError, TaskTooLong, WorkerDied, WorkerError
from rlsys.routing.requests import Completion, Request, spans_after
from rlsys.types import EngineStats, PolicyVersion, VersionSpan
from rlsys.util import deadlines
from workers.engines.engine import EngineSpec
from workers.engines.stop_texts import NO_STOP_TEXTS, StopTexts

T = TypeVar("T")
LOOKS = 4
"""Checks of the step thread within the deadline of a step: a hang is detected at most one check late."""


@dataclass(slots=True, eq=False)
class EngineJob:
    """One request, and the future of its caller."""

    request: Request
    future: Future[Completion]
    marks: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """(tokens sampled here before it, version), one entry for every version that the job ran under here."""
    output_ids: list[int] = field(default_factory=list)
    """Sampled here."""
    logprobs: list[float] = field(default_factory=list)
    routing: list[bytes] = field(default_factory=list)
    """See `Turn.routing`; empty if not recorded."""

    @property
    def version(self) -> PolicyVersion:
        """Version of its next token, once the job has a slot."""
        return self.marks[-1][1]

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the `begun` ones included."""
        return self.request.num_begun + len(self.output_ids)

    def completion(self, finish: Literal["stop", "length", "abort"] | None) -> Completion:
        """The `begun` tokens followed by those sampled here."""
        sampled = self._completion_from(0, finish)
        return self.request.begun.then(sampled) if self.request.begun else sampled

    def since(self, num_tokens: int) -> Completion:
        """Return the tokens after the first `num_tokens` of a running request. The cost grows with those alone."""
        begun, num_here = self.request.begun, num_tokens - self.request.num_begun
        if begun and num_here < 0:
            return begun.since(num_tokens).then(self._completion_from(0, None))
        return self._completion_from(num_here, None)

    def _completion_from(self, start: int, finish: Literal["stop", "length", "abort"] | None) -> Completion:
        """Return the tokens sampled here, from the token `start` on."""
        marks = [*self.marks, (len(self.output_ids), 0)]
        spans = (VersionSpan(version, end - begin) for (begin, version), (end, _) in pairwise(marks))
        ids, logprobs = tuple(self.output_ids[start:]), tuple(self.logprobs[start:])
        return Completion(ids, logprobs, spans_after(spans, start), finish, tuple(self.routing[start:]))


def progress_of(jobs: Iterable[EngineJob], known: Mapping[str, int]) -> Mapping[str, Completion]:
    """See `Engine.progress`."""
    asked = ((job, known[job.request.id]) for job in jobs if job.request.id in known)
    return {job.request.id: job.since(num) for job, num in asked if job.output_ids and job.num_tokens > num}


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """One turn of the step thread, compared by identity."""

    deadline_s: float
    began_s: float = field(default_factory=time.monotonic)


class SteppingEngine(ABC):
    """Implements `Engine` except `load`, `stage`, `checksums` and `score`. `version` is that of the first weights."""

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        *,
        version: PolicyVersion,
        num_vocab: int,
        stop_token_ids: frozenset[int],
        stop_texts: StopTexts = NO_STOP_TEXTS,
    ) -> None:
        """`name` is the worker's name in errors."""
        self._stop_texts = stop_texts
        self._name, self._spec, self._version = name, spec, version
        self._limits = RequestLimits(spec.max_context, num_vocab, stop_token_ids)
        self._waiting: deque[EngineJob] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._pending: dict[Future, str] = {}
        self._seeking_room: list[Future[None]] = []
        """Calls that wait until one more version fits."""
        self._outbox: list[tuple[Future, object]] = []
        """Answers of this turn: futures, and what resolves them."""
        self._is_paused = self._is_asleep = self._is_closing = False
        self._awake: Event | None = None
        """Set by the next `wake`; None if the engine is awake, and about to stay so."""
        self._has_left = False
        """True from the end of the wait of `sleep` until `wake`."""
        self._unused = Event()
        """Set when a call that reads or writes weights ends."""
        self._num_using = 0
        """Those calls."""
        self._turn: _Turn | None = None
        """The current turn of the step thread; None while it waits."""
        self._seen: tuple[_Turn | None, float] = (None, 0.0)
        """The turn at the last check, and the time of the first check that saw it, on the clock of `deadlines.now`."""
        self._watched: AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._end: WorkerError | None = None
        """Reason why the engine has ended; callers get a copy that names their phase."""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"{name} steps", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- what a step is

    @abstractmethod
    def _is_busy(self) -> bool:
        """True if there is anything to step."""

    @abstractmethod
    def _advance(self) -> None:
        """Admit arrivals, sample a token for every running job, and answer those that ended."""

    @abstractmethod
    def _cut(self, is_meant: Callable[[EngineJob], bool]) -> None:
        """End the selected running jobs with their tokens so far, finish `abort`."""

    @abstractmethod
    def _running(self) -> Iterable[EngineJob]:
        """The jobs that have a slot, with all tokens sampled so far."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""

    def _evict(self) -> None:  # noqa: B027  (with one version, there is nothing to evict)
        """Evict versions without running jobs, except the newest, and `_grant_room`."""

    def _move_out(self) -> None:  # noqa: B027  (an engine may keep its memory)
        """Free the memory of the device; no step runs until `_move_in`."""

    def _move_in(self) -> None:  # noqa: B027
        """Undo `_move_out`."""

    def _start_up(self) -> None:  # noqa: B027  (nothing to prepare is common)
        """Prepare the step thread; called first on it."""

    def _shut_down(self) -> None:  # noqa: B027  (nothing to free is common)
        """Free the engine's resources; called last on the step thread."""

    # ------------------------------------------------------------------------------------------- on the event loop

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def step_age_s(self) -> float:
        """See `EngineStats.step_age_s`."""
        turn = self._turn
        return 0.0 if turn is None else time.monotonic() - turn.began_s

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        return (self._version,)

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. Requests made in one turn of the event loop are admitted together."""
        self._limits.check(self._name, request)
        loop = get_running_loop()
        job = EngineJob(request, loop.create_future())
        self._submit(self._waiting, job, job.future, f"sampling request {request.id}")
        loop.call_soon(self._wake.set)
        try:
            return await job.future
        except CancelledError:
            with suppress(WorkerError):
                self._post(partial(self._abort, lambda other: other is job))
            raise

    def abort(self, request_id: str) -> None:
        with suppress(WorkerError):
            self._post(partial(self._abort, lambda job: job.request.id == request_id))

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
        return await self._ask("reporting progress", partial(self._report, known))

    async def pause(self) -> None:
        await self._ask("pausing the engine", partial(self._set_paused, True))

    async def resume(self) -> None:
        await self._ask("resuming the engine", partial(self._set_paused, False))

    async def sleep(self) -> None:
        self._awake = self._awake or Event()
        while self._num_using:
            self._unused = Event()
            await self._unused.wait()
        self._has_left = True
        await self._ask("falling asleep", self._fall_asleep, self._spec.load_s)

    async def wake(self) -> None:
        try:
            await self._ask("waking", self._wake_up, self._spec.load_s)
        finally:
            self._let_go_on()

    def _let_go_on(self) -> None:
        """Wake the calls that wait for the device."""
        if self._awake is not None:
            self._awake.set()
            self._awake, self._has_left = None, False

    @asynccontextmanager
    async def _on_device(self, *, ends_pause: bool = False) -> AsyncIterator[None]:
        """Keep the engine awake inside the block. Waits while it sleeps, and while it is about to; unblocked by `wake`,
        or `close`.

        With `ends_pause`, not while it is about to: it may be paused until then, so that others never end.
        """
        while self._awake is not None and (self._has_left or not ends_pause):
            await self._awake.wait()
        self._check_open("using its device")
        self._num_using += 1
        try:
            yield
        finally:
            self._num_using -= 1
            self._unused.set()

    async def close(self) -> None:
        with suppress(WorkerError):  # the end of the thread is the answer
            await self._ask("closing the engine", self._set_closing)
        self._let_go_on()  # what waits learns that the engine has ended
        if not isinstance(self._end, DeadlineExceeded):
            await to_thread(self._thread.join)

    async def _find_room(self) -> None:
        """Return once one more version fits; unblocked by the requests of an older version ending."""
        future: Future[None] = get_running_loop().create_future()
        self._post(partial(self._seek_room, future), future, "waiting for room for one more version")
        await future

    async def _ask(self, what: str, work: Callable[[], T], deadline_s: float | None = None) -> T:
        """Run `work` on the step thread between two steps, within `deadline_s` or the deadline of a step."""
        future: Future[T] = get_running_loop().create_future()
        self._post(partial(self._obey, work, future, deadline_s or self._spec.step_s), future, what)
        return await future

    def _post(self, command: Callable[[], None], future: Future | None = None, what: str = "") -> None:
        self._submit(self._commands, command, future, what)
        self._wake.set()

    def _submit(self, queue: deque[T], item: T, future: Future | None, what: str) -> None:
        """Queue `item` for the step thread, which always answers `future`."""
        with self._lock:
            self._check_open(what or "accepting a command")
            if future:
                self._pending[future] = what
            queue.append(item)
        if future and self._watched is not (loop := future.get_loop()):
            self._watched = loop
            deadlines.ticker().call_later(self._spec.step_s / LOOKS, self._watch)

    def _check_open(self, what: str) -> None:
        """Raise the error that ended the engine, if it has ended."""
        if self._end:
            raise self._error(self._end, what)

    def _watch(self) -> None:
        """End the engine if its thread has been in one turn for longer than the deadline.

        Checks again while anything is pending; unblocked by nothing else. Time in which this process was suspended does
        not count, so a turn's age starts at the first check that sees it.
        """
        turn, now_s = self._turn, deadlines.now()
        if self._seen[0] is not turn:
            self._seen = (turn, now_s)
        if turn is not None and now_s - self._seen[1] >= turn.deadline_s:
            detail = f"no step ended within {turn.deadline_s:g} s; restart the worker"
            self._finish(DeadlineExceeded(self._name, "running an engine step", detail))
        elif self._pending:
            deadlines.ticker().call_later(self._spec.step_s / LOOKS, self._watch)
        else:
            self._watched, self._seen = None, (None, 0.0)

    # ------------------------------------------------------------------------------------------- on the step thread

    def _main(self) -> None:
        end = WorkerDied(self._name, "running an engine step", "the engine was closed")
        try:
            self._start_up()
            self._serve()
        except Exception as error:  # noqa: BLE001  (the thread's boundary: all callers get the error)
            detail = f"a step raised {type(error).__name__}: {error}; restart the worker"
            end = WorkerDied(self._name, "running an engine step", detail)
            end.__cause__ = error
        self._flush()
        self._finish(end)
        self._shut_down()

    def _serve(self) -> None:
        """Run turns: commands, a step, answers.

        Consumes waiting jobs and commands; produces completions and answers. Waits for either while paused, asleep, or
        without jobs; unblocked by `generate` and `_post`.
        """
        while not (self._is_closing or self._end):
            if self._is_halted or not (self._waiting or self._is_busy()):
                self._turn = None
                self._wake.wait()
            self._turn = _Turn(self._spec.step_s)
            self._wake.clear()
            while self._commands:
                self._commands.popleft()()
            self._flush()  # callers of commands do not wait for the step
            if not self._is_halted:
                self._advance()
            self._flush()

    def _abort(self, is_meant: Callable[[EngineJob], bool]) -> None:
        for job in [job for job in tuple(self._waiting) if is_meant(job)]:
            self._waiting.remove(job)
            self._answer(job.future, job.completion("abort"))
        self._cut(is_meant)

    def _report(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
        return progress_of(self._running(), known)

    @property
    def _is_halted(self) -> bool:
        return self._is_paused or self._is_asleep

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _fall_asleep(self) -> None:
        if not self._is_asleep:
            self._is_asleep = True
            self._move_out()

    def _wake_up(self) -> None:
        if self._is_asleep:
            self._move_in()
            self._is_asleep = False

    def _set_closing(self) -> None:
        self._is_closing = True

    def _seek_room(self, future: Future[None]) -> None:
        self._seeking_room.append(future)
        self._evict()

    def _has_room(self) -> bool:
        return len(self.versions) < self._spec.resident_versions

    def _grant_room(self) -> None:
        """Unblock a `_find_room`, if one more version fits."""
        while self._seeking_room and self._has_room():
            self._answer(self._seeking_room.pop(), None)

    def _check_room(self, version: PolicyVersion) -> None:
        """Raise `WorkerError` if `version` is none of those held, and does not fit beside them."""
        if version not in self.versions and not self._has_room():
            held = ", ".join(map(str, self.versions))
            detail = f"requests run on each of the versions held: {held}; wait in `stage`, or raise resident_versions"
            raise WorkerError(self._name, f"loading version {version}", detail)

    def _become(self, version: PolicyVersion) -> None:
        """Switch to `version` for all new tokens."""
        for job in self._running():
            job.marks.append((len(job.output_ids), version))
        self._version = version

    def _obey(self, work: Callable[[], object], future: Future, deadline_s: float) -> None:
        self._turn = _Turn(deadline_s)
        try:
            self._answer(future, work())
        except RlsysError as refusal:
            self._answer(future, refusal)
        self._turn = _Turn(self._spec.step_s)

    def _answer(self, future: Future, outcome: object) -> None:
        """Resolve `future` at the end of this turn: with a value, or an exception to raise."""
        self._pending.pop(future, None)
        self._outbox.append((future, outcome))

    def _flush(self) -> None:
        answers, self._outbox = self._outbox, []
        _deliver(answers)

    # ------------------------------------------------------------------------------------------- on either

    def _finish(self, end: WorkerError) -> None:
        """End the engine: answer all pending calls, and refuse later ones."""
        with self._lock:
            self._end = self._end or end
            pending = dict(self._pending)
            self._pending.clear()
        _deliver([(future, self._error(end, what)) for future, what in pending.items()])

    def _error(self, end: WorkerError, what: str) -> WorkerError:
        error = type(end)(self._name, f"{what} on version {self._version}", end.detail)
        error.__cause__ = end.__cause__
        return error


def _deliver(answers: Iterable[tuple[Future, object]]) -> None:
    """Resolve futures from any thread, all of one event loop in one turn of that loop."""
    batches: dict[AbstractEventLoop, list[tuple[Future, object]]] = {}
    for future, outcome in answers:
        batches.setdefault(future.get_loop(), []).append((future, outcome))
    for loop, batch in batches.items():
        with suppress(RuntimeError):  # the loop is closed: no caller is left
            loop.call_soon_threadsafe(_settle, batch)


def _settle(answers: Iterable[tuple[Future, object]]) -> None:
    for future, outcome in answers:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Besides 0 (greedy). Above, samples are noise and vLLM refuses; below, vLLM would silently use its minimum."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that every request must meet."""

    max_context: int
    """Maximum tokens of prompt and completion together."""
    num_vocab: int
    stop_token_ids: frozenset[int] = frozenset()

    def check(self, worker: str, request: Request) -> None:
        """Raise `TaskTooLong` if the request exceeds the context, `ValueError` if it is invalid."""
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
        if num_prompt + num_new > self.max_context:
            raise TaskTooLong(
                worker,
                f"accepting request {request.id}",
                f"{num_prompt} prompt tokens + {num_new} new tokens exceed the context of {self.max_context}: "
                "shorten the prompt, lower max_new_tokens or raise the engine's max_context",
            )
        asked = request.sampling
        is_warm = asked.temperature == 0 or MIN_TEMPERATURE <= asked.temperature <= MAX_TEMPERATURE
        is_cut = 0 < asked.top_p <= 1 and asked.top_k >= 0 and 0 <= asked.min_p < 1
        if not (is_warm and is_cut and "" not in asked.stop):
            raise ValueError(
                f"request {request.id}: temperature must be 0 or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}], top_p "
                f"in (0, 1], top_k at least 0, min_p in [0, 1), and no stop text empty; got {asked}"
            )
        if not (num_prompt and num_new > 0 and self._are_known(request.prompt_ids)):
            raise ValueError(
                f"request {request.id} needs at least one prompt id, all in [0, {self.num_vocab}), and max_new_tokens "
                f">= 1; got {num_prompt} ids, max_new_tokens {num_new}: is the tokenizer the model's?"
            )
        self._check_begun(request)

    def _check_begun(self, request: Request) -> None:
        """Raise `ValueError` unless the `begun` tokens of a request are complete and can be continued."""
        begun = request.begun
        if begun is None or not request.num_begun:
            return
        num_ids, num_logprobs = request.num_begun, len(begun.logprobs)
        num_marked = sum(span.num_tokens for span in begun.versions)
        if not (num_ids == num_logprobs == num_marked and self._are_known(begun.output_ids)):
            raise ValueError(
                f"request {request.id} has begun with {num_ids} ids, {num_logprobs} logprobs and versions of "
                f"{num_marked} tokens: these must be equally many, and the ids in [0, {self.num_vocab}); hand over the "
                "completion as an engine returned it"
            )
        if begun.finish == "stop" or begun.output_ids[-1] in self.stop_token_ids:
            raise ValueError(f"request {request.id} has begun with a completion that ended with a stop token")
        if num_ids >= request.sampling.max_new_tokens:
            raise ValueError(
                f"request {request.id} has begun with {num_ids} tokens, and max_new_tokens, which counts them, is "
                f"{request.sampling.max_new_tokens}: it has ended, or raise max_new_tokens"
            )

    def _are_known(self, ids: tuple[int, ...]) -> bool:
        return min(ids) >= 0 and max(ids) < self.num_vocab
