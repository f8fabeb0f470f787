"""Budget of an episode, enforced exactly with any number of concurrent agents.

Tokens are reserved before a reply is sampled, and unused ones are returned. Agents that run in parallel
(`Session.gather`, tool calls of one reply) each get an equal share of the remaining budget. So the limit of one agent
does not depend on the speed of the others. When all have ended, the rest of their shares is pooled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Limits of one episode; None: unlimited."""

    max_turns: int | None = None
    """Limit for each agent."""
    max_tokens: int | None = None
    """Sampled tokens, over all agents."""
    max_tool_calls: int | None = None
    """Tool calls, over all agents."""
    max_calls_per_turn: int | None = None
    """Tool calls of one reply that are run; the rest are refused."""


@dataclass
class Purse:
    """Remaining part of a budget, or of a share; None: unlimited."""

    tokens: int | None
    calls: int | None
    num_sequential: int = 0
    """Tokens sampled one after the other from this purse. Of parallel shares, only the largest number counts."""

    def take_tokens(self, num: int) -> int:
        """Take up to `num` tokens, and return the number taken; 0 if none is left."""
        if self.tokens is None:
            return num
        taken = min(num, self.tokens)
        self.tokens -= taken
        return taken

    def give_tokens(self, num: int) -> None:
        """Return unused tokens."""
        if self.tokens is not None:
            self.tokens += num

    def take_calls(self, num: int) -> bool:
        """Take all of `num` calls, or none if fewer are left. Returns True if taken."""
        if self.calls is None:
            return True
        if num > self.calls:
            return False
        self.calls -= num
        return True

    def divided(self, num: int) -> list[Purse]:
        """Move the remaining budget into `num` equal shares; the first shares get one more if it does not divide."""
        tokens, calls = _shares(self.tokens, num), _shares(self.calls, num)
        self._set(0, 0)
        return [Purse(*share) for share in zip(tokens, calls, strict=True)]

    def join(self, shares: Sequence[Purse]) -> None:
        """Take back the rest of the shares, and empty them."""
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
