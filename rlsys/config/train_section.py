"""The sections `train`, `reference` and `critic`: the models in training, and the settings of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.config.network_section import NetworkSection
from rlsys.config.section import PathText, Section
from rlsys.util.number_ranges import Count, Fraction, ManyFrom1, PositiveFraction

Momentum = Annotated[float, Field(ge=0, lt=1)]
ActivationCheckpointing: TypeAlias = Literal["none", "selective", "full"]
"""Activations of a decoder layer that are not kept for the backward, but computed again: none; all but the results of
matrix products and of attention; all but the layer's input."""
GatherWeights: TypeAlias = Literal["micro_batch", "update"]
"""Period for which gathered weights, and the gradient that is not yet summed over ranks, are kept."""
LrStaleness: TypeAlias = Literal["none", "sqrt", "linear"]
"""Divisor of the learning rate for the age of samples: 1, the root of 1 + s, or 1 + s."""


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """The keys of `train` by which a rank saves memory and spends time. None changes what is computed."""

    activation_checkpointing: ActivationCheckpointing = "none"
    gather_weights: GatherWeights = "micro_batch"
    offload: bool = False


NO_SAVINGS = MemorySavings()


class TrainSection(Section):
    """Worker that trains, and the settings of one step (AdamW)."""

    groups_per_step: ManyFrom1 = 32
    """Groups of one step; each has `algorithm.group_size` episodes."""
    updates_per_step: Count = 1
    """Optimizer updates of one step, each on other groups. Above 1, later updates train on tokens of the weights before
    the step."""
    mesh: MeshSection = MeshSection()
    """Processes that train a model together, the actor and the critic each, and how they split it: `{shard: 8}`."""
    network: NetworkSection = NetworkSection()
    """Network that the ranks of actor and critic use between machines: `{interface: eth1}`."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`."""
    final_lr_fraction: Fraction = 1.0
    """Learning rate of the last step over `lr`, reached by `lr_schedule` after the warm-up; 1 keeps it constant."""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """Way from `lr` to `final_lr_fraction` of it after the warm-up: a line, or half a cosine."""
    lr_staleness: LrStaleness = "none"
    """Divisor of the policy's learning rate for the age of samples, s versions on average over the tokens of the step:
    `none`; `sqrt`: the root of 1 + s; `linear`: 1 + s."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    clip_norm: PositiveFloat = 1.0
    """Largest gradient norm, over all parameters and ranks."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens of one forward and backward pass, a row without padding in which shared prefixes count once; at least
    those of one sample. Bounds memory, changes no gradient. None: 8192 on a CPU; on a GPU as many as its memory has
    room for, a power of two up to 32,768 or one sample."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that a decoder layer computes again for its backward, instead of keeping them: `none`; `selective`:
    all but the results of matrix products and of attention; `full`: all. Saves memory for time, changes no gradient."""
    gather_weights: GatherWeights = "micro_batch"
    """How often ranks gather sharded weights and sum gradients: `micro_batch`: in every forward and backward pass;
    `update`: once. `update` keeps the whole model in `model.dtype` and its whole gradient in fp32 on every rank during
    an update, 6 bytes a parameter in bfloat16."""
    offload: bool = False
    """True to keep shards, gradients and optimizer state in host memory: a rank's GPU has only what it computes with,
    and the optimizer runs on the CPU. A rank on a CPU has its state in host memory anyway."""
    lora: LoraSection | None = None
    """Adapters that are trained instead of all weights, for the policy and the critic; null: none. `lora: {}` has the
    defaults."""
    routing_replay: bool = False
    """True to train a model with experts on those that the engine chose for each token, which rounding would let the
    trainer choose otherwise. Not supported by vLLM on a CPU."""

    @property
    def savings(self) -> MemorySavings:
        return MemorySavings(self.activation_checkpointing, self.gather_weights, self.offload)

    @field_validator("lr_schedule")
    @classmethod
    def _has_an_end(cls, schedule: str, info: ValidationInfo) -> str:
        if schedule == "cosine" and info.data.get("final_lr_fraction") == 1:
            raise ValueError("cosine with train.final_lr_fraction 1 is constant: set that to the end, e.g. 0.1 or 0")
        return schedule

    @field_validator("lora")
    @classmethod
    def _is_not_split(cls, lora: LoraSection | None, info: ValidationInfo) -> LoraSection | None:
        mesh = info.data.get("mesh", MeshSection())
        if lora is not None and mesh.tensor * mesh.expert > 1:
            raise ValueError(
                f"adapters of split layers are not supported, and train.mesh is {mesh}: use shard, replicate or context"
            )
        return lora

    @field_validator("updates_per_step")
    @classmethod
    def _has_groups_for_each(cls, updates_per_step: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups_per_step", updates_per_step)
        if updates_per_step > groups:
            raise ValueError(f"{updates_per_step} updates need as many groups, and train.groups_per_step is {groups}")
        return updates_per_step


class SyncSection(Section):
    """A reference that follows the policy: after every `every` steps it becomes `mixup * policy + (1 - mixup) *
    reference` (arXiv:2404.09656)."""

    every: PositiveInt = 512
    """Steps from one synchronization to the next."""
    mixup: PositiveFraction = 0.6
    """Share of the policy in the new weights of the reference; 1 copies the policy."""


class ReferenceSection(Section):
    """Frozen model, the initial one or a teacher. It runs only where the algorithm asks for it, and the initial model
    not with `train.lora` or `sync`: there the ranks of the actor compute its columns."""

    path: PathText | None = None
    """Another model, such as the teacher of `distill`: a folder or `org/name` on the hub, with the vocabulary of the
    policy. None: `model.path`."""
    sync: SyncSection | None = None
    """Lets the initial model follow the policy: `{every: 512, mixup: 0.6}`. The ranks of the actor keep its weights
    beside their own, and checkpoints have them. None: the reference stays as it is."""

    @field_validator("sync")
    @classmethod
    def _begins_as_the_policy(cls, sync: SyncSection | None, info: ValidationInfo) -> SyncSection | None:
        if sync is not None and info.data.get("path") is not None:
            raise ValueError("a reference that follows the policy begins as model.path: leave out reference.path")
        return sync


class CriticSection(Section):
    """Value model; runs only if the algorithm needs values, on ranks in the same mesh as those of the policy."""

    path: PathText | None = None
    """Initial model, a folder or `org/name` on the hub; None: `model.path`."""
    lr: PositiveFloat | None = None
    """Peak learning rate, with the schedule of the policy. None: ten times `train.lr`, as its head starts at 0."""
