"""The stabilizer door: what looks at gradients between backward and optimizer step, and may edit them.

A plug-in is a frozen dataclass, its configuration, whose `start` gives each rank of the actor a `Stabilizer`. Gradients
are a rank's shards by parameter name; whatever is computed over whole gradients takes one small all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    Gradients: TypeAlias = dict[str, Tensor]
    AllReduce: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GradientDecision:
    """What became of a gradient."""

    is_skipped: bool = False
    """Is the update left out? Weights and optimizer then stay as they are, bit for bit."""
    is_edited: bool = False
    """Was the gradient changed? Its norm is computed again only then."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class GradientPiece(Protocol):
    """A part of one parameter's shard, and the directions in which the optimizer moves it: computed on demand, each
    before the learning rate and without weight decay; for Adam, m̂ / (sqrt(v̂) + eps). A direction is in new memory,
    tens of megabytes at most, and flat."""

    @property
    def name(self) -> str:
        """The parameter's."""
        ...

    def before(self) -> Tensor:
        """The direction of the update before this one; zeros before the first."""
        ...

    def now(self) -> Tensor:
        """The direction of this update, which is about to be taken."""
        ...

    def add(self, direction: Tensor, scale: float) -> None:
        """Move the weights by `scale * direction` besides, in the optimizer's own units: times -lr."""
        ...


class Updates(Protocol):
    """What the optimizer is about to do."""

    def pieces(self) -> Iterable[GradientPiece]:
        """All of this rank's shards that have a gradient, piece by piece and in the same order every time."""
        ...


class Stabilizer(Protocol):
    """One rank's. Its state is part of the checkpoint: a tensor under a parameter's name is sharded like that
    parameter, every other is equal on all ranks."""

    @property
    def synchronous_steps_left(self) -> int:
        """Of its `synchronous_steps`, those it has not seen yet; equal on all ranks."""
        ...

    def steer(self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce) -> GradientDecision:
        """Look at the gradient of an update, and edit it in place; before it is clipped.

        `squared_norm` is that of the whole gradient over all ranks, and finite. `all_reduce` sums a small tensor over
        ranks, in place.
        """
        ...

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        """Look at the optimizer's own update, and edit it; after clipping, before it is taken. Not called for a
        skipped one. Returns metrics."""
        ...

    def end_step(self) -> None:
        """All updates of a step were seen."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors; their names and shapes are always the same, whatever the configuration, so that a fresh one can
        be loaded into."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave. Raises `CheckpointError` if this configuration cannot."""
        ...


@dataclass(frozen=True, kw_only=True)
class StabilizerPlugin:
    """Base of every stabilizer's configuration."""

    @property
    def synchronous_steps(self) -> int:
        """Steps that train the policy which it must see without staleness, from when it starts; the queue runs
        synchronously so long."""
        return 0

    def start(self, shapes: Mapping[str, Tensor]) -> Stabilizer:
        """The stabilizer of one rank, whose parameter shards these are (their values do not matter)."""
        raise NotImplementedError(f"{type(self).__name__} starts nothing: implement `start`")


CHUNK = 2**17
"""Elements that a CPU sums in fp32 before the sum goes on in fp64: so few that rounding stays far below 1e-6."""
LARGEST = 2**30
"""Elements that a GPU sums at once; it adds them up in a tree, and its libraries count in 32 bits."""


def inner_product(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The inner product of two vectors that come in pieces on one device: an fp64 scalar there, this rank's part of it.

    Takes no memory to speak of.
    """
    import torch

    products: list[Tensor] = []
    for a, b in pairs:
        flat_a, flat_b = a.reshape(-1).float(), b.reshape(-1).float()
        size = CHUNK if a.device.type == "cpu" else LARGEST
        products += (x.dot(y) for x, y in zip(flat_a.split(size), flat_b.split(size), strict=True))
    return torch.stack(products).double().sum() if products else torch.zeros((), dtype=torch.float64)
