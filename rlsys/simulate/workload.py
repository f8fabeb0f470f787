"""Workload of a profile: every length and latency is a pure function of (seed, group, episode, turn).

All settings of a profile get the same work, in whatever order they run it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from rlsys.simulate.profile import Profile


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    """One turn of an episode: its sampled tokens, and the environment's time after it."""

    num_tokens: int
    environment_s: float
    """Seconds until the next turn; 0 after the last turn."""


class Workload:
    """Episodes of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def prompt_tokens(self, group_id: int) -> int:
        """Return the length of the prompt that all episodes of a group share."""
        return max(1, round(self._profile.prompt.at(self._quantile(b"prompt", group_id, 0, 0))))

    def episode(self, group_id: int, episode: int) -> tuple[WorkloadTurn, ...]:
        """Return the turns of one episode."""
        profile = self._profile
        num_turns = max(1, round(profile.turns.at(self._quantile(b"turns", group_id, episode, 0))))
        return tuple(self._step(group_id, episode, turn, turn == num_turns - 1) for turn in range(num_turns))

    def _step(self, group_id: int, episode: int, turn: int, is_last: bool) -> WorkloadTurn:
        profile = self._profile
        num_tokens = max(1, round(profile.response.at(self._quantile(b"length", group_id, episode, turn))))
        if is_last or profile.environment_s is None:
            return WorkloadTurn(num_tokens, 0.0)
        return WorkloadTurn(num_tokens, profile.environment_s.at(self._quantile(b"tool", group_id, episode, turn)))

    def _quantile(self, what: bytes, group_id: int, episode: int, turn: int) -> float:
        """Return a uniform number between 0 and 1, both excluded."""
        packed = struct.pack("<8sQQQ", what, group_id, episode, turn)
        return ((xxh3_64_intdigest(packed, self._profile.seed) >> 12) + 0.5) * 2.0**-52
