"""What an episode may cost, held exactly however many of its agents speak at once.

Tokens are taken before a reply is sampled, and what it did not use is given back. Agents that run side by side
(`Session.gather`, tool calls of one reply) each have an equal share of what is left, so that what one may still say
does not depend on how fast the others are. When all have ended, what is left of their shares is common again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What one episode may cost; None: any amount."""

    max_turns: int | None = None
    """Turns of each agent."""
    max_tokens: int | None = None
    """Sampled tokens of all agents together."""
    max_tool_calls: int | None = None
    """Calls of tools of all agents together."""
    max_calls_per_turn: int | None = None
    """Calls of one reply that are run; the rest are refused."""


@dataclass
class Purse:
    """What is left of a budget, or of a share of it; None: any amount."""

    tokens: int | None
    calls: int | None
    num_sequential: int = 0
    """Tokens sampled one after the other by those who spend it; of shares, those of the one with most."""

    def take_tokens(self, num: int) -> int:
        """As many of `num` tokens as there are; 0 if none is left."""
        if self.tokens is None:
            return num
        taken = min(num, self.tokens)
        self.tokens -= taken
        return taken

    def give_tokens(self, num: int) -> None:
        """Give back what was not used."""
        if self.tokens is not None:
            self.tokens += num

    def take_calls(self, num: int) -> bool:
        """Take `num` calls, all or none; are there as many?"""
        if self.calls is None:
            return True
        if num > self.calls:
            return False
        self.calls -= num
        return True

    def divided(self, num: int) -> list[Purse]:
        """All that is left in `num` equal shares, the first of them one larger where it does not come out even."""
        tokens, calls = _shares(self.tokens, num), _shares(self.calls, num)
        self._set(0, 0)
        return [Purse(*share) for share in zip(tokens, calls, strict=True)]

    def join(self, shares: Sequence[Purse]) -> None:
        """Take back what is left of shares; they are empty then."""
        self._set(sum(share.tokens or 0 for share in shares), sum(share.calls or 0 for share in shares))
        self.num_sequential += max(share.num_sequential for share in shares)
        for share in shares:
            share._set(0, 0)

    def _set(self, tokens: int, calls: int) -> None:
        self.tokens = None if self.tokens is None else tokens
        self.calls = None if self.calls is None else calls


def _shares(amount: int | None, num: int) -> list[int | None]:
    if amount is None:
        return [None] * num
    each, over = divmod(amount, num)
    return [each + (number < over) for number in range(num)]
