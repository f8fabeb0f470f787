"""Weights as bytes: what is unpacked is what was packed, and the hash sees every difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import workers.transport.tensors as tensors
from workers.transport.hashing import content_hash
from workers.transport.tensors import pack, unpack

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


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=6, max_size=6),
    dtypes=st.permutations(DTYPES),
    bucket_bytes=st.sampled_from([1, 16, 64, 1 << 20]),
)
def test_whatever_is_packed_comes_back(seed, shapes, dtypes, bucket_bytes):
    weights = random_weights(seed, shapes, dtypes)
    manifest, buckets = pack(7, weights, bucket_bytes)
    assert (manifest.version, manifest.hash) == (7, content_hash(weights))
    back = unpack(manifest, buckets)
    assert are_equal(back, weights)
    assert content_hash(back) == manifest.hash


def test_buckets_are_filled_in_name_order_and_a_big_tensor_gets_one_of_its_own():
    weights = {name: torch.zeros(count, dtype=torch.uint8) for name, count in zip("dcba", (9, 40, 8, 8), strict=True)}
    manifest, buckets = pack(0, weights, 16)
    assert [[spec.name for spec in specs] for specs in manifest.buckets] == [["a", "b"], ["c"], ["d"]]
    assert [sum(data.nbytes for data in bucket) for bucket in buckets] == [16, 40, 9]


def test_views_and_gradients_are_packed_by_value():
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4).requires_grad_()
    weights = {"t": whole.T, "row": whole[1]}
    assert are_equal(unpack(*pack(0, weights)), {name: tensor.detach() for name, tensor in weights.items()})


def test_host_tensors_are_not_copied():
    weight = torch.zeros(4)
    _, buckets = pack(0, {"w": weight})
    weight[0] = 1
    assert buckets[0][0].any()


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


def test_a_bucket_is_large_enough_to_be_few_and_small_enough_to_stream():
    assert 2**26 <= tensors.BUCKET_BYTES <= 2**30
