"""Values by sequences of tokens, found by the longest one that a prompt begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")
NUM_COMPARED = 16
"""Last tokens of a sequence that tell most sequences of its length apart."""


class KnownPrefixes(Generic[V]):
    """Sequences with a value each, the least recently used first.

    A sequence is known by its length and its last tokens, so that it need not be kept. Where another one with the same
    must not be taken for it, `longest` is given a test.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, int, tuple[int, ...]], V] = {}
        self._lengths: dict[Hashable, Counter[int]] = {}
        """Number of sequences of each length, by mark."""

    def __len__(self) -> int:
        return len(self._known)

    def put(self, ids: tuple[int, ...], value: V, mark: Hashable = None) -> V | None:
        """Give a sequence a value; return the one before, if it had one. Sequences with different marks differ."""
        key = (mark, len(ids), ids[-NUM_COMPARED:])
        before = self._remove_key(key) if key in self._known else None
        self._add(key, value)
        return before

    def longest(
        self,
        prompt_ids: tuple[int, ...],
        is_right: Callable[[V, int], bool] = lambda value, length: True,
        *,
        at_most: int | None = None,
        mark: Hashable = None,
        removes: bool = False,
    ) -> V | None:
        """Return the value of the longest known sequence that a prompt begins with, of `at_most` tokens; None if there
        is none.

        `is_right(value, length)` confirms one of a length. `removes`: it is forgotten, else it becomes the most
        recently used.
        """
        most = len(prompt_ids) if at_most is None else at_most
        for length in sorted(self._lengths.get(mark, ()), reverse=True):
            if length > most:
                continue
            key = (mark, length, prompt_ids[max(0, length - NUM_COMPARED) : length])
            if key in self._known and is_right(self._known[key], length):
                value = self._remove_key(key)
                if not removes:
                    self._add(key, value)
                return value
        return None

    def pop_oldest(self) -> V:
        """Forget the least recently used sequence, and return its value."""
        return self._remove_key(next(iter(self._known)))

    def drop(self, is_gone: Callable[[Hashable], bool]) -> list[V]:
        """Forget the sequences of some marks, and return their values."""
        return [self._remove_key(key) for key in [key for key in self._known if is_gone(key[0])]]

    def _add(self, key: tuple[Hashable, int, tuple[int, ...]], value: V) -> None:
        self._known[key] = value
        self._lengths.setdefault(key[0], Counter())[key[1]] += 1

    def _remove_key(self, key: tuple[Hashable, int, tuple[int, ...]]) -> V:
        mark, length, _ = key
        of_mark = self._lengths[mark]
        of_mark[length] -= 1
        if not of_mark[length]:
            del of_mark[length]
        if not of_mark:
            del self._lengths[mark]
        return self._known.pop(key)
