"""Training state at a URL: safetensors files of which only headers and the wanted rows are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from safetensors import SafetensorError
from safetensors.torch import _getdtype
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from rlsys.util.any_paths import RemotePath

SUFFIX = ".safetensors"
"""End of the names of the files."""
HEAD_BYTES = 2**18
"""Bytes that are read of each file for its header; a longer one takes a second read."""
PART_BYTES = 2**28
"""Bytes of tensors that are read at the same time, unless one tensor has more."""
_LENGTH_BYTES = 8
_MOST_NUMBER = 2**48


@dataclass(frozen=True)
class _Saved:
    """Place of a saved tensor, which may be a part of a whole."""

    file: str
    begin: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return prod(self.shape[1:]) * self.dtype.itemsize


class RemoteStateReader(HuggingFaceStorageReader):
    """Reads the files in a folder at a URL. Raises the errors of a `RemotePath`, and `SafetensorError` for a header
    that is damaged, as the reader of local files does."""

    def __init__(self, folder: RemotePath) -> None:
        super().__init__(str(folder))
        self._folder = folder

    def read_metadata(self) -> Metadata:
        """Return the shapes of all tensors, and where their parts are."""
        wholes: dict[str, TensorStorageMetadata] = {}
        parts: dict[MetadataIndex, _Saved] = {}
        for name, saved in self._tensors():
            offsets, sizes = torch.Size(saved.offsets), torch.Size(saved.shape)
            parts[MetadataIndex(name, offsets)] = saved
            whole = wholes.setdefault(
                name, TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size([0] * len(sizes)), [])
            )
            whole.chunks.append(ChunkStorageMetadata(offsets, sizes))
            ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
            whole.size = torch.Size(map(max, zip(whole.size, ends, strict=True)))
        return Metadata({**wholes}, storage_data=parts, storage_meta=StorageMeta(load_id=self.load_id))

    def _tensors(self) -> Iterator[tuple[str, _Saved]]:
        """Yield name and place of every part of a tensor."""
        sizes = {name: size for name, size in self._folder.sizes().items() if name.endswith(SUFFIX)}
        heads = self._folder.read_ranges([(name, 0, min(size, HEAD_BYTES)) for name, size in sizes.items()])
        for file, head in zip(sizes, heads, strict=True):
            begin = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
            if not _LENGTH_BYTES < begin <= sizes[file]:
                raise SafetensorError(f"the header of {file} has another length than the file has room for")
            rest = self._folder.read_ranges([(file, len(head), begin)])[0] if begin > len(head) else b""
            try:
                yield from [*_saved_in(file, begin, (head + rest)[_LENGTH_BYTES:begin])]
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                raise SafetensorError(f"the header of {file} is damaged: {error!r}") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the rows that this rank wants."""
        pending: list[tuple[ReadItem, _Saved]] = []
        num_bytes = 0
        for item in plan.items:
            saved = self.storage_data[item.storage_index]
            pending.append((item, saved))
            num_bytes += _rows_of(item, saved)[1] * saved.row_bytes
            if num_bytes >= PART_BYTES:
                self._read(pending, planner)
                pending, num_bytes = [], 0
        self._read(pending, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, wanted: list[tuple[ReadItem, _Saved]], planner: LoadPlanner) -> None:
        found = self._folder.read_ranges([_range_of(item, saved) for item, saved in wanted])
        for (item, saved), content in zip(wanted, found, strict=True):
            target = planner.resolve_tensor(item).detach()
            target.copy_(_wanted_of(item, saved, content))
            planner.commit_tensor(item, target)


def _saved_in(file: str, begin: int, header: bytes) -> Iterator[tuple[str, _Saved]]:
    """Yield name and place of every part of a tensor in a file, whose tensors begin at `begin`."""
    found = json.loads(header)
    offsets = json.loads(found.pop("__metadata__", {}).get(CUSTOM_METADATA_KEY, "{}"))
    for name, facts in found.items():
        shape = _numbers(facts["shape"])
        place = _numbers(offsets[name][SAVED_OFFSETS_KEY]) if name in offsets else (0,) * len(shape)
        first, _ = _numbers(facts["data_offsets"])
        if len(place) != len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions and {len(place)} offsets")
        yield name, _Saved(file, begin + first, shape, place, _getdtype(facts["dtype"]))


def _numbers(found: list[int]) -> tuple[int, ...]:
    if not all(isinstance(each, int) and 0 <= each < _MOST_NUMBER for each in found):
        raise ValueError(f"{found} are no sizes")
    return tuple(found)


def _rows_of(item: ReadItem, saved: _Saved) -> tuple[int, int]:
    """Return the first wanted index of the first dimension, and how many are wanted."""
    return (item.storage_offsets[0], item.lengths[0]) if saved.shape else (0, 1)


def _range_of(item: ReadItem, saved: _Saved) -> tuple[str, int, int]:
    first, num_rows = _rows_of(item, saved)
    begin = saved.begin + first * saved.row_bytes
    return saved.file, begin, begin + num_rows * saved.row_bytes


def _wanted_of(item: ReadItem, saved: _Saved, content: bytes) -> Tensor:
    """Cut the wanted tensor out of its rows."""
    _, num_rows = _rows_of(item, saved)
    shape = (num_rows, *saved.shape[1:]) if saved.shape else ()
    rows = torch.frombuffer(bytearray(content), dtype=saved.dtype) if content else torch.empty(0, dtype=saved.dtype)
    cuts = [slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True)]
    return rows.reshape(shape)[(slice(None), *cuts[1:])] if shape else rows.reshape(())
