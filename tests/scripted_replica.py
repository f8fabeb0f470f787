"""A replica without an engine: it samples what a function says, and dies, drains and changes weights when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count

from rlsys.errors import WorkerDied, WorkerError
from rlsys.routing.request_router import request_weight
from rlsys.routing.requests import AbortReason, Chunk, Completion, Hold, Request, Scored, WeightsWanted
from rlsys.types import Acknowledged, EngineStats, PolicyVersion, ReplicaLoad, VersionSpan


def seeded_tokens(request: Request) -> Sequence[int]:
    """A reply that depends on the seed of the request, and not on the replica."""
    return [2 + (request.seed + i * (i + 3)) % 7 for i in range(request.sampling.max_new_tokens)]


class ScriptedReplica:
    """Implements `rlsys.routing.requests.Replica`: `reply(request)` gives all tokens, `per_chunk` of them a chunk.

    Between two chunks it waits for `go`, if that is not set. `version` may be changed at any time; with `holds`, groups
    hold it, and `hold` for a newer one waits until no group does.
    """

    is_near = False

    def __init__(
        self,
        name: str,
        *,
        version: PolicyVersion = 0,
        holds: bool = True,
        reply: Callable[[Request], Sequence[int]] = seeded_tokens,
        per_chunk: int = 2,
        num_slots: int = 64,
        tokens_per_s: float = 0.0,
    ) -> None:
        self.name, self.version, self.holds = name, version, holds
        self.newest = version
        """Version that a pull brings."""
        self.go = asyncio.Event()
        self.go.set()
        self.requests: list[Request] = []
        """All requests it was given."""
        self.held: set[str] = set()
        """Ids of the holds that were not released."""
        self.num_sampled = 0
        self.num_holds_asked = 0
        self._reply, self._per_chunk, self._num_slots = reply, per_chunk, num_slots
        self._tokens_per_s = tokens_per_s
        self._running: dict[str, AbortReason | WorkerError | None] = {}
        """By request id: the reason to end it before its end."""
        self._end: WorkerError | None = None
        self._numbers = count(1)
        self._changed = asyncio.Event()

    @property
    def acknowledged(self) -> Acknowledged:
        return Acknowledged(self.name, self.version, f"hash-{self.version}")

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self._check()
        if request.wanted is not None and not request.wanted.fits(self.acknowledged):
            yield self._last(Completion((), (), (), "abort"), "weights")
            return
        tokens = list(self._reply(request))[request.num_begun : request.sampling.max_new_tokens]
        self._running[request.id] = None
        try:
            while True:
                await self.go.wait()
                match self._running[request.id]:
                    case WorkerError() as error:
                        raise error
                    case str() as reason:
                        yield self._last(Completion((), (), (), "abort"), reason)
                        return
                more, tokens = tokens[: self._per_chunk], tokens[self._per_chunk :]
                self.num_sampled += len(more)
                is_full = len(self._reply(request)) >= request.sampling.max_new_tokens
                part = self._completion(more, None if tokens else "length" if is_full else "stop")
                if not tokens:
                    yield self._last(part, None)
                    return
                yield Chunk(part, (self.acknowledged,))
                await asyncio.sleep(0)
        finally:
            del self._running[request.id]

    async def score(self, token_ids: Sequence[int]) -> Scored:
        self._check()
        return Scored((0.0,) * (len(token_ids) - 1), self.version, (self.acknowledged,))

    async def hold(self, wanted: WeightsWanted, *, waits: bool = True) -> Hold | None:
        self.num_holds_asked += 1
        self._check()
        while not wanted.fits(self.acknowledged):
            if wanted.version <= self.version or not waits:
                return None
            while self.held or self.newest < wanted.version:
                self._changed.clear()
                await self._changed.wait()
                self._check()
            self.version = self.newest
        if not self.holds:
            return Hold("", self.name, self.acknowledged)
        hold = Hold(f"{self.name}/{next(self._numbers)}", self.name, self.acknowledged)
        self.held.add(hold.id)
        return hold

    async def release(self, hold: Hold) -> None:
        self.held.discard(hold.id)
        self._changed.set()

    def publish(self, version: PolicyVersion) -> None:
        """Let a pull bring this version from now."""
        self.newest = version
        self._changed.set()

    def drain(self, reason: AbortReason = "drained") -> None:
        """Abort all running requests."""
        self._running = dict.fromkeys(self._running, reason)
        self.go.set()

    def die(self) -> None:
        """End all requests, and every later call, with `WorkerDied`."""
        self._end = WorkerDied(self.name, "sampling", "the process is gone")
        self._running = dict.fromkeys(self._running, self._end)
        self.go.set()
        self._changed.set()

    def _check(self) -> None:
        if self._end is not None:
            raise self._end

    def _completion(self, ids: Sequence[int], finish: str | None) -> Completion:
        spans = (VersionSpan(self.version, len(ids)),) if ids else ()
        return Completion(tuple(ids), (-0.5,) * len(ids), spans, finish)  # type: ignore[arg-type]

    def _last(self, more: Completion, reason: AbortReason | None) -> Chunk:
        weights = (self.acknowledged,) if more.output_ids else ()
        return Chunk(more, weights, reason, self.load(max(0, len(self._running) - 1)), self.acknowledged)

    def load(self, num_running: int | None = None) -> ReplicaLoad:
        """The current load, or that with `num_running` requests."""
        num_running = len(self._running) if num_running is None else num_running
        stats, weight = EngineStats(num_running, 0, 0.0, self.num_sampled), num_running * request_weight(0)
        return ReplicaLoad(
            self.name, self.version, stats, False, len(self.held), weight, self._num_slots, self._tokens_per_s
        )
