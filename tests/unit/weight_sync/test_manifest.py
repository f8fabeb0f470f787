"""Rectangles of tensors: every element is published once, whatever the ranks have."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.weight_sync.manifest import (
    ALIGNMENT,
    Bucket,
    Manifest,
    Rectangle,
    TensorSpec,
    VersionPart,
    content_hash,
    pack,
    padded_size,
    shares,
)

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "uint8"])


def elements(rectangle: Rectangle) -> list[tuple[str, tuple[int, ...]]]:
    """Indices of the elements of a rectangle."""
    ranges = [range(s.start, s.stop) for s in rectangle.slices]
    return [(rectangle.tensor.name, index) for index in product(*ranges)]


def assert_partition(rectangles: list[Rectangle], specs: list[TensorSpec]) -> None:
    found = [element for rectangle in rectangles for element in elements(rectangle)]
    wanted = [element for spec in specs for element in elements(Rectangle.whole(spec))]
    assert sorted(found) == sorted(wanted)


@given(SHAPES, DTYPES, st.integers(1, 100), st.integers(1, 9))
def test_cuts_and_splits_have_every_element_once(shape, dtype, max_bytes, count):
    spec = TensorSpec("w", dtype, shape)
    whole = Rectangle.whole(spec)
    pieces = list(whole.cut(max_bytes))
    assert_partition(pieces, [spec])
    assert all(piece.num_bytes <= max_bytes or prod(piece.shape) == 1 for piece in pieces)
    assert_partition(whole.split(count), [spec])


@st.composite
def layouts(draw) -> tuple[list[TensorSpec], list[list[Rectangle]]]:
    """Tensors, and what ranks have of them in some mesh of copies, shards and tensor-parallel ranks."""
    copies, shards, splits = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    specs = [TensorSpec(f"t{i}", draw(DTYPES), draw(SHAPES)) for i in range(draw(st.integers(1, 4)))]
    owned: list[list[Rectangle]] = [[] for _ in range(copies * shards * splits)]
    for spec in specs:
        axis = draw(st.sampled_from([None, *range(len(spec.shape))]))  # None: every rank of a copy has the whole
        for rank in range(len(owned)):
            part = Rectangle.whole(spec)
            if axis is not None:
                part = chunk(part, axis, splits, rank % splits)
                part = chunk(part, 0, shards, rank // splits % shards)
            owned[rank].append(part)
    return specs, owned


def chunk(rectangle: Rectangle, axis: int, count: int, index: int) -> Rectangle:
    """Chunk `index` of `count` along an axis, as torch cuts: of equal size but for the last ones."""
    size = -(-rectangle.shape[axis] // count)
    start = min(index * size, rectangle.shape[axis])
    return rectangle._along(axis, start, min(start + size, rectangle.shape[axis]))


@given(layouts(), st.integers(1, 200))
def test_ranks_publish_every_element_once(layout, bucket_bytes):
    specs, owned = layout
    published = shares(owned)
    assert_partition([rectangle for own in published for rectangle in own], specs)
    for rank, own in enumerate(published):
        assert {e for r in own for e in elements(r)} <= {e for r in owned[rank] for e in elements(r)}
    pieces = [piece for own in published for bucket in pack(own, bucket_bytes) for piece in bucket]
    assert_partition(pieces, specs)


def test_ranks_with_the_same_share_its_bytes():
    spec = TensorSpec("w", "float32", (8, 3))
    published = shares([[Rectangle.whole(spec)]] * 4)
    assert [[r.offset for r in own] for own in published] == [[(0, 0)], [(2, 0)], [(4, 0)], [(6, 0)]]


@given(layouts(), st.integers(1, 400))
def test_buckets_are_no_larger_than_asked(layout, bucket_bytes):
    for own in shares(layout[1]):
        for bucket in pack(own, bucket_bytes):
            assert sum(padded_size(p.num_bytes) for p in bucket[:-1]) + bucket[-1].num_bytes <= bucket_bytes or (
                len(bucket) == 1 and prod(bucket[0].shape) == 1
            )


def test_rectangles_lie_within_others_at_their_own_places():
    spec = TensorSpec("w", "float32", (8, 6))
    outer, inner = Rectangle(spec, (2, 0), (4, 6)), Rectangle(spec, (3, 2), (2, 4))
    assert inner.within(outer) == (slice(1, 3), slice(2, 6))


def test_small_tensors_share_a_bucket_in_the_order_of_their_names():
    specs = [TensorSpec(name, "uint8", (size,)) for name, size in zip("edcba", (9, 100, 300, 64, 60), strict=True)]
    packed = pack(map(Rectangle.whole, specs), 2 * ALIGNMENT)
    assert [[(p.tensor.name, p.offset[0], p.shape[0]) for p in bucket] for bucket in packed] == [
        [("a", 0, 60), ("b", 0, 64)],
        [("c", 0, 75)],
        [("c", 75, 75)],
        [("c", 150, 75)],
        [("c", 225, 75)],
        [("d", 0, 100)],
        [("e", 0, 9)],
    ]


def manifest(*checksums: dict[str, int], spec: TensorSpec) -> Manifest:
    bucket = Bucket("b", 24, (Rectangle.whole(spec),))
    return Manifest(tuple(VersionPart(0, r, len(checksums), (bucket,), own) for r, own in enumerate(checksums)))


def test_the_hash_of_a_version_does_not_depend_on_its_ranks():
    spec = TensorSpec("w", "float32", (6,))
    one, two = manifest({"w": 7}, spec=spec), manifest({"w": 2**64 - 1}, {"w": 8}, spec=spec)
    assert one.checksums == two.checksums == {spec: 7}
    assert one.hash == two.hash == content_hash({spec: 7}) and len(one.hash) == 32


@pytest.mark.parametrize(
    "other", [TensorSpec("v", "float32", (6,)), TensorSpec("w", "int32", (6,)), TensorSpec("w", "float32", (2, 3))]
)
def test_the_hash_covers_names_types_and_shapes(other):
    spec = TensorSpec("w", "float32", (6,))
    assert content_hash({other: 7}) != content_hash({spec: 7}) != content_hash({spec: 8})
    first = TensorSpec("a", "float32", ())
    assert content_hash({spec: 7, first: 8}) == content_hash({first: 8, spec: 7})
