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
    with _doing("write training state to", folder):
        writer = HuggingFaceStorageWriter(str(folder), _files_of(state), save_distributed=True)
        save(dict(state), storage_writer=writer, no_dist=num_ranks == 1)


def load_state(state: State, folder: Path, *, num_ranks: int) -> None:
    """Read into live tensors, in place. Collective. Raises `CheckpointError`."""
    with _doing("read training state from", folder):
        load(dict(state), storage_reader=_reader_of(folder), no_dist=num_ranks == 1)


def saved_names(folder: Path, part: str) -> set[str]:
    """Return the names of the tensors in one part of the saved state; empty if it was not saved."""
    with _doing("read training state from", folder):
        saved = _reader_of(folder).read_metadata().state_dict_metadata
    return {name.removeprefix(f"{part}.") for name in saved if name.startswith(f"{part}.")}


def _reader_of(folder: Path) -> HuggingFaceStorageReader:
    if not any(folder.glob("*.safetensors")):
        raise OSError("it contains no safetensors file; if another version of rlsys wrote it, go on with that one")
    return HuggingFaceStorageReader(str(folder))


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
def _doing(what: str, folder: Path) -> Iterator[None]:
    """Raise the first rank's error, without the checkpoint library's wrapping, as a `CheckpointError`.

    Suppresses the warning that a rank has no process group: a single rank needs none.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except (OSError, CheckpointException, SafetensorError) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((failure for failure, _ in failures), error)
        raise CheckpointError(f"cannot {what} {folder}: {cause}") from error
