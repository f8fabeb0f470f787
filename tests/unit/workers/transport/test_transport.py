"""Weights as bytes: unpacking restores the packed weights, and the hash detects every difference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.weight_sync.sync import Manifest, TensorSpec
from tests.relays import specs_of
from workers.transport.buckets import Snapshot, bucket_hash, content_hash, unpack
from workers.transport.object_store import bucket_bytes

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


def packed(version: int, weights: Weights, bucket_bytes: int) -> tuple[Manifest, list[np.ndarray]]:
    """What is published, and the bytes as they travel: copies."""
    snapshot = written(Snapshot(specs_of(weights), bucket_bytes), weights)
    manifest = snapshot.manifest(version)
    return manifest, [snapshot.bucket(i).copy() for i in range(len(manifest.buckets))]


def written(snapshot: Snapshot, weights: Weights) -> Snapshot:
    for name, tensor in weights.items():
        snapshot.tensors[name].copy_(tensor.detach())
    return snapshot


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=6, max_size=6),
    dtypes=st.permutations(DTYPES),
    bucket_bytes=st.sampled_from([1, 64, 200, 1 << 20]),
)
def test_whatever_is_packed_comes_back(seed, shapes, dtypes, bucket_bytes):
    weights = random_weights(seed, shapes, dtypes)
    manifest, buckets = packed(7, weights, bucket_bytes)
    assert (manifest.version, manifest.hash) == (7, content_hash(weights))
    assert [(bucket.hash, bucket.num_bytes) for bucket in manifest.buckets] == [
        (bucket_hash(data), data.nbytes) for data in buckets
    ]
    back = unpack(manifest, buckets)
    assert are_equal(back, weights)
    assert content_hash(back) == manifest.hash


def test_buckets_follow_name_order_and_large_tensors_are_split():
    sizes = zip("edcba", (9, 100, 300, 64, 60), strict=True)
    weights = {name: torch.zeros(count, dtype=torch.uint8) for name, count in sizes}
    manifest, buckets = packed(0, weights, 128)
    pieces = [[(p.tensor.name, p.start, p.num_bytes) for p in bucket.pieces] for bucket in manifest.buckets]
    assert pieces == [
        [("a", 0, 60), ("b", 0, 64)],
        [("c", 0, 128)],
        [("c", 128, 128)],
        [("c", 256, 44)],
        [("d", 0, 100)],
        [("e", 0, 9)],
    ]
    assert [data.nbytes for data in buckets] == [128, 128, 128, 64, 128, 64]


def test_a_changed_tensor_changes_only_the_hash_of_its_bucket():
    weights = {f"layer.{i}": torch.full((32,), float(i)) for i in range(9)}
    before, _ = packed(0, weights, 256)
    after, _ = packed(1, {**weights, "layer.4": torch.ones(32)}, 256)
    changed = [
        [piece.tensor.name for piece in new.pieces]
        for old, new in zip(before.buckets, after.buckets, strict=True)
        if old.hash != new.hash
    ]
    assert changed == [["layer.4", "layer.5"]]


def test_a_snapshot_reuses_its_memory_and_casts_written_tensors():
    snapshot = Snapshot([TensorSpec("w", "bfloat16", (3,))], 64)
    place = snapshot.tensors["w"].data_ptr()
    first = written(snapshot, {"w": torch.tensor([1.0, 2.0, 3.0])}).manifest(0)
    assert snapshot.tensors["w"].dtype == torch.bfloat16 and snapshot.tensors["w"].data_ptr() == place
    assert first.hash == content_hash({"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)})
    assert written(snapshot, {"w": torch.tensor([4.0, 5.0, 6.0])}).manifest(1).hash != first.hash


def test_views_and_gradients_are_packed_by_value():
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4).requires_grad_()
    weights = {"t": whole.T, "row": whole[1]}
    assert are_equal(unpack(*packed(0, weights, 64)), {name: tensor.detach() for name, tensor in weights.items()})


def test_tensors_of_whole_buckets_are_views_of_what_came():
    manifest, buckets = packed(0, {"w": torch.zeros(4)}, 64)
    weights = unpack(manifest, buckets)
    buckets[0][0] = 1
    assert weights["w"].view(torch.uint8)[0] == 1


def flipped(weights: Weights) -> Weights:
    """One bit of one byte."""
    changed = weights["b"].clone()
    changed.view(torch.uint8)[5] ^= 1
    return {**weights, "b": changed}


CHANGES: dict[str, Callable[[Weights], Weights]] = {
    "one bit": flipped,
    "a name": lambda w: {"a": w["a"], "c": w["b"]},
    "a shape": lambda w: {**w, "b": w["b"].reshape(2, 3)},
    "a dtype": lambda w: {**w, "b": w["b"].view(torch.int32)},
    "two names exchanged": lambda w: {"a": w["b"], "b": w["a"]},
    "one tensor less": lambda w: {"a": w["a"]},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_hash_changes_with(change):
    weights = {"a": torch.zeros(6), "b": torch.arange(6, dtype=torch.float32)}
    assert content_hash(change(weights)) != content_hash(weights)


def test_the_hash_depends_neither_on_order_nor_on_memory_layout():
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    same = {"b": weights["b"].clone(), "a": weights["a"].T.contiguous().T}
    assert content_hash(same) == content_hash(weights)
    assert len(content_hash(weights)) == 32


@pytest.mark.parametrize("num_relays", [1, 2, 8, 64])
@pytest.mark.parametrize("num_bytes", [0, 10_000, 270_000_000, 16_000_000_000])
def test_bucket_sizes_stay_between_1_and_16_mib(num_relays, num_bytes):
    assert 2**20 <= bucket_bytes(num_relays, num_bytes) <= 2**24


def test_more_relays_mean_smaller_buckets():
    assert bucket_bytes(64, 27_000_000) < bucket_bytes(8, 27_000_000) < bucket_bytes(1, 27_000_000)
