"""What runs inside each Ray actor's process: a plain worker, built in `setup` so that its errors arrive typed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import ray

from rlsys.contracts import Busy, Judged
from rlsys.types import Acknowledged, Assignment, Episode, Sampling, Task
from workers.cluster import RayActor, Resources
from workers.streams import Places, answer_in_chunks

if TYPE_CHECKING:
    from rlsys.weights import Manifest

Payload: TypeAlias = tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What a rollout replica is built from."""

    model_path: str
    dtype: Literal["float32", "bfloat16"]
    slots: int
    sampling: Sampling
    max_prompt_tokens: int
    max_context: int
    workflow: str
    weight_change: Literal["between", "inflight"]
    transfer_s: float
    pulls_weights: bool
    """False: keep the weights of `model_path` for good (evaluation)."""
    resources: Resources


class RolloutActor:
    """A rollout replica's process."""

    def __init__(self, name: str, spec: RolloutSpec, relays: Mapping[str, RayActor]) -> None:
        self._name, self._spec, self._relays = name, spec, relays

    async def setup(self) -> None:
        import torch

        from rlsys.workflow import load_workflow
        from workers.codec import TextCodec
        from workers.engines.loading import load_local
        from workers.rollout import EnginePolicy, RolloutWorker
        from workers.transport.object_store import ObjectStorePuller

        spec = self._spec
        torch.set_num_threads(spec.resources.threads)
        codec = TextCodec.load(spec.model_path)
        engine = load_local(
            spec.model_path,
            dtype=spec.dtype,
            num_slots=spec.slots,
            max_context=spec.max_context,
            stop_token_ids=codec.stop_ids,
            name=self._name,
            device=spec.resources.device(),
        )
        policy = EnginePolicy(engine, codec, spec.sampling, spec.max_prompt_tokens, self._name)
        puller = ObjectStorePuller(self._relays, spec.transfer_s) if spec.pulls_weights else None
        self._worker = RolloutWorker(
            self._name, engine, policy, load_workflow(spec.workflow), puller, spec.weight_change
        )

    async def run(self, assignments: list[Assignment]) -> AsyncIterator[object]:
        async for part in answer_in_chunks(assignments, self._worker.run):
            yield part

    async def held(self) -> Acknowledged | None:
        return self._worker.acknowledged

    async def close(self) -> None:
        await self._worker.close()


class RewardActor:
    """A reward worker's process; the functions themselves run in killable children of it."""

    def __init__(self, name: str, function: str, processes: int, timeout_s: float) -> None:
        self._name, self._arguments = name, (function, processes, timeout_s)

    async def setup(self) -> None:
        from workers.reward import RewardWorker

        function, processes, timeout_s = self._arguments
        self._worker = RewardWorker(function, processes, timeout_s, name=self._name)
        await self._worker.start()

    async def score(self, tasks: list[Task], places: Places, *chunks: tuple[Payload, ...]) -> AsyncIterator[object]:
        requests = list(zip(tasks, places.pick(chunks), strict=True))
        async for part in answer_in_chunks(requests, self._judged):
            yield part

    async def _judged(self, request: tuple[Task, Payload]) -> tuple[Judged, None]:
        start_s = time.monotonic()
        scores = await self._worker.score(*request)
        return Judged(scores, Busy(self._name, start_s, time.monotonic())), None

    async def close(self) -> None:
        await self._worker.close()


class RelayActor:
    """A relay's process, one per node."""

    def __init__(self) -> None:
        from workers.relay import Relay

        self._relay = Relay()

    async def hold(self, manifest: Manifest, buckets: list[Any]) -> None:
        await self._relay.hold(manifest, buckets)

    async def newest(self, at_least: int) -> tuple[Manifest, list[Any]]:
        return await self._relay.newest(at_least)


class ReferenceActor:
    """The reference worker's process."""

    def __init__(
        self,
        model_path: str,
        dtype: Literal["float32", "bfloat16"],
        temperature: float,
        max_tokens: int,
        resources: Resources,
    ) -> None:
        self._arguments = (model_path, dtype, temperature, max_tokens)
        self._resources = resources

    def setup(self) -> None:
        import torch

        from workers.reference import ReferenceWorker

        torch.set_num_threads(self._resources.threads)
        self._worker = ReferenceWorker(*self._arguments, self._resources.device())

    @ray.method(num_returns=2)
    def annotate(self, places: Places, *chunks: tuple[Payload, ...]) -> tuple[int, tuple[object, ...]]:
        """A receipt, and the column of each group."""
        return len(places.of), tuple(self._worker.logprobs(payload) for payload in places.pick(chunks))
