"""Training state on disk: safetensors files, written shard by shard and read back by any number of ranks.

The files are data: reading them executes nothing, whoever wrote them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from rlsys.contracts import Files
from rlsys.errors import CheckpointError
from rlsys.util.any_paths import AnyPath, RemotePath, writing
from rlsys.util.hashed_files import SavedFile
from workers.model.model_tensors import local
from workers.train.rank_group import RankGroup
from workers.train.remote_state import SUFFIX, RemoteStateReader

State: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""Part -> name -> tensor, possibly a shard (`DTensor`)."""
FILE_BYTES = 1 << 30
"""Size of a file, unless one tensor is larger. A rank holds a second copy of one file in memory while it writes."""


@dataclass(frozen=True)
class Writing:
    """Copy of a state in host memory, which a thread writes."""

    folder: AnyPath
    _copied: Future[None] | None
    _written: Future[None]
    _shards: _ShardFiles

    def wait_copied(self) -> None:
        """Return once the state is copied, or could not be, which `wait` tells: it may change from then on."""
        if self._copied is not None:
            wait([self._copied])

    def wait(self) -> Files:
        """Return the files of this rank once those of every rank are written. Raises `CheckpointError`."""
        with _doing("write training state to", self.folder):
            self._written.result()
            return dict(self._shards.saved)

    def settle(self) -> None:
        """Return once nothing is read from the copy, written or not."""
        wait([self._written])


class _ShardFiles(FileSystem):
    """Files of one rank in a folder, hashed while they are written. They are named by strings."""

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        self.saved: dict[str, SavedFile] = {}

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: writing makes the folder."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with writing(self._folder / str(path)) as stream:
            yield stream
        self.saved[str(path)] = stream.report


class StateWriter:
    """Writes the state of a rank to one checkpoint after the other, each from the same host memory."""

    def __init__(self, ranks: RankGroup, device: torch.device) -> None:
        """The host memory of state on a GPU is page-locked, and the copy ends at once. State in host memory is copied
        in a thread, beside the forward and backward passes of the next step.
        """
        is_gpu = device.type == "cuda"
        self._ranks = ranks
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_gpu,
                use_shared_memory=False,
                use_async_staging=not is_gpu,
                use_non_blocking_copy=is_gpu,
            )
        )
        self._newest: Writing | None = None

    def save(self, state: State, folder: AnyPath) -> Writing:
        """Begin to copy the state to host memory, then write it in a thread; each rank writes its shards. Collective.

        The state may change only after `wait_copied`.
        """
        if self._newest is not None:
            self._newest.settle()
        writer = HuggingFaceStorageWriter(str(folder), _files_of(state), save_distributed=True)
        writer.fs = shards = _ShardFiles(folder)
        writer.sync_files = not isinstance(folder, RemotePath)
        detached = {part: {name: t.detach() for name, t in tensors.items()} for part, tensors in state.items()}
        alone, group = self._ranks.num_ranks == 1, self._ranks.aside
        saving = async_save(
            detached, storage_writer=writer, async_stager=self._stager, process_group=group, no_dist=alone
        )
        if isinstance(saving, AsyncSaveResponse):
            self._newest = Writing(folder, saving.staging_completion, saving.upload_completion, shards)
        else:
            self._newest = Writing(folder, None, saving, shards)
        return self._newest

    def wait_copied(self) -> None:
        """Return once the newest saved state may change."""
        if self._newest is not None:
            self._newest.wait_copied()


def load_state(state: State, folder: AnyPath, *, num_ranks: int) -> None:
    """Read into live tensors, in place. Collective. Raises `CheckpointError`."""
    with _doing("read training state from", folder):
        load(dict(state), storage_reader=_reader_of(folder), no_dist=num_ranks == 1)


def saved_shapes(folder: AnyPath, part: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in one part of the saved state, by name; empty if it was not saved."""
    with _doing("read training state from", folder):
        saved = _reader_of(folder).read_metadata().state_dict_metadata
    of_part = {name.removeprefix(f"{part}."): each for name, each in saved.items() if name.startswith(f"{part}.")}
    return {name: tuple(each.size) for name, each in of_part.items() if isinstance(each, TensorStorageMetadata)}


def _reader_of(folder: AnyPath) -> HuggingFaceStorageReader:
    names = folder.names() if isinstance(folder, RemotePath) else [path.name for path in folder.glob("*")]
    if not any(name.endswith(SUFFIX) for name in names):
        raise OSError("it contains no safetensors file; if another version of rlsys wrote it, go on with that one")
    return RemoteStateReader(folder) if isinstance(folder, RemotePath) else HuggingFaceStorageReader(str(folder))


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
def _doing(what: str, folder: AnyPath) -> Iterator[None]:
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
