"""Memory of tensors that leaves its device for a while: for workers that share a device in turns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, UntypedStorage, nn

from workers.model.model_tensors import local


class MovingMemory:
    """Mover of the memory of tensors to the host and back. The tensors themselves stay: every reference to one is valid
    again after `move_in`, with the values from before `move_out`, and must not be used in between.

    The copies on the host keep their place, so that a hand-over allocates nothing there.
    """

    def __init__(self, device: torch.device) -> None:
        """Only the memory of `device` moves."""
        self._device = device
        self._hosts: dict[int, Tensor] = {}
        """Place on the host of each storage, by its number among those that move."""
        self._away: list[tuple[UntypedStorage, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are away."""
        return sum(len(host) for _, host in self._away)

    @torch.no_grad()
    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Move the memory of these tensors, of several that share it once."""
        assert not self._away, "the memory is away already"
        storages = _storages(tensors, self._device)
        for place, storage in enumerate(storages):
            host = self._host(place, storage.nbytes())
            host.copy_(_bytes_of(storage), non_blocking=True)
            self._away.append((storage, host))
        self._finish()
        for storage in storages:
            storage.resize_(0)
        if storages and self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def move_in(self) -> None:
        """Bring everything back."""
        for storage, host in self._away:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._finish()
        self._away = []

    def _host(self, place: int, num_bytes: int) -> Tensor:
        """Return memory of the host for the storage that moves as the one number `place`."""
        found = self._hosts.get(place)
        if found is None or len(found) != num_bytes:
            found = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._hosts[place] = found
        return found

    def _finish(self) -> None:
        """Return once all copies are done."""
        if self._away and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Storages of these tensors that are on the device and have memory, each once, in order."""
    found: dict[int, UntypedStorage] = {}
    for tensor in map(local, tensors):
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            assert storage.resizable(), "a tensor is mapped from a file: see `own_memory`"
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


@torch.no_grad()
def own_memory(model: nn.Module) -> None:
    """Copy the tensors of a model that are mapped from a file, so that their memory can move. Nothing may refer to the
    data of its parameters yet."""
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
