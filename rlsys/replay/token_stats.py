"""Token statistics of a step, for people: `RolloutRecord.readings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Statistics of one turn. A list has one entry per output token, or is empty. An untrained turn has only `said` and
    `pieces`: its trajectory failed, has no advantage, or belongs to another policy. Numbers are rounded to `DIGITS`."""

    said: str = ""
    """New part of the prompt, decoded, with special tokens. It is the whole prompt in the first turn, and after the
    context was rewritten."""
    pieces: tuple[str, ...] = ()
    """Text of each output token, with special tokens; bytes of an incomplete character are U+FFFD."""
    trainer_logprobs: tuple[float, ...] = ()
    """Logprobs under the trainer's weights at the start of the step, at the sampling temperature, in nats."""
    entropies: tuple[float, ...] = ()
    """Entropy of the trainer's distribution for the token, at the time the token was trained, in nats."""
    advantages: tuple[float, ...] = ()
    """Advantages used by the loss; empty where each is that of the trajectory, neither shaped nor whitened."""
    is_masked: tuple[bool, ...] = ()
    """True for a token with an advantage but no gradient, because it was clipped or masked by a correction. Empty if
    there are none."""


EpisodeReading: TypeAlias = tuple[tuple[TokenStats, ...], ...]
"""Token statistics by trajectory and turn."""

DIGITS = 6
"""Digits after the decimal point. Readings are for people and are not trained, so rounding is safe."""
