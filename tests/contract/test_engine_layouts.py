"""Engines of one and two shards compute with what ranks of any layout published, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.weight_sync.manifest import Manifest, Rectangle, VersionPart, content_hash, shares
from tests.contract.engines import VLLM, local, qwen, run, vllm
from tests.relays import specs_of
from workers.engines.engine import Engine
from workers.transport.buckets import PartLayout, ReceivedWeights

BY_COLUMNS = ("o_proj", "down_proj")
"""Layers that tensor parallelism splits by their inputs."""
WHOLE = ("norm", "embed")
"""Parts of the names of tensors that every rank of `tensor` has whole."""


def received(weights: Mapping[str, Tensor], shard: int, tensor: int) -> tuple[Manifest, ReceivedWeights]:
    """What `shard` x `tensor` ranks publish, as a replica gets it."""
    wholes = {spec.name: Rectangle.whole(spec) for spec in specs_of(weights)}
    owned = [
        [_owned(whole, s, shard, t, tensor) for whole in wholes.values()] for s in range(shard) for t in range(tensor)
    ]
    parts, buckets = [], []
    for rank, own in enumerate(shares(owned)):
        layout = PartLayout(own, bucket_bytes=1 << 14)
        memory = np.zeros(layout.num_bytes, np.uint8)
        layout.write(memory, {name: (wholes[name], weight) for name, weight in weights.items()})
        parts.append(layout.part(memory, VersionPart(4, rank, shard * tensor, ())))
        buckets += [memory[start:end] for start, end in pairwise(layout.bounds)]
    manifest = Manifest(tuple(parts))
    return manifest, ReceivedWeights(manifest, buckets, "relay-0")


def _owned(whole: Rectangle, s: int, shard: int, t: int, tensor: int) -> Rectangle:
    part = whole
    if not any(word in whole.tensor.name for word in WHOLE):
        axis = 1 if any(word in whole.tensor.name for word in BY_COLUMNS) and len(whole.shape) > 1 else 0
        part = _chunk(part, axis, t, tensor)
    return _chunk(part, 0, s, shard)


def _chunk(rectangle: Rectangle, axis: int, index: int, count: int) -> Rectangle:
    size = -(-rectangle.shape[axis] // count)
    start = min(index * size, rectangle.shape[axis])
    end = min(start + size, rectangle.shape[axis])
    offset, shape = list(rectangle.offset), list(rectangle.shape)
    offset[axis] += start
    shape[axis] = end - start
    return Rectangle(rectangle.tensor, tuple(offset), tuple(shape))


def assert_computed_with(make: Callable[[], Engine], dtype: Literal["float32", "bfloat16"]) -> None:
    """Load the same weights from every layout, with others between, and compare what the engine computes with."""

    async def scenario(engine: Engine) -> None:
        for number, (shard, tensor) in enumerate((s, t) for s in (1, 2, 4) for t in (1, 2)):
            model = qwen(tied=True, seed=number + 1).to(getattr(torch, dtype))
            weights = {name: p.detach() for name, p in model.named_parameters()}
            manifest, came = received(weights, shard, tensor)
            await engine.stage(came)
            await engine.pause()
            await engine.load(4 + number, came)
            await engine.resume()
            held = await engine.checksums()
            assert held == manifest.checksums, (shard, tensor)
            assert content_hash(dict(held)) == manifest.hash

    run(make, scenario)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_local_engine_computes_with_the_weights_of_any_layout(dtype: Literal["float32", "bfloat16"]) -> None:
    assert_computed_with(lambda: local(qwen(tied=True).to(getattr(torch, dtype)), dtype=dtype), dtype)


@VLLM
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_vllm_computes_with_the_weights_of_any_layout(shards: int, dtype: Literal["float32", "bfloat16"]) -> None:
    assert_computed_with(lambda: vllm(tied=True, tensor_parallel=shards, dtype=dtype), dtype)
