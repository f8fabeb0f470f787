"""Group of a profile, played on simulated replicas: its turns, and the environment between them."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

from rlsys.simulate.profile import Profile, Spread
from rlsys.simulate.sim_engine import Used

Wait: TypeAlias = Callable[[Callable[[], bool]], object]
"""Function that an episode yields: it calls its argument when the episode goes on, at once or later."""


@dataclass(frozen=True, slots=True)
class WorkloadTurn:
    """One turn of an episode: its sampled tokens, and the environment's time after it."""

    num_tokens: int
    environment_s: float
    """Seconds until the next turn; 0 after the last turn."""


class Workload:
    """Episodes of a profile: every length and latency is a pure function of (seed, group, episode, turn).

    All settings of a profile get the same work, in whatever order they run it.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def prompt_tokens(self, group_id: int) -> int:
        """Return the length of the prompt that all episodes of a group share."""
        return max(1, round(self._draw(self._profile.prompt, b"prompt", group_id)))

    def episode(self, group_id: int, episode: int) -> tuple[WorkloadTurn, ...]:
        """Return the turns of one episode."""
        profile, turns = self._profile, []
        num_turns = max(1, round(self._draw(profile.turns, b"turns", group_id, episode)))
        for turn in range(num_turns):
            num_tokens = max(1, round(self._draw(profile.response, b"length", group_id, episode, turn)))
            tool_s = 0.0
            if profile.environment_s is not None and turn < num_turns - 1:
                tool_s = self._draw(profile.environment_s, b"tool", group_id, episode, turn)
            turns.append(WorkloadTurn(num_tokens, tool_s))
        return tuple(turns)

    def _draw(self, spread: Spread, what: bytes, group_id: int, episode: int = 0, turn: int = 0) -> float:
        """Draw a value at a uniform quantile between 0 and 1, both excluded."""
        packed = struct.pack("<8sQQQ", what, group_id, episode, turn)
        return spread.at(((xxh3_64_intdigest(packed, self._profile.seed) >> 12) + 0.5) * 2.0**-52)


class Environments:
    """Pool of a number of environments, first come, first served."""

    def __init__(self, count: float) -> None:
        self._num_free = count
        self._waiting: deque[Callable[[], bool]] = deque()

    def take(self, begin: Callable[[], bool]) -> None:
        """Call `begin` once an environment is free; it returns false if it no longer needs one."""
        if self._num_free:
            self._num_free -= 1
            begin()
        else:
            self._waiting.append(begin)

    def give_back(self) -> None:
        """Release one environment."""
        while self._waiting:
            if self._waiting.popleft()():
                return
        self._num_free += 1


class Rounds:
    """Scheduler of a replica's next turns: each when its environment is done, or all together."""

    def __init__(self, used: Used, *, together: bool) -> None:
        """`used` sums the working time of environments."""
        self._used, self._together = used, together
        self._num_open = 0
        """Number of running episodes."""
        self._resting: list[Callable[[], object]] = []

    def enter(self) -> None:
        self._num_open += 1

    def leave(self) -> None:
        self._num_open -= 1
        self._begin_round()

    def rest(self, seconds: float, go_on: Callable[[], object]) -> None:
        """Let the environment of an episode work for `seconds`; call `go_on` when its next turn begins."""
        self._used.environment_s += seconds
        asyncio.get_running_loop().call_later(seconds, partial(self._arrive, go_on) if self._together else go_on)

    def _arrive(self, go_on: Callable[[], object]) -> None:
        self._resting.append(go_on)
        self._begin_round()

    def _begin_round(self) -> None:
        if len(self._resting) >= self._num_open:
            resting, self._resting = self._resting, []
            for go_on in resting:
                go_on()
