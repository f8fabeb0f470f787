"""Ready-made reward functions that shape the length of replies, for any algorithm.

    reward: {fn: [{fn: math}, {fn: overlong, args: {max_tokens: 512, overlong_tokens: 128}}]}

`overlong` and `target_length` count the tokens that the policy sampled in the last turn, `parallel` those of the whole
episode. A workflow that sets rewards itself is not shaped.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.types import Episode


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


@dataclass(frozen=True)
class Parallel:
    """Bonus for work in parallel: min(`share` * (1 - longest / all), `cap`), with the sampled tokens of the longest
    chain of dependent tokens and of the whole episode.

    It is the acceleration reward of ThreadWeaver (P-GRPO, arXiv:2512.07843), which only right answers have:
    `[{fn: math}, {fn: parallel, given: math}]`. Both defaults are ours.
    """

    share: float = 0.5
    """Bonus of an episode whose longest chain is next to nothing of it."""
    cap: float = 0.2
    """Largest bonus: beyond it, more parallel tokens would pay off by themselves."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a negative bonus."""
        if not 0 <= self.cap <= self.share:
            raise ValueError(f"cap: should be from 0 to share, {self.share:g} (got {self.cap:g})")

    def __call__(self, episode: Episode) -> float:
        """Score one episode."""
        turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
        num_sampled = sum(len(turn.output_ids) for turn in turns)
        return min(self.share * (1 - episode.num_sequential / num_sampled), self.cap) if num_sampled else 0.0
