"""Training state on disk: safetensors files, written shard by shard and read back by any number of ranks.

The files are data: reading them executes nothing, whoever wrote them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlsys.errors import CheckpointError
from workers.train.optimizer import local

State: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Part -> name -> tensor, possibly a shard (`DTensor`)."""
FILE_BYTES = 1 << 30
"""Size of a file, unless one tensor is larger. A rank holds a second copy of one file in memory while it writes."""


def save_state(state: State, folder: Path, *, num_ranks: int) -> None:
    """Write the state; each rank writes its shards. Collective. Raises `CheckpointError`."""
    writer = HuggingFaceStorageWriter(str(folder), _files_of(state), save_distributed=True)
    try:
        with _knowingly_alone():
            save(dict(state), storage_writer=writer, no_dist=num_ranks == 1)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write training state to {folder}: {_cause(error)}") from error


def load_state(state: State, folder: Path, *, num_ranks: int) -> None:
    """Read into live tensors, in place. Collective. Raises `CheckpointError`."""
    with _readable(folder), _knowingly_alone():
        load(dict(state), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=num_ranks == 1)


def saved_names(folder: Path, part: str) -> set[str]:
    """Return the names of the tensors in one part of the saved state; empty if it was not saved."""
    with _readable(folder):
        saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name.removeprefix(f"{part}.") for name in saved if name.startswith(f"{part}.")}


def _files_of(state: State) -> dict[str, int]:
    """Return the number of the file, from 1, that each tensor belongs in."""
    files: dict[str, int] = {}
    number, num_bytes = 1, 0
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            size = local(tensor).nbytes
            if num_bytes and num_bytes + size > FILE_BYTES:
                number, num_bytes = number + 1, 0
            num_bytes += size
            files[f"{part}.{name}"] = number
    return files


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    if not any(folder.glob("*.safetensors")):
        remedy = "if another version of rlsys wrote it, go on with that one"
        raise CheckpointError(f"cannot read training state from {folder}: it contains no safetensors file; {remedy}")
    try:
        yield
    except (OSError, CheckpointException, SafetensorError) as error:
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
