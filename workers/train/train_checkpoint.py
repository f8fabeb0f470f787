"""Training state on disk: torch distributed checkpoints, which load onto any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from rlsys.errors import CheckpointError


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Live tensors by name, without copies: weights, and each weight's optimizer state. Tied weights appear once."""
    state: dict[str, dict[str, Tensor]] = {"model": dict(model.named_parameters())}
    for name, parameter in model.named_parameters():
        state[f"optimizer.{name}"] = optimizer.state[parameter]
    return state


def as_sharded(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The same memory; tensors named after a parameter become shards of a whole, sharded like the parameter."""
    return {name: _like(tensor, parameters.get(name)) for name, tensor in tensors.items()}


def _like(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(tensor, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def save(state: dict[str, dict[str, Tensor]], folder: Path, *, num_ranks: int) -> None:
    """Write live tensors; each rank writes its shards."""
    try:
        with _knowingly_alone():
            dcp_save(state, checkpoint_id=folder, no_dist=num_ranks == 1)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write training state to {folder}: {_cause(error)}") from error


def load(state: dict[str, dict[str, Tensor]], folder: Path, *, num_ranks: int) -> None:
    """Read into live tensors, in place."""
    with _readable(folder), _knowingly_alone():
        dcp_load(state, checkpoint_id=folder, no_dist=num_ranks == 1)


def names_in(folder: Path, part: str) -> set[str]:
    """Names of the tensors in one part of the saved state; empty if it was not saved."""
    with _readable(folder):
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name.removeprefix(f"{part}.") for name in saved if name.startswith(f"{part}.")}


def check_same(stabilizer: Iterable[str], saved: set[str], folder: Path) -> None:
    """Raise `CheckpointError` unless a stabilizer's state has the names that were saved."""
    if differing := saved.symmetric_difference(stabilizer):
        raise CheckpointError(
            f"{folder} holds the state of another stabilizer, they differ in {len(differing)} tensors, as "
            f"{min(differing)!r}: go on with the one it was saved with, or with `stabilizer: null`"
        )


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot read training state from {folder}: {_cause(error)}") from error


@contextmanager
def _knowingly_alone() -> Iterator[None]:
    """Suppress the warning that a rank has no process group: a single rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: BaseException) -> str:
    """Message of the first rank's error, without the checkpoint library's wrapping."""
    if isinstance(error, CheckpointException) and error.failures:
        return str(next(iter(error.failures.values()))[0])
    return str(error)
