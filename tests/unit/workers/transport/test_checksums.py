"""Checksums: they add up over any rectangles, and detect every difference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.transport.checksums import checksum, checksum_of, hash_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]


def random_tensor(seed: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 2**31, tuple(shape), generator=chance)
    return flat % 2 == 1 if dtype is torch.bool else flat.to(dtype)


def cut(tensor: Tensor, draw: Callable) -> list[tuple[Tensor, list[int]]]:
    """Cut at random places along every dimension."""
    parts: list[tuple[Tensor, list[int]]] = [(tensor, [])]
    for axis, size in enumerate(tensor.shape):
        bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        parts = [
            (part.narrow(axis, start, end - start), [*offset, start])
            for part, offset in parts
            for start, end in pairwise(bounds)
        ]
    return parts


@given(st.data(), st.integers(0, 2**30), st.lists(st.integers(1, 12), min_size=1, max_size=3), st.sampled_from(DTYPES))
def test_checksums_of_any_rectangles_add_up_to_that_of_the_tensor(data, seed, shape, dtype):
    tensor = random_tensor(seed, shape, dtype)
    parts = cut(tensor, data.draw)
    assert sum(checksum(part, tensor.shape, offset) for part, offset in parts) % 2**64 == checksum_of(tensor)


@given(st.integers(0, 2**30), st.lists(st.integers(1, 12), max_size=3), st.sampled_from(DTYPES), st.data())
def test_every_flipped_bit_changes_the_checksum(seed, shape, dtype, data):
    tensor = random_tensor(seed, shape, dtype)
    changed = tensor.clone().reshape(-1)
    raw = changed.view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum_of(changed.reshape(tensor.shape)) != checksum_of(tensor)


@pytest.mark.parametrize("num_changed", [1, 2, 100])
def test_a_step_at_a_small_learning_rate_changes_the_checksum(num_changed):
    """Some elements, each by one unit in the last place."""
    tensor = random_tensor(0, [64, 96], torch.float32).bfloat16()
    before = checksum_of(tensor)
    found = set()
    for seed in range(50):
        chance = torch.Generator().manual_seed(seed)
        changed = tensor.clone()
        where = torch.randperm(tensor.numel(), generator=chance)[:num_changed]
        changed.view(torch.int16).view(-1)[where] += (
            torch.randint(0, 2, (num_changed,), generator=chance).short() * 2 - 1
        )
        found.add(checksum_of(changed))
    assert before not in found and len(found) == 50


def test_exchanged_rows_and_columns_change_the_checksum():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    others = [tensor[[1, 0, 2]], tensor[:, [1, 0, 2, 3]], tensor.reshape(4, 3), tensor.reshape(-1)]
    assert len({checksum_of(t.contiguous()) for t in (tensor, *others)}) == 5


def test_the_hash_depends_neither_on_order_nor_on_memory_layout():
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    same = {"b": weights["b"].clone(), "a": weights["a"].T.contiguous().T}
    assert hash_of(same) == hash_of(weights)
    assert len(hash_of(weights)) == 32


def test_tensors_without_elements_have_a_checksum_of_0():
    assert checksum_of(torch.zeros(0, 4)) == checksum_of(torch.zeros(4, 0)) == 0
    assert checksum_of(torch.tensor(1.5)) != 0


def test_a_row_that_begins_between_two_words_is_summed():
    tensor = random_tensor(0, [3, 5], torch.float32).bfloat16()
    assert checksum(tensor[1:2, :4], (3, 5), (1, 0)) == checksum(tensor[1:2, :4].clone(), (3, 5), (1, 0))
