"""Deltas between two buckets: few of the rounded weights change in a step."""

from __future__ import annotations

import numpy as np

WORTHWHILE = 0.6
"""Largest share of a bucket's bytes for which it is sent as a delta: to undo the compression takes time, too."""
CHUNK_BYTES = 1 << 20
"""Bytes that are compressed at a time, so that they stay in a core's cache."""


def delta_of(old: np.ndarray, new: np.ndarray) -> np.ndarray | None:
    """Return the difference of two buckets of equal size for `patched`: the exclusive or of their bytes, compressed.

    A step changes few of the rounded weights, and those in few bits. None if most change: then a delta saves little,
    and the whole bucket should be sent. That is judged by the first chunk.
    """
    import pyarrow

    codec = pyarrow.Codec("zstd", compression_level=1)
    pieces: list[np.ndarray] = []
    for start in range(0, len(old), CHUNK_BYTES):
        chunk = slice(start, start + CHUNK_BYTES)
        difference = np.bitwise_xor(old[chunk].view(np.uint64), new[chunk].view(np.uint64))
        pieces.append(np.frombuffer(codec.compress(pyarrow.py_buffer(difference)), np.uint8))
        if start == 0 and len(pieces[0]) > WORTHWHILE * difference.nbytes:
            return None
    sizes = np.array([len(piece) for piece in pieces], np.uint32)
    return np.concatenate([sizes.view(np.uint8), *pieces])


def patched(old: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the newer bucket, of the older and `delta_of` both. Of a damaged delta, returns other bytes, or none."""
    import pyarrow

    codec, starts = pyarrow.Codec("zstd"), range(0, len(old), CHUNK_BYTES)
    new = np.empty_like(old)
    try:
        ends = 4 * len(starts) + np.cumsum(delta[: 4 * len(starts)].view(np.uint32), dtype=np.int64)
        for start, begin, end in zip(starts, [4 * len(starts), *ends[:-1].tolist()], ends.tolist(), strict=True):
            chunk = slice(start, start + CHUNK_BYTES)
            difference = codec.decompress(pyarrow.py_buffer(delta[begin:end]), decompressed_size=len(old[chunk]))
            words = np.frombuffer(difference, np.uint64)
            np.bitwise_xor(old[chunk].view(np.uint64), words, out=new[chunk].view(np.uint64))
    except (OSError, ValueError):  # bytes that are no delta to a bucket of this size
        return old[:0]
    return new
