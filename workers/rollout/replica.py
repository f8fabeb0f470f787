"""One engine with its weights: samples requests, and changes weights. It knows no group and no workflow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import NoReturn

from rlsys.errors import WorkerError
from rlsys.routing.request_router import request_weight
from rlsys.routing.requests import LOSSES, AbortReason, Chunk, Completion, Hold, Request, Scored, WeightsWanted
from rlsys.types import EngineStats, PolicyVersion, ReplicaLoad, VersionSpan
from rlsys.util import deadlines
from workers.engines.engine import Engine, EngineChoice
from workers.rollout.replica_weights import Puller, ReplicaWeights, WeightChange

READ_S = 0.05
"""Seconds between two chunks of a request whose tokens somebody reads as they come."""
SPEED_TOKENS = 2000.0
"""Sampled tokens over which the speed of a replica is averaged."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request at the engine."""

    request: Request
    oldest: PolicyVersion
    """The oldest version that its tokens may be of."""
    reason: AbortReason | None = None
    """Set once the replica aborts it."""


@dataclass(slots=True)
class _Speed:
    """Measured speed of an engine: tokens per second of one running request."""

    tokens_per_s: float = 0.0
    """0 until it is measured."""
    _running_s: float = 0.0
    """Seconds of all running requests together."""
    _num_tokens: float = 0.0
    _since_s: float = 0.0
    _num_running: int = 0
    """Requests that run since the last call of `note`."""
    _tokens_then: int = 0

    def note(self, num_tokens: int, num_running: int) -> None:
        """Count the time since the last call: the engine has sampled `num_tokens` in all, and runs so many from now."""
        now_s = time.monotonic()
        if self._num_running:
            self._running_s += self._num_running * (now_s - self._since_s)
            self._num_tokens += num_tokens - self._tokens_then
            if self._num_tokens and self._running_s:
                self.tokens_per_s = self._num_tokens / self._running_s
            if self._num_tokens > SPEED_TOKENS:
                self._running_s, self._num_tokens = self._running_s / 2, self._num_tokens / 2
        self._since_s, self._num_running, self._tokens_then = now_s, num_running, num_tokens


class EngineReplica:
    """Implements `rlsys.routing.requests.Replica` in the process of the engine."""

    is_near = True

    def __init__(
        self,
        name: str,
        engine: Engine,
        puller: Puller | None,
        change: WeightChange,
        *,
        num_slots: int,
        choice: EngineChoice | None = None,
        base: str | None = None,
    ) -> None:
        """`num_slots` requests run at a time in the engine. `choice` is the reason for this engine, if there was a
        choice; `base`: see `ReplicaWeights`."""
        self.name, self.choice = name, choice
        self.on_loss: Callable[[WorkerError], None] = lambda error: None
        """Called with each failure after which the replica is of no use."""
        self._engine, self._num_slots = engine, num_slots
        self.weights = ReplicaWeights(
            name, engine, puller, change, base=base, emptied=self._wait_until_empty, on_loss=self._lose
        )
        self._holds: dict[str, PolicyVersion] = {}
        """The held version, by id of the hold."""
        self._numbers = count(1)
        self._running: dict[str, _Running] = {}
        """By request id."""
        self._weight = 0
        """Total `request_weight` of the running requests."""
        self._quiet = asyncio.Event()
        """Set when a hold or a request ends."""
        self._speed = _Speed()
        self._verify_s = change.verify_s
        self._verifying: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """See `Replica.generate`. In this process, chunks before the end serve only those who read along."""
        if not request.is_read:
            yield await self.finish(request)
            return
        done, num_told = asyncio.create_task(self.finish(request)), request.num_begun
        try:
            while not (await asyncio.wait([done], timeout=READ_S))[0]:
                for chunk in (await self.progress({request.id: num_told})).values():
                    num_told += len(chunk.more.output_ids)
                    yield chunk
            last = await done
            yield replace(last, more=last.more.since(num_told - request.num_begun))
        finally:
            done.cancel()

    async def finish(self, request: Request) -> Chunk:
        """Sample a request to its end, and return all its new tokens as one chunk.

        Waits for its weights, and for the engine. Raises the errors of `Engine.generate`.
        """
        if (refusal := await self._refusal(request)) is not None:
            return refusal
        running = _Running(request, min(self._engine.versions))
        weight = request_weight(len(request.prompt_ids) + request.num_begun)
        self._running[request.id] = running
        self._count(weight)
        try:
            done = await self._engine.generate(request)
            new = done.since(request.num_begun)
            weights = await self.weights.acknowledgements_of(new.versions)
        except LOSSES as error:
            self._fail(error)
        finally:
            del self._running[request.id]
            stats = self._count(-weight)
            self._quiet.set()
        reason = running.reason or ("drained" if done.finish == "abort" else None)
        return self._last(new, reason, weights, stats)

    async def progress(self, known: Mapping[str, int]) -> dict[str, Chunk]:
        """Return new tokens of the running requests among `known`, those after their first `known[id]`, by request id.

        Tokens of a version that is not verified yet are left for a later call. Raises the error that ended the engine.
        """
        asked = {name: num for name, num in known.items() if name in self._running}
        found = await self._engine.progress(asked) if asked else {}
        return {
            name: Chunk(done, await self.weights.acknowledgements_of(done.versions))
            for name, done in found.items()
            if self.weights.are_vouched(done.versions)
        }

    def abort(self, request_ids: Collection[str], reason: AbortReason = "drained") -> None:
        """End requests with their tokens so far. Unknown ids are ignored."""
        for running in [self._running[name] for name in request_ids if name in self._running]:
            running.reason = running.reason or reason
            self._engine.abort(running.request.id)

    async def score(self, token_ids: Sequence[int]) -> Scored:
        """See `Replica.score`. Scores again if the weights changed meanwhile, and waits until they are verified."""
        ids = tuple(token_ids)
        try:
            while True:
                version = self._engine.version
                logprobs = await self._engine.score(ids)
                if self._engine.version == version:
                    weights = await self.weights.acknowledgements_of((VersionSpan(version, len(ids)),))
                    return Scored(logprobs, version, weights)
        except LOSSES as error:
            self._fail(error)

    async def _refusal(self, request: Request) -> Chunk | None:
        """The answer to a request for other weights than these; None if it is sampled. Waits for weights to come."""
        wanted = request.wanted
        if wanted is None or self.weights.is_fixed:
            return None
        if wanted.hash is None:
            if not wanted.fits(self.weights.acknowledgement):
                await self.weights.ensure(wanted.version)
            return None
        if wanted.fits(self.weights.acknowledgement) and (request.hold in self._holds or not self.weights.is_changing):
            return None
        return self._last(Completion((), (), (), "abort"), "weights", (), self.stats())

    def _last(self, more: Completion, reason: AbortReason | None, weights: tuple, stats: EngineStats) -> Chunk:
        held, pulls = self.weights.acknowledgement, self.weights.take_pulls()
        return Chunk(more, weights, reason, self._load(stats), held, pulls, time.monotonic())

    def _lose(self, failure: WorkerError) -> None:
        self.on_loss(failure)

    def _fail(self, error: WorkerError) -> NoReturn:
        """Report and raise a failure of the engine, or the failed weight change that caused it."""
        failure = self.weights.failure or error
        self._lose(failure)
        raise failure

    def _count(self, weight: int) -> EngineStats:
        """Count a request that came, or with a negative weight one that has ended; return the engine's statistics."""
        stats = self._engine.stats()
        self._speed.note(stats.num_tokens, min(len(self._running), self._num_slots))
        self._weight += weight
        return stats

    # ------------------------------------------------------------------------------------------------------- weights

    async def hold(self, wanted: WeightsWanted, *, waits: bool = True, owner: str = "") -> Hold | None:
        """See `Replica.hold`. `owner` is the session worker, for `forget`."""
        weights = self.weights
        if weights.is_fixed:
            return Hold("", self.name, None)
        if wanted.hash is not None and wanted.fits(weights.acknowledgement) and weights.is_changing:
            return None  # a change waits: no hold on the old weights is granted
        if not weights.is_ready(wanted.version):
            if not waits:
                return None
            await weights.ensure(wanted.version)
        weights.forget_acknowledged([*self._holds.values(), *(running.oldest for running in self._running.values())])
        held = weights.acknowledgement
        if not wanted.fits(held):
            return None
        assert held is not None
        if weights.when != "between":
            return Hold("", self.name, held)
        hold = Hold(f"{owner}/{next(self._numbers)}", self.name, held)
        self._holds[hold.id] = held.version
        return hold

    async def release(self, hold: Hold) -> None:
        """See `Replica.release`."""
        self._holds.pop(hold.id, None)
        self._quiet.set()

    def start_verifying(self) -> None:
        """Begin to verify the loaded weights again and again, by `WeightChange.verify_s`."""
        if self._verify_s:
            self._verifying = asyncio.create_task(self._keep_verifying(self._verify_s))

    async def _keep_verifying(self, every_s: float) -> None:
        """Verify the loaded weights whenever `every_s` have passed and no request runs.

        Waits for that time, then for the running requests; unblocked by their ends. Ends with the first mismatch, which
        `on_loss` gets.
        """
        with suppress(*LOSSES):
            while True:
                await deadlines.sleep(every_s)
                while self._running:
                    self._quiet.clear()
                    await self._quiet.wait()
                await self.weights.verify_again()

    async def drain(self) -> None:
        """Abort all running requests, with their tokens; return once they have ended."""
        self.abort(list(self._running))
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()

    async def sleep(self) -> None:
        """See `Engine.sleep`. Holds stay, and new requests and weight changes wait."""
        await self._engine.sleep()
        self._speed.note(self._engine.stats().num_tokens, 0)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._speed.note(self._engine.stats().num_tokens, min(len(self._running), self._num_slots))
        await self._engine.wake()

    def forget(self, owner: str) -> None:
        """End the holds of a session worker that has died."""
        for name in [name for name in self._holds if name.rpartition("/")[0] == owner]:
            del self._holds[name]
        self._quiet.set()

    async def _wait_until_empty(self) -> bool:
        """Return once no group holds the weights and no request runs: requests without a hold are aborted, and go on
        elsewhere. Returns True if it had to wait. Unblocked by the last hold and the last request ending."""
        has_waited = False
        while self._holds or self._running:
            has_waited = True
            if not self._holds:
                self.abort(list(self._running), "weights")
            self._quiet.clear()
            await self._quiet.wait()
        return has_waited

    # ---------------------------------------------------------------------------------------------------------- load

    def load(self) -> ReplicaLoad:
        """The current load."""
        return self._load(self.stats())

    def _load(self, stats: EngineStats) -> ReplicaLoad:
        held = self.weights.acknowledgement
        return ReplicaLoad(
            self.name,
            self._engine.version if held is None else held.version,
            stats,
            self.weights.is_loading,
            len(self._holds),
            self._weight,
            self._num_slots,
            self._speed.tokens_per_s,
        )

    def stats(self) -> EngineStats:
        """Current statistics of the engine."""
        return self._engine.stats()

    async def close(self) -> None:
        """End every request with `WorkerDied`, and free the engine."""
        if self._verifying is not None:
            self._verifying.cancel()
        await self._engine.close()
