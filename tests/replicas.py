"""Replicas and session workers on engines without Ray, and the shelf that replicas get weights from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from ray.exceptions import ObjectRefStreamEndOfStreamError
from torch import Tensor

from examples.tiny_policy import build_tokenizer
from rlsys.agents.workflow import SingleTurn, Workflow
from rlsys.errors import WorkerDied
from rlsys.routing.request_router import Claim, RequestRouter
from rlsys.routing.requests import Replica, Request
from rlsys.types import POLICY, Assignment, GroupKey, Sampling, Task
from rlsys.util.deadlines import unless
from rlsys.weight_sync.manifest import Bucket, Manifest, Probe, Rectangle, VersionPart, pack
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import Engine
from workers.ray.worker_process import Remote
from workers.rollout.early_ends import EpisodeJudge, GroupEnds
from workers.rollout.policy_text import PolicyText, RoutedPolicy
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_weights import WeightChange
from workers.rollout.session_worker import GroupSessions, PolicyRoad, SessionWorker
from workers.text.tokenizer import TextTokenizer
from workers.transport import checksums

T = TypeVar("T")
DIGIT = 5
"""A token that is a character."""


def weights_of(version: int) -> dict[str, Tensor]:
    return {"w": torch.full((2,), float(version))}


def hash_of(version: int) -> str:
    return checksums.hash_of(weights_of(version))


def manifest_of(
    version: int, weights: Mapping[str, Tensor], probe: Probe | None = None, base: str | None = None
) -> Manifest:
    """Manifest of whole tensors that one rank publishes. Its buckets have no content."""
    wholes = [Rectangle.whole(checksums.spec_of(name, tensor)) for name, tensor in weights.items()]
    buckets = tuple(Bucket("", sum(r.num_bytes for r in pieces), pieces) for pieces in pack(wholes))
    sums = {name: checksums.checksum_of(tensor) for name, tensor in weights.items()}
    return Manifest((VersionPart(version, 0, 1, buckets, sums, probe, base),))


@dataclass
class Shelf:
    """An in-memory `Puller`: hands out the version a test put there, if it is new enough."""

    version: int = 0
    corrupted: bool = False
    """One value of the tensor changes on its way."""
    late: bool = False
    """What it hands out is one version older than asked for."""
    probe: Probe | None = None
    base: str | None = None
    """Hash of the base, if it hands out adapters."""
    pulls: list[int] = field(default_factory=list)
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, version: int) -> None:
        self.version = version
        self._arrival.set()

    async def pull(self, at_least: int) -> tuple[Manifest, dict[str, Tensor]]:
        while self.version < at_least:
            self._arrival.clear()
            await self._arrival.wait()
        version = self.version - 1 if self.late else self.version
        self.pulls.append(version)
        weights = weights_of(version)
        manifest = manifest_of(version, weights, self.probe, self.base)
        if self.corrupted:
            weights["w"][1] += 1
        return manifest, weights


def own_tokens(request: Request) -> Sequence[int]:
    """A reply of digits that differs from request to request, and not from engine to engine."""
    return [DIGIT + (request.seed + i * (i + 3)) % 7 for i in range(99)]


def scripted(name: str, reply: Callable[[Request], Sequence[int]] = own_tokens, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(reply, shapes={"w": (2,)}, version=-1, name=name, **options)


def text_of(num_tokens: int = 6, worker: str = "rollout-0") -> PolicyText:
    """Takes prompts of 60 tokens, for replies of `num_tokens`."""
    return PolicyText(
        codec=TextTokenizer(build_tokenizer()),
        sampling=Sampling(max_new_tokens=num_tokens),
        max_prompt_tokens=60,
        max_context_tokens=60 + num_tokens,
        worker=worker,
    )


def replica_of(
    puller: Shelf | None,
    engine: Engine,
    *,
    name: str = "rollout-0",
    when: Literal["between", "inflight", "beside"] = "between",
    base: str | None = None,
    num_slots: int = 64,
    verify_s: float = 0.0,
) -> EngineReplica:
    """A replica of an engine with `num_slots`; with `base`, it takes adapters."""
    change = WeightChange(when, tolerance=1e-3, verify_s=verify_s)
    return EngineReplica(name, engine, puller, change, num_slots=num_slots, base=base)


def sessions_of(
    *replicas: Replica,
    name: str = "session-0",
    workflow: Workflow | None = None,
    num_tokens: int = 6,
    ends: GroupEnds | None = None,
    group_s: float = inf,
    max_losses: int = 3,
    judge: EpisodeJudge | None = None,
) -> SessionWorker:
    """A session worker with these replicas, for replies of `num_tokens`."""
    road = PolicyRoad(text_of(num_tokens, name), RequestRouter(replicas, max_losses))
    sessions = GroupSessions(workflow or SingleTurn(), ends=ends)
    return SessionWorker(name, sessions, {POLICY: road}, group_s=group_s, judge=judge)


def worker_of(puller: Shelf | None, engine: Engine, **options: Any) -> SessionWorker:
    """A session worker with one replica; `options` are those of both."""
    own = {key: options.pop(key) for key in ("when", "base", "num_slots") if key in options}
    return sessions_of(replica_of(puller, engine, **own), **options)


def policy_of(text: PolicyText, engine: Engine) -> RoutedPolicy:
    """A policy on an engine that keeps its first weights."""
    return RoutedPolicy.of(text, RequestRouter([replica_of(None, engine)]), Claim(0), "session-0/0")


def assignment(version: int = 0, *, group_id: int = 3, prompt: str = "12>", size: int = 2) -> Assignment:
    return Assignment(GroupKey(group_id, 1), Task(id="sort-12", prompt=prompt), size, version, seed=1)


def played(workers: Sequence[EngineReplica | SessionWorker], scenario: Callable[[], Coroutine[object, object, T]]) -> T:
    """What the scenario returns; the workers are closed after it."""

    async def main() -> T:
        try:
            return await scenario()
        finally:
            for worker in workers:
                await worker.close()

    return asyncio.run(asyncio.wait_for(main(), 100))


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop go round until it is so."""
    while not is_so():  # noqa: ASYNC110  (the engine's ticks announce themselves to nobody)
        await asyncio.sleep(0)


class InProcess:
    """The Ray actor of a worker in this process, as far as `Remote` uses one."""

    def __init__(self, name: str, worker: object) -> None:
        self._worker = worker
        self._end, self._died = WorkerDied(name, "working", "the process is gone"), asyncio.Event()
        self.calls: list[str] = []
        """Methods that were called."""
        self.call, self.stream = _Method(self._called), _Method(self._streamed)

    def die(self) -> None:
        """End all calls, and every later one, with `WorkerDied`."""
        self._died.set()

    async def unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        if self._died.is_set():
            work.close()
            raise self._end
        return await unless(work, self._death())

    async def _death(self) -> None:
        await self._died.wait()
        raise self._end

    async def _called(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(path)

        async def answer() -> Any:
            made = attrgetter(path)(self._worker)(*args, **kwargs)
            return await made if asyncio.iscoroutine(made) else made

        return await self.unless_dead(answer())

    def _streamed(self, path: str, *args: Any) -> _Stream:
        self.calls.append(path)
        return _Stream(self, attrgetter(path)(self._worker)(*args))


@dataclass(frozen=True)
class _Method:
    remote: Callable[..., Any]


@dataclass(frozen=True)
class _Stream:
    """What a streaming call of Ray gives."""

    actor: InProcess
    values: AsyncIterator[object]

    def _get_next_ref_n(self, n: int) -> list[Coroutine[Any, Any, object]]:
        assert n == 1
        return [self.actor.unless_dead(self._next())]

    async def _next(self) -> object:
        try:
            return await anext(self.values)
        except StopAsyncIteration:
            raise ObjectRefStreamEndOfStreamError("the end") from None

    def _consume_next_ref_n(self, n: int) -> None: ...


def remote_of(name: str, worker: T) -> Remote[T]:
    """A worker in this process, called as one in another process is. Its `actor` can `die`."""
    return Remote(name, type(worker), InProcess(name, worker), 30.0)
