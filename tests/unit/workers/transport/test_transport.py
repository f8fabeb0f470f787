"""Weights as bytes: received weights are the written ones, whatever the ranks and the buckets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlsys.errors import WeightsMismatch
from rlsys.weight_sync.manifest import Manifest, Rectangle, TensorSpec, VersionPart
from tests.relays import specs_of
from workers.transport.buckets import PartLayout, ReceivedWeights, bucket_hash
from workers.transport.checksums import hash_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
Weights = dict[str, Tensor]


def random_weights(seed: int, shapes: list[list[int]], dtypes: list[torch.dtype]) -> Weights:
    chance = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randint(0, 2, shape, generator=chance).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }


def are_equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def packed(weights: Weights, bucket_bytes: int, num_ranks: int = 1) -> tuple[Manifest, list[np.ndarray]]:
    """What ranks publish that have all weights, and the bytes as they travel: copies."""
    parts, buckets = [], []
    wholes = {spec.name: Rectangle.whole(spec) for spec in specs_of(weights)}
    for rank in range(num_ranks):
        split = [rectangle.split(num_ranks) for rectangle in wholes.values()]
        layout = PartLayout([pieces[rank] for pieces in split if rank < len(pieces)], bucket_bytes)
        memory = np.zeros(layout.num_bytes, np.uint8)
        layout.write(memory, {name: (wholes[name], tensor.detach()) for name, tensor in weights.items()})
        parts.append(layout.part(memory, VersionPart(7, rank, num_ranks, ())))
        buckets += [memory[start:end].copy() for start, end in pairwise(layout.bounds)]
    return Manifest(tuple(parts)), buckets


@given(
    seed=st.integers(0, 10**6),
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=6, max_size=6),
    dtypes=st.permutations(DTYPES),
    bucket_bytes=st.sampled_from([1, 64, 200, 1 << 20]),
    num_ranks=st.integers(1, 3),
)
def test_whatever_is_packed_comes_back(seed, shapes, dtypes, bucket_bytes, num_ranks):
    weights = random_weights(seed, shapes, dtypes)
    manifest, buckets = packed(weights, bucket_bytes, num_ranks)
    assert (manifest.version, manifest.hash) == (7, hash_of(weights))
    assert [(bucket.hash, bucket.num_bytes) for bucket in manifest.buckets] == [
        (bucket_hash(data), data.nbytes) for data in buckets
    ]
    back = dict(ReceivedWeights(manifest, buckets, "relay-0"))
    assert are_equal(back, weights)
    assert hash_of(back) == manifest.hash


def test_written_weights_are_cast():
    layout = PartLayout([Rectangle.whole(TensorSpec("w", "bfloat16", (3,)))])
    memory = np.zeros(layout.num_bytes, np.uint8)
    shard = Rectangle.whole(TensorSpec("w", "bfloat16", (3,))), torch.tensor([1.0, 2.0, 3.0])
    layout.write(memory, {"w": shard})
    manifest = Manifest((layout.part(memory, VersionPart(0, 0, 1, ())),))
    assert manifest.hash == hash_of({"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)})


def test_views_and_gradients_are_packed_by_value():
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4).requires_grad_()
    weights = {"t": whole.T, "row": whole[1]}
    back = dict(ReceivedWeights(*packed(weights, 64), "relay-0"))
    assert are_equal(back, {name: tensor.detach() for name, tensor in weights.items()})


def test_tensors_in_one_piece_are_views_of_what_came():
    manifest, buckets = packed({"w": torch.zeros(4)}, 64)
    weights = ReceivedWeights(manifest, buckets, "relay-0")
    buckets[0][0] = 1
    assert weights["w"].view(torch.uint8)[0] == 1


def test_a_version_without_the_part_of_a_rank_is_refused():
    manifest, buckets = packed({"w": torch.zeros(8), "v": torch.zeros(8)}, 1 << 20, num_ranks=2)
    with pytest.raises(WeightsMismatch, match="relay-0 while serving version 7: 2 tensors are not whole, as v"):
        ReceivedWeights(Manifest(manifest.parts[:1]), buckets[:1], "relay-0")
