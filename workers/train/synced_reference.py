"""A reference that follows the policy: a copy of its weights, which is synchronized with them every few steps.

    reference = SyncedReference(backend.parameters(), SyncSection(every=512, mixup=0.6))
    reference.end_step(512)
    with reference.swapped_in():
        ...  # the model computes as the reference

Each rank has its shards of both, so that a synchronization moves nothing between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlsys.config.train_section import SyncSection
from workers.model.model_tensors import local


class SyncedReference:
    """Every `sync.every` steps, `reference = mixup * policy + (1 - mixup) * reference` (TR-DPO, arXiv:2404.09656,
    equations 2 and 3)."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sync: SyncSection) -> None:
        """`parameters` are the live ones of the policy: the reference begins as their copy."""
        self._parameters, self._sync = parameters, sync
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        """Weights of the reference by name, shards of those of the policy; live, for checkpoints."""

    @torch.no_grad()
    def end_step(self, step: int) -> None:
        """Synchronize if it is due after train step number `step`, from 1."""
        if step % self._sync.every == 0:
            for name, parameter in self._parameters.items():
                local(self.tensors[name]).lerp_(local(parameter.detach()), self._sync.mixup)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchange the weights of model and reference, and back again: both are bit for bit what they were."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            own, other = local(parameter.detach()), local(self.tensors[name])
            before = own.clone()
            own.copy_(other)
            other.copy_(before)
