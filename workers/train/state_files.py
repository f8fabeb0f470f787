"""Training state on disk: safetensors files, written shard by shard and read back by any number of ranks.

The files are data: reading them executes nothing, whoever wrote them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rlsys.errors import CheckpointError
from workers.train.optimizer import local
from workers.train.rank_group import RankGroup

State: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Part -> name -> tensor, possibly a shard (`DTensor`)."""
_AT_ONCE = StagingOptions(False, False, False, False)
"""Copy to ordinary memory, before `async_save` returns."""
FILE_BYTES = 1 << 30
"""Size of a file, unless one tensor is larger. A rank holds a second copy of one file in memory while it writes."""


@dataclass(frozen=True)
class Writing:
    """Copy of a state in host memory, which a thread writes."""

    folder: Path
    _future: Future[object]

    def wait(self) -> None:
        """Return once every rank's files are written. Raises `CheckpointError`."""
        with _doing("write training state to", self.folder):
            self._future.result()


def save_state(state: State, folder: Path, ranks: RankGroup) -> Writing:
    """Copy the state to host memory, and write it in a thread; each rank writes its shards. Collective."""
    writer = HuggingFaceStorageWriter(str(folder), _files_of(state), save_distributed=True)
    stager = DefaultStager(_AT_ONCE)
    detached = {part: {name: t.detach() for name, t in tensors.items()} for part, tensors in state.items()}
    alone = ranks.num_ranks == 1
    writing = async_save(detached, storage_writer=writer, async_stager=stager, process_group=ranks.aside, no_dist=alone)
    assert isinstance(writing, Future), "the copy is made before it returns"
    writing.add_done_callback(lambda _: stager.close())
    return Writing(folder, writing)


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
