"""Prefixes of dialogues: keys and values of replies that have ended, for prompts that go on from them.

A prompt is computed in *pieces*, the same ones whether or not a prefix of it is here. So a hit changes no bit: context
between two replies is one forward, and each sampled token is a row of one query, see `workers.engines.local.decoder`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rlsys.routing.known_prefixes import KnownPrefixes
from rlsys.types import PolicyVersion
from workers.engines.local.slot_cache import KeptCache


class Piece(NamedTuple):
    """Tokens of a prompt that are computed together."""

    start: int
    end: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Keys and values of a prompt and its reply, without the reply's last token."""

    cache: KeptCache
    sampled: tuple[tuple[int, int], ...]
    """As `Request.sampled`, of these tokens."""
    routing: Tensor
    """Recorded experts of these tokens, (tokens, bytes)."""


class PrefixStore:
    """The prefixes used last, of at most `max_tokens` together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._kept: KnownPrefixes[StoredPrefix] = KnownPrefixes()
        """By version."""

    def add(self, prefix: StoredPrefix) -> None:
        """Keep a prefix, unless it is larger than the store."""
        ids = prefix.cache.token_ids
        if len(ids) > self._max_tokens:
            return
        before = self._kept.put(ids, prefix, prefix.cache.version)
        self._num_tokens += len(ids) - (len(before.cache.token_ids) if before else 0)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._kept.pop_oldest().cache.token_ids)

    def longest(
        self, version: PolicyVersion, prompt_ids: tuple[int, ...], sampled: tuple[tuple[int, int], ...]
    ) -> StoredPrefix | None:
        """Return the longest prefix of a prompt that was computed in the prompt's pieces, and leaves a token over."""

        def is_right(prefix: StoredPrefix, length: int) -> bool:
            return prefix.cache.token_ids == prompt_ids[:length] and prefix.sampled == _until(sampled, length)

        return self._kept.longest(prompt_ids, is_right, at_most=len(prompt_ids) - 1, mark=version)

    def keep_only(self, versions: Collection[PolicyVersion]) -> None:
        """Drop prefixes of all other versions."""
        for prefix in self._kept.drop(lambda version: version not in versions):
            self._num_tokens -= len(prefix.cache.token_ids)


def pieces_of(num_tokens: int, sampled: tuple[tuple[int, int], ...], start: int = 0) -> list[Piece]:
    """Split the tokens from `start` on: sampled ones, and context between them. The last piece is context, as its last
    token gives the logits of the reply: a sampled token at the end counts as such."""
    pieces: list[Piece] = []
    position = start
    for first, end in _until(sampled, num_tokens - 1):
        if end <= position:
            continue
        if first > position:
            pieces.append(Piece(position, first, is_sampled=False))
        pieces.append(Piece(max(first, position), end, is_sampled=True))
        position = end
    return [*pieces, Piece(position, num_tokens, is_sampled=False)]


def _until(sampled: tuple[tuple[int, int], ...], length: int) -> tuple[tuple[int, int], ...]:
    """The spans within the first `length` tokens."""
    return tuple((first, min(end, length)) for first, end in sampled if first < length)
