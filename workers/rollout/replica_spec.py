"""Specification of a rollout replica, and its generators, which are loaded in the replica's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlsys.agents.workflow import Workflow
from rlsys.types import Sampling
from rlsys.weight_sync.relay import Relay
from workers.engines.engine import EngineSpec
from workers.ray.cluster import Resources
from workers.ray.remote_proxy import Remote
from workers.rollout.generator import Generator, WeightChange
from workers.rollout.group_route import PolicyText
from workers.rollout.partial_responses import Partials
from workers.rollout.partial_stream import PartialStream
from workers.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """The engine of a replica for one policy, and the source of its weights."""

    engine: EngineSpec
    change: WeightChange
    pulls: Literal["newest", "pinned", "never"]
    """Weights that the replica pulls from its relay: the newest, exactly the pinned version (evaluation), or none. With
    `never`, the weights of `model_path` stay loaded (a frozen policy, `rlsys eval`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Specification of a rollout replica."""

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
        """True if the samples of these replicas are trained."""
        return any(spec.pulls == "newest" for spec in self.generators.values())


async def load_generator(
    name: str, spec: RolloutSpec, policy: str, relays: Sequence[Remote[Relay]], partials: Remote[Partials] | None
) -> Generator:
    """Load the generator of a policy, in the process of the replica `name`."""
    from workers.engines.engine_choice import choose, start_engine
    from workers.transport.object_store import ObjectStorePuller

    own, device = spec.generators[policy], spec.resources.claim()
    choice, codec = choose(own.engine, device), TextTokenizer.load(own.engine.model_path)
    engine = await start_engine(own.engine, choice.engine, stop_token_ids=codec.stop_ids, device=device, worker=name)
    puller = None
    if own.pulls != "never":
        puller = ObjectStorePuller(relays, spec.transfer_s, is_pinned=own.pulls == "pinned")
    recorder = None if partials is None else PartialStream(partials.proxy)
    return Generator(
        name, engine, PolicyText(codec, spec.sampling, spec.max_prompt_tokens), puller, own.change, recorder, choice
    )
