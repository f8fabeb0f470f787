"""Plug-in interface of stabilizers, which read and may edit gradients between backward and optimizer step.

A plug-in is a frozen dataclass, its configuration, whose `start` gives each rank of the actor a `Stabilizer`. Gradients
are a rank's shards by parameter name; a figure of the whole gradient takes one small all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    Gradients: TypeAlias = dict[str, Tensor]
    AllReduce: TypeAlias = Callable[[Mapping[str, Tensor]], Tensor]
    """Takes one small tensor for each parameter, computed from this rank's shard, all of one shape. Returns their sum
    over parameters and ranks, in fp64. A shard that several ranks hold counts once."""


@dataclass(frozen=True, slots=True)
class GradientDecision:
    """Decision on a gradient."""

    is_skipped: bool = False
    """True to skip the update; weights and optimizer then stay the same, bit for bit."""
    is_edited: bool = False
    """True if the gradient was edited; only then its norm is computed again."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class GradientPiece(Protocol):
    """Part of one parameter's shard, with the directions of its optimizer updates.

    Directions are computed on demand, before the learning rate and without weight decay; for Adam, m̂ / (sqrt(v̂) +
    eps). A direction is flat, in new memory, tens of megabytes at most.
    """

    @property
    def name(self) -> str:
        """Name of the parameter."""

    def before(self) -> Tensor:
        """Return the direction of the previous update; zeros before the first."""

    def now(self) -> Tensor:
        """Return the direction of this update, which is not applied yet."""

    def add(self, direction: Tensor, scale: float) -> None:
        """Move the weights additionally by `scale * direction`, in the optimizer's units: times -lr."""


class Updates(Protocol):
    """Optimizer update that is about to be applied."""

    def pieces(self) -> Iterable[GradientPiece]:
        """Yield all of this rank's shards that have a gradient, in pieces, always in the same order."""


class Stabilizer(Protocol):
    """Stabilizer of one rank. Its state is saved in checkpoints. A tensor under a parameter's name is sharded like that
    parameter; every other tensor is equal on all ranks."""

    @property
    def synchronous_steps_left(self) -> int:
        """Remaining `synchronous_steps`; equal on all ranks."""

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        """Inspect the gradient of an update, and edit it in place, before clipping.

        `squared_norm` is that of the whole gradient over all ranks, and finite. `staleness` is the mean number of
        weight versions since the step's tokens were sampled.
        """

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        """Inspect and edit the optimizer update, after clipping. Not called for a skipped update. Returns metrics."""

    def end_step(self) -> None:
        """End a step, after all its updates."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return live tensors. Their names and shapes never depend on the configuration, so a new stabilizer can load
        them."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state_dict`. Raises `CheckpointError` if this configuration cannot."""


@dataclass(frozen=True, kw_only=True)
class StabilizerPlugin:
    """Base of every stabilizer's configuration."""

    @property
    def synchronous_steps(self) -> int:
        """Policy steps without staleness that it needs from its start; the queue runs synchronously for so long."""
        return 0

    def start(self, shapes: Mapping[str, Tensor]) -> Stabilizer:
        """Create the stabilizer of one rank; `shapes` are its parameter shards, whose values do not matter."""
        raise NotImplementedError(f"{type(self).__name__} starts nothing: implement `start`")


CHUNK = 2**17
"""Elements that a CPU sums in fp32 before adding in fp64: few enough for a rounding error far below 1e-6."""
LARGEST = 2**30
"""Elements per sum on a GPU, which sums in a tree; its libraries use 32-bit indices."""


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two tensors of one shape, as an fp64 scalar. Needs no significant memory."""
    import torch

    flat_a, flat_b = a.reshape(-1).float(), b.reshape(-1).float()
    size = CHUNK if a.device.type == "cpu" else LARGEST
    products = [x.dot(y) for x, y in zip(flat_a.split(size), flat_b.split(size), strict=True)]
    return torch.stack(products).double().sum()


def alone(figures: Mapping[str, Tensor]) -> Tensor:
    """Sum over parameters: the `AllReduce` of a rank that has no others."""
    import torch

    of_parameters = [figure.double() for figure in figures.values()] or [torch.zeros((), dtype=torch.float64)]
    return torch.stack(of_parameters).sum(0)
