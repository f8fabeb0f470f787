"""Distribution of work into parts of nearly equal size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split the indices of `sizes` into `num_parts` parts with nearly equal sums.

    Returns the better of two heuristics by the largest sum, which determines the waiting time; greedy in a draw.

    >>> balanced([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    ways = (greedy(sizes, num_parts), differenced(sizes, num_parts))
    return min(ways, key=lambda parts: max(sum(sizes[i] for i in part) for part in parts))


def greedy(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Assign each size, largest first, to the part with the least sum."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [(0, part) for part in range(num_parts)]
    for i in _largest_first(sizes):
        total, part = heapq.heappop(sums)
        parts[part].append(i)
        heapq.heappush(sums, (total + sizes[i], part))
    return parts


def differenced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Apply the largest differencing method (Karmarkar and Karp, 1982). Every size begins as a separate partition.
    Repeatedly, the two least even partitions are merged, the largest part of one with the smallest of the other, until
    one is left."""
    rest: list[tuple[int, list[int]]] = [(0, [])] * (num_parts - 1)
    partitions = [(-sizes[i], order, [*rest, (sizes[i], [i])]) for order, i in enumerate(_largest_first(sizes))]
    heapq.heapify(partitions)
    if not partitions:
        return [[] for _ in range(num_parts)]
    while len(partitions) > 1:
        (_, order, one), (_, _, other) = heapq.heappop(partitions), heapq.heappop(partitions)
        pairs = zip(one, reversed(other), strict=True)
        merged = sorted(((a + b, i + j) for (a, i), (b, j) in pairs), key=lambda part: part[0])
        heapq.heappush(partitions, (merged[0][0] - merged[-1][0], order, merged))
    return [sorted(part) for _, part in reversed(partitions[0][2])]


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])
