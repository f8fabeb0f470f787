"""Group of a profile, played on simulated replicas: its turns, and the environment between them."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from xxhash import xxh3_64_intdigest

from rlsys.errors import WorkerDied
from rlsys.routing.request_router import PREFIX_TOKENS, cheapest, request_weight
from rlsys.simulate.fake_pools import FakePlay
from rlsys.simulate.profile import Profile, Spread
from rlsys.simulate.sim_engine import SimRequest, Used
from rlsys.types import OK, Assignment, EpisodeMeta, PolicyVersion, SampleMeta, TrajectoryMeta, VersionSpan

if TYPE_CHECKING:
    from rlsys.simulate.sim_replica import SimReplica

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


class SimPlay(FakePlay):
    """Group whose turns are sampled by engines."""

    def __init__(self, assignment: Assignment, home: SimReplica) -> None:
        super().__init__(assignment, home)
        workload, group_id = home.pool.workload, assignment.group_id
        self.num_prompt = workload.prompt_tokens(group_id)
        self.sampled: Counter[PolicyVersion] = Counter()
        """Sampled tokens, by version."""
        self._turns = [workload.episode(group_id, e) for e in range(assignment.size)]
        self._episodes = [self._episode(e, turns) for e, turns in enumerate(self._turns)]
        self._num_open = assignment.size
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Play all episodes. Raises the error of `fail`."""
        for episode in self._episodes:
            self._go_on(episode)
        await self._done

    def fail(self, error: WorkerDied) -> None:
        """End all episodes with an error."""
        if not self._done.done():
            self._done.set_exception(error)
            for episode in self._episodes:
                with suppress(StopIteration, WorkerDied):
                    episode.throw(error)

    def _go_on(self, episode: Generator[Wait]) -> bool:
        """Run an episode until it waits again; return false if it has ended."""
        if self._done.done() or (wait := next(episode, None)) is None:
            return False
        wait(partial(self._go_on, episode))
        return True

    def _episode(self, index: int, turns: Sequence[WorkloadTurn]) -> Generator[Wait]:
        """Play one episode, once it has an environment."""
        pool, rounds = self.home.pool, self.home.rounds
        profile = pool.profile
        yield pool.environments.take
        rounds.enter()
        num_context, num_cached = self.num_prompt, 0
        # Replica with `num_cached` tokens in its cache, and the age of the cache then: at another age they are gone.
        at: tuple[SimReplica | None, int] = (None, 0)
        if index > 0 and not pool.routes_turns and profile.environments is None:  # the first has prefilled the prompt
            at, num_cached = (self.host, self.host.cache_age), num_context
        with suppress(WorkerDied):
            for number, turn in enumerate(turns, 1):
                place, weight, chosen = self.host, request_weight(num_context), None
                if pool.routes_turns:
                    home = at[0].turns if at[0] is not None and profile.routing == "prefix" else None
                    chosen = cheapest(pool.live_turns(), weight, home, num_cached // PREFIX_TOKENS)
                    assert chosen is not None, "a simulated replica has room for all"
                    chosen.add(weight)
                    place = chosen.replica
                    if number > 1:
                        pool.returned[at[0] is place] += 1
                is_cached = at == (place, place.cache_age)
                try:
                    yield partial(self._submit, place, num_context, turn.num_tokens, num_cached if is_cached else 0)
                finally:
                    if chosen is not None:
                        chosen.remove(weight)
                place = place if pool.routes_turns else self.host  # the group may have moved
                at, num_cached = (place, place.cache_age), num_context + turn.num_tokens
                if number < len(turns):
                    num_context = num_cached + profile.observation_tokens
                    yield partial(rounds.rest, turn.environment_s)
        rounds.leave()
        pool.environments.give_back()
        self._num_open -= 1
        if not self._num_open and not self._done.done():
            self._done.set_result(None)

    def _submit(
        self, place: SimReplica, num_context: int, num_tokens: int, num_cached: int, go_on: Callable[[], object]
    ) -> None:
        request = SimRequest(num_context, num_tokens, go_on, self, self.sampled, self.version, num_cached)
        place.engine.submit([request])

    def versions(self) -> tuple[VersionSpan, ...]:
        return tuple(VersionSpan(v, self.sampled[v]) for v in sorted(self.sampled))

    def episodes(self) -> tuple[EpisodeMeta, ...]:
        """Return the driver's metadata of each episode."""
        return tuple(map(self._meta, self._turns))

    def _meta(self, turns: Sequence[WorkloadTurn]) -> EpisodeMeta:
        said = sum(turn.num_tokens for turn in turns)
        observed = (len(turns) - 1) * self.home.profile.observation_tokens
        sample = SampleMeta(self.num_prompt, said + observed, said, prompt_key=self.assignment.group_id)
        return EpisodeMeta((TrajectoryMeta("policy", None, OK, None, (sample,)),))


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
