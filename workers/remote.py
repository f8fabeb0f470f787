"""What runs inside each Ray actor's process: a plain worker, built in `setup` so that its errors arrive typed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import ray

from rlsys.batch.plan import RankPlan
from rlsys.contracts import Busy, Judged, RolledOut
from rlsys.errors import PayloadLost
from rlsys.types import Acknowledged, Assignment, Episode, ReplicaLoad, Sampling, Task
from workers.cluster import Resources
from workers.engines.base import Completion, Request
from workers.occupancy import Ticket
from workers.partials import Note, Partial, Partials
from workers.peers import RayPartials, RayPeer
from workers.rank import StepParcel
from workers.relays import RelayHandle
from workers.streams import Parcel, answer_in_chunks

if TYPE_CHECKING:
    from rlsys.rewards.combining import RewardSpec
    from workers.engines.base import EngineChoice, EngineSpec
    from workers.reward_model import RewardModel
    from workers.rollout import WeightChange

Payload: TypeAlias = tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What a rollout replica is built from."""

    engine: EngineSpec
    sampling: Sampling
    max_prompt_tokens: int
    workflow: str
    change: WeightChange
    transfer_s: float
    pulls: Literal["newest", "pinned", "never"]
    """Which weights it takes from its relay: the newest, exactly the version asked for (the evaluation lane), or none,
    keeping those of `model_path` for good (`rlsys eval`)."""
    resources: Resources


class RolloutActor:
    """A rollout replica's process."""

    def __init__(
        self, name: str, spec: RolloutSpec, relays: Sequence[RelayHandle], partials: RayPartials | None
    ) -> None:
        self._name, self._spec, self._relays, self._partials = name, spec, relays, partials

    async def setup(self) -> EngineChoice:
        import torch

        from rlsys.workflow import load_workflow
        from workers.codec import TextCodec
        from workers.engines.loading import choose, start_engine
        from workers.policy import Play
        from workers.recorder import Recorder
        from workers.rollout import RolloutWorker
        from workers.transport.object_store import ObjectStorePuller

        spec = self._spec
        torch.set_num_threads(spec.resources.threads)
        device = spec.resources.device()
        codec = TextCodec.load(spec.engine.model_path)
        choice = choose(spec.engine, device)
        engine = await start_engine(
            spec.engine, choice.engine, stop_token_ids=codec.stop_ids, device=device, worker=self._name
        )
        workflow = load_workflow(spec.workflow)
        if spec.pulls != "newest":
            workflow = workflow.in_evaluation()
        play = Play(workflow, codec, spec.sampling, spec.max_prompt_tokens)
        puller = None
        if spec.pulls != "never":
            puller = ObjectStorePuller(self._relays, spec.transfer_s, is_pinned=spec.pulls == "pinned")
        recorder = None if self._partials is None else Recorder(self._partials)
        self._worker = RolloutWorker(self._name, engine, play, puller, spec.change, recorder)
        return choice

    async def run(self, requests: list[tuple[Assignment, bool]]) -> AsyncIterator[object]:
        """Roll out assignments, each with whether it was given to a replica before."""
        async for part in answer_in_chunks(requests, self._rolled_out):
            yield part

    async def _rolled_out(self, request: tuple[Assignment, bool]) -> tuple[RolledOut, Payload]:
        assignment, is_again = request
        return await self._worker.run(assignment, is_again=is_again)

    async def held(self) -> Acknowledged | None:
        return self._worker.acknowledged

    async def load(self) -> ReplicaLoad:
        return self._worker.load()

    async def age_s(self, serial: int) -> float | None:
        return self._worker.age_s(serial)

    async def give_away(self, source: str, to: RayPeer) -> tuple[int, ...]:
        return await self._worker.give_away(source, to)

    async def forget(self, owner: str) -> None:
        await self._worker.forget(owner)

    async def host(self, tickets: list[Ticket], held: Acknowledged) -> bool:
        return await self._worker.host(tickets, held)

    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        return await self._worker.serve(ticket, request)

    async def let_go(self, ticket: Ticket, keep_cache: bool) -> None:
        await self._worker.let_go(ticket, keep_cache=keep_cache)

    async def close(self) -> None:
        await self._worker.close()


class PartialsActor:
    """The process of the partial response pool, one per run."""

    def __init__(self) -> None:
        self._partials = Partials()

    async def record(self, notes: list[Note]) -> list[tuple[int, int]]:
        return await self._partials.record(notes)

    async def recall(self, serial: int) -> Mapping[int, Partial]:
        return await self._partials.recall(serial)

    async def version(self, serial: int) -> int | None:
        return await self._partials.version(serial)

    async def forget(self, ticket: Ticket) -> None:
        await self._partials.forget(ticket)


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """What a reward model is built from."""

    path: str
    dtype: Literal["float32", "bfloat16"]
    max_tokens: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWorkerSpec:
    """What a reward worker is built from."""

    functions: tuple[RewardSpec, ...]
    processes: int
    timeout_s: float
    model: RewardModelSpec | None
    resources: Resources


class RewardActor:
    """A reward worker's process. Functions run in killable children of it, a reward model in the process itself."""

    def __init__(self, name: str, spec: RewardWorkerSpec) -> None:
        self._name, self._spec = name, spec

    async def setup(self) -> None:
        from workers.reward import RewardWorker

        spec = self._spec
        model = _loaded(spec.model, spec.resources) if spec.model else None
        self._worker = RewardWorker(spec.functions, spec.processes, spec.timeout_s, model=model, name=self._name)
        await self._worker.start()

    async def score(self, tasks: list[Task], parcel: Parcel) -> AsyncIterator[object]:
        requests = list(zip(tasks, await parcel.each(), strict=True))
        async for part in answer_in_chunks(requests, self._judged):
            yield part

    async def _judged(self, request: tuple[Task, Payload | PayloadLost]) -> tuple[Judged, None]:
        task, payload = request
        if isinstance(payload, PayloadLost):
            raise payload
        start_s = time.monotonic()
        scores = await self._worker.score(task, payload)
        return Judged(scores, Busy(self._name, start_s, time.monotonic())), None

    async def close(self) -> None:
        await self._worker.close()


def _loaded(spec: RewardModelSpec, resources: Resources) -> RewardModel:
    import torch

    from workers.reward_model import RewardModel

    torch.set_num_threads(resources.threads)
    return RewardModel(spec.path, spec.dtype, spec.max_tokens, spec.weight, resources.device())


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
    def annotate(self, parcel: Parcel) -> tuple[int, tuple[object, ...]]:
        """A receipt, and the column of each group. Raises `PayloadLost`."""
        payloads = parcel.open()
        return len(payloads), tuple(self._worker.logprobs(payload) for payload in payloads)

    def annotate_step(self, parcel: StepParcel, plans: Sequence[RankPlan]) -> tuple[object, ...]:
        """A receipt, and `Signal.REFERENCE_MISMATCHED` of each rank. Raises `PayloadLost`."""
        data = parcel.open()
        return len(plans), *(self._worker.mismatched(plan, data) for plan in plans)
