"""Specification of replicas and session workers, and the processes that they are built in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from rlsys.agents.workflow import Workflow
from rlsys.config.chat_section import ChatSection
from rlsys.errors import ConfigError
from rlsys.routing.request_router import RequestRouter
from rlsys.types import Sampling
from workers.engines.engine import EngineSpec, ServerSpec
from workers.ray.cluster import Resources
from workers.rollout.early_ends import EpisodeJudge, GroupEnds
from workers.rollout.policy_text import PolicyText
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_weights import WeightChange
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.session_worker import GroupSessions, PolicyRoad, SessionWorker
from workers.text.tokenizer import AS_MADE, TextTokenizer
from workers.transport.route import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """The engine of a replica for one policy, and the source of its weights."""

    engine: EngineSpec
    change: WeightChange
    pulls: Literal["newest", "pinned", "never"]
    """Weights that the replica pulls from its relay: the newest, exactly the pinned version (evaluation), or none. With
    `never`, the weights of `model_path` stay loaded (a frozen policy, `rlsys eval`)."""
    servers: tuple[ServerSpec, ...] = ()
    """Servers of the engine `vllm_server`, by the replica's place."""

    def at(self, place: int) -> Self:
        """Specification for the replica at a place. Raises `ConfigError` if there is no server for it."""
        if not self.servers:
            return self
        if place >= len(self.servers):
            raise ConfigError(
                f"rollout.engine.urls: {len(self.servers)} servers are too few: each replica needs its own"
            )
        return replace(self, engine=replace(self.engine, server=self.servers[place]), servers=())


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Specification of replicas and of the session workers that ask them."""

    policies: Mapping[str, ReplicaSpec]
    """By policy name."""
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name, see `Session`."""
    sampling: Sampling
    max_prompt_tokens: int
    workflow: Workflow
    resources: Resources
    """Of a replica."""
    group_s: float
    """Seconds that a group may wait for tokens."""
    max_losses: int
    """Replicas that one request may lose one after the other."""
    chat: ChatSection = AS_MADE
    """With the text of its template."""
    ends_early: bool = False
    judge: Callable[[str], EpisodeJudge] | None = None
    """Makes the judge of ended episodes, with the worker's name; None: only workflows give rewards."""
    scores: bool = False
    """True if groups are scored where they are played."""

    def text_of(self, policy: str, worker: str) -> PolicyText:
        """Load what turns prompts of a policy into tokens."""
        own = self.policies[policy].engine
        return PolicyText(
            codec=TextTokenizer.load(own.model_path, self.chat),
            sampling=self.sampling,
            max_prompt_tokens=self.max_prompt_tokens,
            max_context_tokens=own.max_context,
            worker=worker,
        )

    async def session_worker(self, name: str, local: Mapping[str, EngineReplica] | None = None) -> SessionWorker:
        """Build a session worker in this process, beside the replicas `local` if there are any."""
        judge = self.judge(name) if self.scores and self.judge else None
        if judge is not None:
            await judge.start()
        ends = None
        if self.ends_early:
            ends = GroupEnds(judge=judge or (self.judge(name) if self.judge else None))
        roads = {
            policy: PolicyRoad(self.text_of(policy, name), RequestRouter(max_losses=self.max_losses))
            for policy in self.policies
        }
        sessions = GroupSessions(self.workflow, self.bindings, ends)
        return SessionWorker(name, sessions, roads, group_s=self.group_s, judge=judge, local=local)

    async def apart(self, name: str) -> SessionWorker:
        """Build a session worker in a process of its own."""
        return await self.session_worker(name)


async def load_replica(name: str, spec: RolloutSpec, policy: str, route: Route | None) -> EngineReplica:
    """Load the replica of a policy, in the process of the worker `name`."""
    from workers.engines.engine_choice import choose, start_engine
    from workers.model.adapter_files import base_hash
    from workers.transport.puller import WeightPuller

    own, device = spec.policies[policy], spec.resources.claim()
    choice, codec = choose(own.engine, device), spec.text_of(policy, name).codec
    engine = await start_engine(
        own.engine, choice.engine, stop_token_ids=codec.stop_ids, decode=codec.decode, device=device, worker=name
    )
    puller = None
    if own.pulls != "never":
        assert route is not None, "a policy that pulls has relays"
        puller = WeightPuller(route, is_pinned=own.pulls == "pinned")
    base = base_hash(own.engine.model_path) if own.engine.lora else None
    slots = own.engine.slots
    replica = EngineReplica(name, engine, puller, own.change, num_slots=slots, choice=choice, base=base)
    replica.start_verifying()
    return replica


class RolloutWorker:
    """Process of a replica for each policy, and of a session worker where workflows are played beside the engines."""

    def __init__(self, name: str, replica: ReplicaWorker, sessions: SessionWorker | None = None) -> None:
        self.name, self.replica, self.sessions = name, replica, sessions

    @classmethod
    async def of(cls, name: str, spec: RolloutSpec, routes: Mapping[str, Route], *, plays: bool) -> Self:
        """Load the engine of each policy, in this process. `routes` are by name of the policies that pull. `plays`:
        groups are played here too."""
        replicas = {policy: await load_replica(name, spec, policy, routes.get(policy)) for policy in spec.policies}
        sessions = await spec.session_worker(name, replicas) if plays else None
        return cls(name, ReplicaWorker(name, replicas), sessions)

    async def close(self) -> None:
        """Free the engines, and end what runs."""
        if self.sessions is not None:
            await self.sessions.close()
        await self.replica.close()
