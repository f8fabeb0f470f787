"""Contents of a published version: which rank publishes which rectangle of which tensor, and its checksums.

A rank publishes a `VersionPart`: rectangles of tensors, in buckets of bytes. The parts of all ranks make a `Manifest`.

The checksum of a tensor is the sum of those of its rectangles, however it is cut. So every process checks what it has:
a rank what it publishes, a shard of an engine what it computes with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from statistics import fmean

import xxhash

from rlsys.types import PolicyVersion

ALIGNMENT = 64
"""Bytes: one cache line, a multiple of the alignment of every dtype."""
BUCKET_BYTES = 16 << 20
"""Largest bucket: a small one is mostly overhead, a large one makes every relay of a chain wait longer for the first
bytes."""
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
"""Bytes of an element by dtype; 1 for all others."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's, e.g. `bfloat16`) and shape of one published tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Elements of a tensor from `offset` on, `shape` of them in each dimension.

    The lower half of a tensor of shape `(4, 6)` has offset `(2, 0)` and shape `(2, 6)`.
    """

    tensor: TensorSpec
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: TensorSpec) -> Rectangle:
        """All of a tensor."""
        return cls(tensor, (0,) * len(tensor.shape), tensor.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES.get(self.tensor.dtype, 1)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this rectangle in its tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def within(self, other: Rectangle) -> tuple[slice, ...]:
        """Index of this rectangle in the tensor that has only `other`, which contains it."""
        starts = (own - outer for own, outer in zip(self.offset, other.offset, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def split(self, count: int) -> list[Rectangle]:
        """Cut into at most `count` rectangles along one dimension, of sizes that differ by 1 at the most."""
        axis = next((i for i, size in enumerate(self.shape) if size >= count), None)
        if axis is None:
            return [self]
        bounds = [self.shape[axis] * i // count for i in range(count + 1)]
        return [self._along(axis, start, end) for start, end in pairwise(bounds)]

    def cut(self, max_bytes: int) -> Iterator[Rectangle]:
        """Halve along the first dimension that can be, until no rectangle has more than `max_bytes`.

        Pieces cut along the first dimension lie one after the other in memory.
        """
        axis = next((i for i, size in enumerate(self.shape) if size > 1), None)
        if self.num_bytes <= max_bytes or axis is None:
            yield self
        else:
            middle = self.shape[axis] // 2
            yield from self._along(axis, 0, middle).cut(max_bytes)
            yield from self._along(axis, middle, self.shape[axis]).cut(max_bytes)

    def _along(self, axis: int, start: int, end: int) -> Rectangle:
        offset, shape = list(self.offset), list(self.shape)
        offset[axis] += start
        shape[axis] = end - start
        return Rectangle(self.tensor, tuple(offset), tuple(shape))


def shares(owned: Sequence[Iterable[Rectangle]]) -> list[list[Rectangle]]:
    """Return what each rank publishes, given what each rank has: every element exactly once.

    Ranks that have the same rectangle publish a part of it each. The others publish all that they have.
    """
    owners: dict[Rectangle, list[int]] = defaultdict(list)
    for rank, rectangles in enumerate(owned):
        for rectangle in rectangles:
            owners[rectangle].append(rank)
    published: list[list[Rectangle]] = [[] for _ in owned]
    for rectangle, ranks in owners.items():
        for rank, part in zip(ranks, rectangle.split(len(ranks)), strict=False):
            published[rank].append(part)
    return published


def pack(rectangles: Iterable[Rectangle], bucket_bytes: int = BUCKET_BYTES) -> list[tuple[Rectangle, ...]]:
    """Pieces of every bucket: rectangles in the order of tensors' names, cut where they are larger than a bucket.

    The bounds depend on the rectangles alone.
    """
    buckets: list[tuple[Rectangle, ...]] = []
    room = 0
    for rectangle in sorted(rectangles, key=lambda r: (r.tensor.name, r.offset)):
        for piece in rectangle.cut(bucket_bytes):
            if not buckets or piece.num_bytes > room:
                buckets.append(())
                room = bucket_bytes
            buckets[-1] += (piece,)
            room -= padded_size(piece.num_bytes)
    return buckets


def padded_size(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rectangles that are sent together, each beginning at a multiple of `ALIGNMENT` bytes."""

    hash: str
    """Hash of its bytes, including the padding between pieces: the name under which relays request it."""
    num_bytes: int
    pieces: tuple[Rectangle, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Logprobs from the trainer's forward pass for some tokens, under the published weights."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `token_ids[1:]`, at temperature 1."""

    def difference(self, logprobs: Sequence[float]) -> float:
        """Mean |difference| to other logprobs of the same tokens, in nats."""
        return fmean(abs(own - other) for own, other in zip(self.logprobs, logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class VersionPart:
    """One rank's share of a version: its buckets, and the checksums of its rectangles."""

    version: PolicyVersion
    rank: int
    num_ranks: int
    buckets: tuple[Bucket, ...]
    checksums: Mapping[str, int] = field(default_factory=dict)
    """Of its rectangles of each tensor, by name; modulo 2^64."""
    probe: Probe | None = None
    """Only from rank 0."""
    base: str | None = None
    """See `Manifest.base`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Manifest:
    """Contents of one version: the parts of all ranks, in order."""

    parts: tuple[VersionPart, ...]

    @property
    def version(self) -> PolicyVersion:
        return self.parts[0].version

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets of all ranks, in order."""
        return tuple(bucket for part in self.parts for bucket in part.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def probe(self) -> Probe | None:
        """Lets a replica verify that its engine computes as the trainer does."""
        return self.parts[0].probe

    @property
    def base(self) -> str | None:
        """Hash of the base, if the tensors are an adapter of it; None if they are all weights."""
        return self.parts[0].base

    @cached_property
    def checksums(self) -> dict[TensorSpec, int]:
        """Checksum of every tensor, whatever rank publishes which part of it."""
        specs = {p.tensor.name: p.tensor for b in self.buckets for p in b.pieces}
        return {specs[name]: sum(part.checksums.get(name, 0) for part in self.parts) % 2**64 for name in sorted(specs)}

    @cached_property
    def hash(self) -> str:
        """Content hash of the version: see `content_hash`."""
        return content_hash(self.checksums)


def content_hash(checksums: Mapping[TensorSpec, int]) -> str:
    """128-bit xxh3 over name, dtype, shape and checksum of every tensor, in name order; 32 hex digits."""
    total = xxhash.xxh3_128()
    for spec in sorted(checksums, key=lambda spec: spec.name):
        total.update(f"{spec.name}|{spec.dtype}|{spec.shape}|{checksums[spec]:016x}|".encode())
    return total.hexdigest()
