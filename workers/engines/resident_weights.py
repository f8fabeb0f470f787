"""The weights in memory for one model: one set that is overwritten, or several side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlsys.types import PolicyVersion
from workers.transport.hashing import content_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A complete set of weights in the model's layout, with the hash of the given tensors."""

    tensors: Mapping[str, Tensor]
    hash: str


class Residents:
    """Weights by version; the model computes with the version last passed to `use`.

    With several sets, their tensors are never written again. So a set may share equal tensors with the set before it,
    and requests of its version may run for any time.
    """

    def __init__(self, model: PreTrainedModel, version: PolicyVersion) -> None:
        """Register the model's current weights as `version`."""
        self._parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        every = model.named_parameters(remove_duplicate=False)
        self._name_of = {alias: names[id(parameter)] for alias, parameter in every}  # tied tensors have several
        own = {name: p.data for name, p in self._parameters.items()}
        self._sets: dict[PolicyVersion, Mapping[str, Tensor]] = {version: own}  # replaced, not mutated: threads read it
        self._newest = self._used = version

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The loaded versions, in order of loading."""
        return tuple(self._sets)

    def num_bytes(self) -> int:
        tensors = {tensor.data_ptr(): tensor for tensors in self._sets.values() for tensor in tensors.values()}
        return sum(tensor.nbytes for tensor in tensors.values())

    @torch.no_grad()
    def overwrite(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> str:
        """Copy weights over the only set and assign it `version`. Returns the hash of the set's content."""
        tensors = self._sets[self._newest]
        for name, tensor in weights.items():
            tensors[self._name_of[name]].copy_(tensor)
        self._sets = {version: tensors}
        self._newest = self._used = version
        return content_hash({name: tensors[self._name_of[name]] for name in weights})

    @torch.no_grad()
    def lay_out(self, weights: Mapping[str, Tensor]) -> LaidOut:
        """Lay out weights as a new set, which shares equal tensors with the newest set. Thread-safe."""
        newest = self._sets[self._newest]
        tensors = {
            self._name_of[name]: _shared_or_copied(tensor, newest[self._name_of[name]])
            for name, tensor in weights.items()
        }
        return LaidOut(tensors, content_hash({name: tensors[self._name_of[name]] for name in weights}))

    def add(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Add a set from `lay_out` as the newest."""
        others = {held: tensors for held, tensors in self._sets.items() if held != version}
        self._sets = {**others, version: tensors}
        self._newest = version
        if version == self._used:
            self._point_at(version)

    def use(self, version: PolicyVersion) -> None:
        """Make the model compute with the weights of `version`."""
        if version != self._used:
            self._point_at(version)

    def evict_all_but(self, versions: Collection[PolicyVersion]) -> None:
        """Evict every set except the newest and those of `versions`."""
        kept = {self._newest, *versions}
        if self._used not in kept:
            self._point_at(self._newest)
        self._sets = {version: tensors for version, tensors in self._sets.items() if version in kept}

    def _point_at(self, version: PolicyVersion) -> None:
        tensors = self._sets[version]
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]
        self._used = version


def _shared_or_copied(given: Tensor, own: Tensor) -> Tensor:
    """Cast `given` to the device and dtype of `own`. Returns `own` if the bytes are equal, else a copy."""
    cast = given.detach().to(own.device, own.dtype)
    if torch.equal(cast.reshape(-1).view(torch.uint8), own.reshape(-1).view(torch.uint8)):
        return own
    return cast.clone(memory_format=torch.contiguous_format) if cast.data_ptr() == given.data_ptr() else cast
