"""What runs inside each Ray actor's process: a plain worker, built in `setup` so that its errors arrive typed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import ray

from rlsys.batch.plan import RankPlan
from rlsys.batch.samples import versions_of
from rlsys.contracts import Busy, Judged, RolledOut
from rlsys.curation import with_episode
from rlsys.errors import PayloadLost
from rlsys.types import POLICY, Acknowledged, Assignment, Episode, ReplicaLoad, Sampling, Task, VersionSpan
from workers.cluster import Resources
from workers.engines.base import Completion, Request
from workers.occupancy import Ticket
from workers.partials import Note, Partial, Partials
from workers.peers import RayPartials, RayPeer
from workers.rank import StepParcel
from workers.relays import RelayHandle
from workers.streams import Parcel, answer_in_chunks

if TYPE_CHECKING:
    import torch

    from rlsys.rewards.combining import RewardSpec
    from rlsys.workflow import Workflow
    from workers.engines.base import EngineChoice, EngineName, EngineSpec
    from workers.generator import Generator, WeightChange
    from workers.reward_model import RewardModel

Payload: TypeAlias = tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """What a replica generates with for one policy."""

    engine: EngineSpec
    change: WeightChange
    pulls: Literal["newest", "pinned", "never"]
    """Which weights it takes from its relay: the newest, exactly the version asked for (the evaluation lane), or none,
    keeping those of `model_path` for good (a frozen policy, `rlsys eval`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """What a rollout replica is built from."""

    generators: Mapping[str, GeneratorSpec]
    """By policy name."""
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name, see `Session`."""
    sampling: Sampling
    max_prompt_tokens: int
    workflow: Workflow
    transfer_s: float
    resources: Resources

    @property
    def is_training(self) -> bool:
        """Does anybody train what is rolled out?"""
        return any(spec.pulls == "newest" for spec in self.generators.values())


class RolloutActor:
    """A rollout replica's process."""

    def __init__(
        self, name: str, spec: RolloutSpec, relays: Mapping[str, Sequence[RelayHandle]], partials: RayPartials | None
    ) -> None:
        """`relays` are by policy name, of those that pull."""
        self._name, self._spec, self._relays, self._partials = name, spec, relays, partials

    async def setup(self) -> dict[str, EngineChoice]:
        """The engine of each policy."""
        import torch

        from workers.engines.loading import choose
        from workers.rollout import RolloutWorker

        spec = self._spec
        torch.set_num_threads(spec.resources.threads)
        device = spec.resources.device()
        choices = {name: choose(own.engine, device) for name, own in spec.generators.items()}
        generators = {name: await self._generator(name, choice.engine, device) for name, choice in choices.items()}
        workflow = spec.workflow if spec.is_training else spec.workflow.in_evaluation()
        self._worker = RolloutWorker(self._name, workflow, generators, spec.bindings)
        return choices

    async def _generator(self, policy: str, engine_name: EngineName, device: torch.device) -> Generator:
        from workers.codec import TextCodec
        from workers.engines.loading import start_engine
        from workers.generator import Generator
        from workers.policy import Speech
        from workers.recorder import Recorder
        from workers.transport.object_store import ObjectStorePuller

        spec, own = self._spec, self._spec.generators[policy]
        codec = TextCodec.load(own.engine.model_path)
        engine = await start_engine(
            own.engine, engine_name, stop_token_ids=codec.stop_ids, device=device, worker=self._name
        )
        puller = None
        if own.pulls != "never":
            puller = ObjectStorePuller(self._relays[policy], spec.transfer_s, is_pinned=own.pulls == "pinned")
        recorder = None if self._partials is None else Recorder(self._partials)
        speech = Speech(codec, spec.sampling, spec.max_prompt_tokens)
        return Generator(self._name, engine, speech, puller, own.change, recorder)

    async def run(self, requests: list[tuple[Assignment, bool]]) -> AsyncIterator[object]:
        """Roll out assignments, each with whether it was given to a replica before."""
        async for part in answer_in_chunks(requests, self._rolled_out):
            yield part

    async def _rolled_out(self, request: tuple[Assignment, bool]) -> tuple[RolledOut, Payload]:
        assignment, is_again = request
        return await self._worker.run(assignment, is_again=is_again)

    async def held(self) -> dict[str, Acknowledged]:
        return self._worker.held()

    async def load(self, policy: str) -> ReplicaLoad:
        return self._worker.load(policy)

    async def age_s(self, serial: int) -> float | None:
        return self._worker.age_s(serial)

    async def give_away(self, source: str, to: RayPeer) -> tuple[int, ...]:
        return await self._worker.generator.give_away(source, to)

    async def forget(self, owner: str) -> None:
        await self._worker.forget(owner)

    async def host(self, tickets: list[Ticket], held: Acknowledged) -> bool:
        return await self._worker.generator.host(tickets, held)

    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        return await self._worker.generator.serve(ticket, request)

    async def let_go(self, ticket: Ticket, keep_cache: bool) -> None:
        await self._worker.generator.let_go(ticket, keep_cache=keep_cache)

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

    @ray.method(num_returns=2)
    async def graft(
        self, parcel: Parcel, episode: int, donor_episode: int, policy: str
    ) -> tuple[tuple[VersionSpan, ...], tuple[Payload, ...]]:
        """The first payload of two with an episode of the second in it: what the policy sampled of it, and a chunk that
        holds it. Raises `PayloadLost`."""
        payloads = await parcel.each()
        if lost := [serial for payload in payloads if isinstance(payload, PayloadLost) for serial in payload.serials]:
            raise PayloadLost(tuple(lost))
        group, donor = payloads
        episodes = with_episode(group, episode, donor[donor_episode])
        return versions_of(episodes, policy), (episodes,)

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
        policy: str = POLICY,
    ) -> None:
        self._arguments = (model_path, dtype, temperature, max_tokens)
        self._resources, self._policy = resources, policy

    def setup(self) -> None:
        import torch

        from workers.reference import ReferenceWorker

        torch.set_num_threads(self._resources.threads)
        self._worker = ReferenceWorker(*self._arguments, self._resources.device(), self._policy)

    @ray.method(num_returns=2)
    def annotate(self, parcel: Parcel) -> tuple[int, tuple[object, ...]]:
        """A receipt, and the column of each group. Raises `PayloadLost`."""
        payloads = parcel.open()
        return len(payloads), tuple(self._worker.logprobs(payload) for payload in payloads)

    def annotate_step(self, parcel: StepParcel, plans: Sequence[RankPlan]) -> tuple[object, ...]:
        """A receipt, and `Signal.REFERENCE_MISMATCHED` of each rank. Raises `PayloadLost`."""
        data = parcel.open()
        return len(plans), *(self._worker.mismatched(plan, data) for plan in plans)
