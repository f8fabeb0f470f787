"""Rollout workers on engines without Ray, and the shelf they get weights from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from examples.tiny_policy import build_tokenizer
from rlsys.agents.workflow import SingleTurn, Workflow
from rlsys.types import POLICY, Assignment, GroupKey, Sampling, Task
from rlsys.weight_sync.manifest import Bucket, Manifest, Probe, Rectangle, VersionPart, pack
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import Engine, Request
from workers.rollout.early_ends import GroupEnds
from workers.rollout.generator import Generator, WeightChange
from workers.rollout.group_route import PolicyText
from workers.rollout.partial_responses import PartialStream
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_host import GroupSessions, SessionHost, SessionHosts
from workers.rollout.turn_router import TurnRouter
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


def scripted(name: str, reply: Callable[[Request], Sequence[int]] = own_tokens, **options: int) -> ScriptedEngine:
    return ScriptedEngine(reply, shapes={"w": (2,)}, version=-1, name=name, **options)


def replica_of(
    puller: Shelf | None,
    engine: Engine,
    *,
    name: str = "rollout-0",
    when: Literal["between", "inflight", "beside"] = "between",
    workflow: Workflow | None = None,
    num_tokens: int = 6,
    recorder: PartialStream | None = None,
    base: str | None = None,
    num_slots: int | None = None,
    ends: GroupEnds | None = None,
    hosts: Sequence[SessionHost] = (),
) -> RolloutWorker:
    """A replica that takes prompts of 60 tokens, and replies with `num_tokens`; with `base`, it takes adapters. With
    `num_slots`, which are those of its engine, it routes single turns."""
    sampling = Sampling(max_new_tokens=num_tokens)
    speech = PolicyText(
        TextTokenizer(build_tokenizer()),
        sampling,
        max_prompt_tokens=60,
        max_context_tokens=60 + sampling.max_new_tokens,
    )
    turns = None if num_slots is None else TurnRouter(num_slots)
    change = WeightChange(when, tolerance=1e-3)
    generator = Generator(name, engine, speech, puller, change, recorder, base=base, turns=turns)
    sessions = GroupSessions(workflow or SingleTurn(), ends=ends)
    return RolloutWorker(name, sessions, {POLICY: generator}, SessionHosts(hosts))


def assignment(version: int = 0, *, group_id: int = 3, prompt: str = "12>", size: int = 2) -> Assignment:
    return Assignment(GroupKey(group_id, 1), Task(id="sort-12", prompt=prompt), size, version, seed=1)


def played(workers: Sequence[RolloutWorker], scenario: Callable[[], Coroutine[object, object, T]]) -> T:
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
