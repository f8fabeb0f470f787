"""Deltas between buckets of weights: the 16-bit words that differ, and their positions.

A step changes few of the rounded weights, so a list of them is short, and takes less time than a compression of all
bytes. Positions count from the start of a block of 65,536 words. The delta of a bucket of 100,000 words, of which word
3 becomes 16230 and word 70,000 becomes 48917:

    counts     uint32  1, 1          changed words of each block
    words      uint16  16230, 48917  the newer words
    positions  uint16  3, 4464       of these words, each in its block
"""

from __future__ import annotations

import numpy as np

WORTHWHILE = 0.6
"""Largest share of a bucket's bytes for which it is sent as a delta: encoding and decoding take time, too."""
BLOCK = 1 << 16
"""Words of a block: a position fits 16 bits, and the block stays in a core's cache."""
CROWDED = 0.5
"""Share of groups of 8 words with a change, from which a search of all words is faster than one of these groups."""


def delta_of(old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """Return the difference of two buckets for `apply_delta`; None if it is not worthwhile.

    Both are bytes, equally many, and a multiple of `ALIGNMENT`.
    """
    old_words, new_words = old.view(np.uint16), new.view(np.uint16)
    num_left = int(WORTHWHILE * len(new)) // 4
    counts: list[int] = []
    words: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    for start in range(0, len(new_words), BLOCK):
        newer = new_words[start : start + BLOCK]
        changed = _changed_positions(old_words[start : start + BLOCK], newer)
        num_left -= len(changed)
        if num_left < 0:
            return None
        counts.append(len(changed))
        words.append(newer.take(changed))
        positions.append(changed.astype(np.uint16))
    parts = [np.array(counts, np.uint32), *words, *positions]
    return np.concatenate([part.view(np.uint8) for part in parts])


def apply_delta(old: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the newer bucket, of the older and `delta_of` both. Of a damaged delta, returns other bytes, or none."""
    num_blocks = -(-len(old) // (2 * BLOCK))
    if len(delta) < 4 * num_blocks:
        return old[:0]
    counts = delta[: 4 * num_blocks].view(np.uint32).tolist()
    if len(delta) != 4 * (num_blocks + sum(counts)):
        return old[:0]
    words, positions = delta[4 * num_blocks :].view(np.uint16).reshape(2, -1)
    new = np.empty_like(old)
    old_words, new_words = old.view(np.uint16), new.view(np.uint16)
    begin = 0
    for i, count in enumerate(counts):
        block = new_words[i * BLOCK : (i + 1) * BLOCK]
        block[:] = old_words[i * BLOCK : (i + 1) * BLOCK]
        changed = positions[begin : begin + count].astype(np.intp)
        try:
            block[changed] = words[begin : begin + count]
        except IndexError:  # a position past the end of the last block
            return old[:0]
        begin += count
    return new


def _changed_positions(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the positions of words that differ. Looks first for groups of 8 words with a change."""
    is_changed = old != new
    groups = is_changed.view(np.uint64)
    with_change = (groups != 0).nonzero()[0]
    if len(with_change) > CROWDED * len(groups):
        return is_changed.nonzero()[0]
    inside = groups.take(with_change).view(np.bool_).nonzero()[0]
    return (with_change << 3).take(inside >> 3) + (inside & 7)
