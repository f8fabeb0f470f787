"""What a step made of each token, for people: `RolloutRecord.readings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """One turn. A list has an entry per output token, or none at all. Of a turn that was not trained there are only
    `said` and `pieces`: its trajectory failed, has no advantage, or is another policy's. Numbers are rounded to
    `DIGITS`."""

    said: str = ""
    """What was new in its prompt, decoded, special tokens included: all of it in the first turn, and where the context
    was rewritten."""
    pieces: tuple[str, ...] = ()
    """The text of each output token by itself, special tokens included; bytes of no whole character are U+FFFD."""
    trainer_logprobs: tuple[float, ...] = ()
    """Under the trainer's weights at the start of the step, at the sampling temperature, in nats."""
    entropies: tuple[float, ...] = ()
    """Of the trainer's distribution that the token is drawn from, as it was when the token was trained, in nats."""
    advantages: tuple[float, ...] = ()
    """As the loss saw them; empty where each is that of the trajectory, neither shaped nor whitened."""
    is_masked: tuple[bool, ...] = ()
    """Did the loss leave the token without a gradient though it has an advantage? It was clipped, or a correction
    masked it. Empty where it left out none."""


EpisodeReading: TypeAlias = tuple[tuple[TokenStats, ...], ...]
"""By trajectory and turn."""

DIGITS = 6
"""After the decimal point: readings are looked at, not trained."""
