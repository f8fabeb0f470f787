"""Deltas: exact bytes of the newer bucket; a damaged delta gives other bytes or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.weight_sync.manifest import ALIGNMENT
from workers.transport.deltas import BLOCK, WORTHWHILE, apply_delta, delta_of

LINES_OF_BLOCK = 2 * BLOCK // ALIGNMENT
NUM_LINES = [1, 2, 40, LINES_OF_BLOCK - 1, LINES_OF_BLOCK, LINES_OF_BLOCK + 1, 2 * LINES_OF_BLOCK + 3]
SEEDS = st.integers(0, 2**32 - 1)


def random_words(rng: np.random.Generator, num_lines: int) -> np.ndarray:
    return rng.integers(0, 2**16, num_lines * ALIGNMENT // 2, dtype=np.uint16)


def frozen(data: np.ndarray) -> np.ndarray:
    """Bytes that cannot be written, as those of an object store."""
    flat = data.view(np.uint8)
    flat.flags.writeable = False
    return flat


def with_delta() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Older bucket, newer bucket and delta: of three blocks, the last one short."""
    rng = np.random.default_rng(0)
    old = random_words(rng, NUM_LINES[-1])
    new = old ^ (rng.random(len(old)) < 0.01).astype(np.uint16)
    new[-20:] ^= 1 << 15
    delta = delta_of(frozen(old), frozen(new))
    assert delta is not None
    return old.view(np.uint8), new.view(np.uint8), delta


@given(st.sampled_from(NUM_LINES), SEEDS, st.floats(0, 0.4), st.integers(0, 15))
def test_a_delta_gives_the_exact_bytes_of_the_newer_bucket(num_lines: int, seed: int, share: float, bits: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_words(rng, num_lines)
    new = old ^ np.where(rng.random(len(old)) < share, rng.integers(0, 2**bits + 1, len(old)), 0).astype(np.uint16)
    delta = delta_of(frozen(old), frozen(new))
    if delta is None:
        assert (old != new).mean() > WORTHWHILE / 2 - 1 / len(new)
    else:
        assert apply_delta(frozen(old), frozen(delta)).tobytes() == new.tobytes()


@pytest.mark.parametrize("num_lines", NUM_LINES)
@pytest.mark.parametrize("places", [[], [0], [-1], [0, -1], list(range(32)), list(range(-8, 0))])
def test_changes_at_either_end_are_kept(num_lines: int, places: list[int]) -> None:
    old = random_words(np.random.default_rng(1), num_lines + 3)
    new = old.copy()
    new[places] ^= 0x8001
    delta = delta_of(frozen(old), frozen(new))
    assert delta is not None
    assert apply_delta(frozen(old), delta).tobytes() == new.tobytes()
    assert len(delta) == 4 * (-(-len(old) // BLOCK) + len(places))


@given(st.sampled_from(NUM_LINES), SEEDS, st.floats(0, 0.15))
def test_a_delta_of_float32_weights_is_exact(num_lines: int, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    old = rng.standard_normal(num_lines * ALIGNMENT // 4, dtype=np.float32)
    new = np.where(rng.random(len(old)) < share, old * np.float32(1.001), old)
    delta = delta_of(frozen(old), frozen(new))
    assert delta is None or apply_delta(frozen(old), delta).tobytes() == new.tobytes()


@pytest.mark.parametrize("num_lines", NUM_LINES)
def test_a_bucket_that_changes_throughout_has_no_delta(num_lines: int) -> None:
    old = random_words(np.random.default_rng(2), num_lines)
    assert delta_of(frozen(old), frozen(old ^ 1)) is None


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 11, 12, 13, -1, -2, -4])
def test_a_cut_delta_gives_no_bytes(num_bytes: int) -> None:
    old, _, delta = with_delta()
    assert len(apply_delta(old, delta[:num_bytes])) == 0


def test_counts_that_do_not_add_up_give_no_bytes() -> None:
    old, _, delta = with_delta()
    for count in (0, 1, 2**31, 2**32 - 1):
        bad = delta.copy()
        bad[:12].view(np.uint32)[1] = count
        assert len(apply_delta(old, bad)) == 0


def test_a_position_past_the_end_gives_no_bytes() -> None:
    old, _, delta = with_delta()
    bad = delta.copy()
    bad[-2:].view(np.uint16)[0] = BLOCK - 1
    assert len(apply_delta(old, bad)) == 0


@given(st.integers(0, 2**31), st.integers(0, 7))
def test_a_flipped_bit_gives_other_bytes(place: int, bit: int) -> None:
    old, new, delta = with_delta()
    flipped = delta.copy()
    flipped[place % len(delta)] ^= 1 << bit
    assert apply_delta(old, flipped).tobytes() != new.tobytes()


@given(SEEDS, st.integers(1, 64))
def test_counts_that_move_between_blocks_give_other_bytes(seed: int, number: int) -> None:
    """Their sum stays right, so words of one block are written into another."""
    old, new, delta = with_delta()
    moved = delta.copy()
    source, target = np.random.default_rng(seed).permutation(3)[:2]
    counts = moved[:12].view(np.uint32)
    number = min(number, int(counts[source]))
    counts[source] -= number
    counts[target] += number
    assert apply_delta(old, moved).tobytes() != new.tobytes()


@given(st.sampled_from(NUM_LINES), st.binary(max_size=300), SEEDS)
def test_random_bytes_are_no_delta(num_lines: int, body: bytes, seed: int) -> None:
    """With and without counts that match the length."""
    old = random_words(np.random.default_rng(seed), num_lines).view(np.uint8)
    body = body[: len(body) // 4 * 4]
    counts = np.zeros(-(-num_lines // LINES_OF_BLOCK), np.uint32)
    counts[seed % len(counts)] = len(body) // 4
    for data in (body, counts.tobytes() + body):
        assert len(apply_delta(old, np.frombuffer(data, np.uint8))) in (0, len(old))


def test_a_delta_of_a_bucket_of_another_size_gives_other_bytes() -> None:
    old, new, delta = with_delta()
    for num_bytes in (ALIGNMENT, 2 * BLOCK, len(old) - ALIGNMENT):
        other = delta_of(old[:num_bytes], new[:num_bytes])
        assert other is not None
        assert apply_delta(old, other).tobytes() != new.tobytes()
        assert apply_delta(old[:num_bytes], delta).tobytes() != new[:num_bytes].tobytes()


def test_weights_after_a_small_step_are_sent_in_few_bytes() -> None:
    """Of bfloat16 weights of the size of a model's, after steps of AdamW at three learning rates."""
    torch.manual_seed(0)
    weights = 0.1 * torch.randn(2**19)
    step = torch.randn(2**19).clamp(-1.5, 1.5)
    shares = []
    for lr in (1e-6, 1e-5, 1e-3):
        old, new = (w.bfloat16().view(torch.uint8).numpy() for w in (weights, weights + lr * step))
        delta = delta_of(old, new)
        shares.append(1.0 if delta is None else len(delta) / len(new))
    assert shares[0] < 0.02 < shares[1] < 0.12
    assert shares[2] == 1
