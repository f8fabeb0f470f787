"""Ready-made reward functions that shape the length of replies, for any algorithm.

    reward: {fn: [{fn: math}, {fn: overlong, args: {max_tokens: 512, overlong_tokens: 128}}]}

They count the tokens that the policy sampled in the last turn. A workflow that sets rewards itself is not shaped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overlong:
    """Punishment of long replies (DAPO, arXiv:2503.14476, eq. 13): 0 up to `max_tokens - overlong_tokens` tokens, then
    linear to -1 at `max_tokens`, and -1 beyond."""

    max_tokens: int
    """Tokens at which the punishment is largest."""
    overlong_tokens: int
    """Tokens before `max_tokens` over which it grows."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for fields that do not fit together."""
        if not 1 <= self.overlong_tokens <= self.max_tokens:
            raise ValueError(
                f"overlong_tokens: should be from 1 to max_tokens, {self.max_tokens} (got {self.overlong_tokens})"
            )

    def __call__(self, completion_ids: list[int]) -> float:
        """Score one completion."""
        excess = len(completion_ids) - (self.max_tokens - self.overlong_tokens)
        return -min(1.0, max(0.0, excess / self.overlong_tokens))


@dataclass(frozen=True)
class TargetLength:
    """Minus the distance of a reply's length to `tokens`, over `tokens`: 0 at the target, -1 at none or twice as many.

    With the weight `alpha * tokens` beside a reward of 1 for a correct answer, it is the reward of LCPO-Exact (L1,
    arXiv:2503.04697, eq. 1).
    """

    tokens: int
    """Length that replies should have."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a length below 1."""
        if self.tokens < 1:
            raise ValueError(f"tokens: should be 1 or more (got {self.tokens})")

    def __call__(self, completion_ids: list[int]) -> float:
        """Score one completion."""
        return -abs(len(completion_ids) - self.tokens) / self.tokens
