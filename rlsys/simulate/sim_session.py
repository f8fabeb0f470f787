"""Group of a profile, played on simulated replicas: its turns, and the environment between them."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from rlsys.loop.router import Router, request_weight
from rlsys.simulate.fake_pools import FakePlay
from rlsys.simulate.profile import Profile
from rlsys.simulate.sim_engine import SimRequest, Used
from rlsys.types import OK, Assignment, EpisodeMeta, PolicyVersion, SampleMeta, TrajectoryMeta, VersionSpan

if TYPE_CHECKING:
    from rlsys.simulate.sim_replica import SimReplica


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


@dataclass(slots=True)
class SimSession:
    """State of one running episode."""

    index: int
    steps: Sequence[WorkloadTurn]
    num_context: int
    """Tokens of the conversation so far."""
    turn: int = 0
    at: SimReplica | None = None
    """Replica of the last turn, whose cache contains the keys and values of the conversation up to then."""
    cache_age: int = 0
    """`SimReplica.cache_age` at that time; a later age means that they are gone."""
    num_cached: int = 0


class SimPlay(FakePlay):
    """Group whose turns are sampled by engines."""

    def __init__(self, assignment: Assignment, home: SimReplica, version: PolicyVersion | None) -> None:
        """`version` pins all its tokens to one loaded version."""
        super().__init__(assignment, home, version)
        self.home, pool, workload = home, home.pool, home.pool.workload
        self.num_prompt = workload.prompt_tokens(assignment.group_id)
        self.sampled: Counter[PolicyVersion] = Counter()
        """Sampled tokens, by version."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Completed when the last episode ends, or with the error that ended all of them."""
        self._turns = pool.turns
        self._sessions = [
            SimSession(e, workload.episode(assignment.group_id, e), self.num_prompt) for e in range(assignment.size)
        ]
        self._num_open = assignment.size
        self._environments, self._num_held = pool.environments, 0

    def begin(self) -> None:
        """Submit the first turn of each episode, once it has an environment."""
        if self._environments is not None:
            for session in self._sessions:
                self._environments.take(lambda session=session: self._begin_in_environment(session))
            return
        self.home.rounds.enter(len(self._sessions))
        if self._turns is not None:
            for session in self._sessions:
                self._next_turn(session)
            return
        for session in self._sessions[1:]:  # they share the prompt of the first
            session.at, session.cache_age, session.num_cached = self.host, self.host.cache_age, self.num_prompt
        self.host.engine.submit([self._request(session, self.host) for session in self._sessions])

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            for _ in range(self._num_held):
                self._let_environment_go()

    def _begin_in_environment(self, session: SimSession) -> None:
        assert self._environments is not None
        if self.done.done():  # it failed while it waited
            self._environments.give_back()
            return
        self._num_held += 1
        self.home.rounds.enter(1)
        self._next_turn(session)

    def _let_environment_go(self) -> None:
        if self._environments is not None and self._num_held:  # not if all were released on failure
            self._num_held -= 1
            self._environments.give_back()

    def _next_turn(self, session: SimSession) -> None:
        if self.done.done():
            return
        place = self.host if self._turns is None else self._turns.route(self, session)
        place.engine.submit([self._request(session, place)])

    def _request(self, session: SimSession, place: SimReplica) -> SimRequest:
        is_cached = session.at is place and session.cache_age == place.cache_age
        session.at = place
        return SimRequest(
            num_context=session.num_context,
            num_tokens=session.steps[session.turn].num_tokens,
            on_done=lambda request: self._answered(session, request),
            owner=self,
            sampled=self.sampled,
            version=self.version,
            num_cached=session.num_cached if is_cached else 0,
        )

    def _answered(self, session: SimSession, request: SimRequest) -> None:
        if self._turns is None:
            session.at = self.host  # it may have moved
        else:
            self._turns.release(session)
        assert session.at is not None
        session.cache_age = session.at.cache_age
        session.num_cached = session.num_context + request.num_tokens
        step = session.steps[session.turn]
        session.turn += 1
        if session.turn < len(session.steps):
            session.num_context = session.num_cached + self.home.profile.observation_tokens
            self.home.rounds.rest(step.environment_s, lambda: self._next_turn(session))
            return
        self.home.rounds.leave()
        self._let_environment_go()
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(None)

    def versions(self) -> tuple[VersionSpan, ...]:
        return tuple(VersionSpan(v, self.sampled[v]) for v in sorted(self.sampled))

    def episodes(self) -> tuple[EpisodeMeta, ...]:
        """Return the driver's metadata of each episode."""
        return tuple(self._meta(session) for session in self._sessions)

    def _meta(self, session: SimSession) -> EpisodeMeta:
        said = sum(step.num_tokens for step in session.steps)
        observed = (len(session.steps) - 1) * self.home.profile.observation_tokens
        sample = SampleMeta(self.num_prompt, said + observed, said, prompt_key=self.assignment.group_id)
        return EpisodeMeta((TrajectoryMeta("policy", None, OK, None, (sample,)),))


class Environments:
    """Pool of a fixed number of environments, first come, first served."""

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, begin: Callable[[], None]) -> None:
        """Call `begin` once an environment is free; unblocked by `give_back`."""
        if self._num_free:
            self._num_free -= 1
            begin()
        else:
            self._waiting.append(begin)

    def give_back(self) -> None:
        """Release one environment."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._num_free += 1


class Rounds:
    """Scheduler of a replica's next turns: each when its environment is done, or all together."""

    def __init__(self, used: Used, *, together: bool) -> None:
        """`used` sums the working time of environments."""
        self._used, self._together = used, together
        self._num_out = 0
        """Number of episodes that sample, or whose environment works."""
        self._resting: list[Callable[[], None]] = []

    def enter(self, num_episodes: int) -> None:
        self._num_out += num_episodes

    def rest(self, seconds: float, go_on: Callable[[], None]) -> None:
        """Let the environment of an episode work for `seconds`; call `go_on` when its next turn begins."""
        self._used.environment_s += seconds
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, (lambda: self._arrive(go_on)) if self._together else go_on)

    def leave(self) -> None:
        self._num_out -= 1
        self._begin_round()

    def _arrive(self, go_on: Callable[[], None]) -> None:
        self._resting.append(go_on)
        self._num_out -= 1
        self._begin_round()

    def _begin_round(self) -> None:
        if not self._num_out and self._resting:
            resting, self._resting = self._resting, []
            self._num_out = len(resting)
            for go_on in resting:
                go_on()


class TurnRouter:
    """Router that sends every turn to a replica, by the `Router` that runs use."""

    def __init__(self, replicas: Sequence[SimReplica], *, by_prefix: bool) -> None:
        """`by_prefix`: send a session to the replica that caches its prefix, unless that is overloaded."""
        self._replicas, self._by_prefix = replicas, by_prefix
        self.router = Router(len(replicas))
        self._routed: dict[int, tuple[int, int]] = {}
        """By the id of a running session: its place and its weight."""
        self.num_turns = self.num_back = 0
        """Number of turns after the first, and of those that returned to the previous turn's replica."""

    def route(self, play: SimPlay, session: SimSession) -> SimReplica:
        """Choose a replica for the session's current turn."""
        key = (play.assignment.group_id, session.index, None if self._by_prefix else session.turn)
        weight = request_weight(session.num_context)
        place = self.router.route(weight, key)
        self._routed[id(session)] = place, weight
        if session.turn:
            self.num_turns += 1
            self.num_back += session.at is self._replicas[place]
        return self._replicas[place]

    def release(self, session: SimSession) -> None:
        """Release the replica of an answered turn."""
        self.router.release(*self._routed.pop(id(session)))
