"""Analytic model of an inference engine: continuous batching as processor sharing.

All running requests advance together, one token a step. The engine counts its steps: a request that starts at count c
and samples n tokens ends at c + n. Events are needed only where the batch changes. Between two of them, s steps with b
requests take s * (overhead_s + max(weights_s, b * sequence_s)) for the linear layers. Attention over a context of T
tokens, which grows by b a step, takes token_s * (T * s + b * s**2 / 2).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from math import sqrt

from rlsys.simulate.profile import Profile
from rlsys.testing.fake_pools import FakePlay, now
from rlsys.types import EngineStats, PolicyVersion

ROUNDING = 1e-4
"""Differences below this many steps are rounding errors."""
ADMIT = 0.9
"""Share of the cache up to which requests are admitted; the rest is for running requests to grow."""
MAKE_ROOM = 0.95
"""Share of a full cache that stays in use after requests were evicted. Assumed, like `ADMIT`: engines differ."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """One policy call."""

    num_context: int
    """Tokens before the sampled ones: the prompt and the conversation so far."""
    num_tokens: int
    """Number of tokens to sample."""
    on_done: Callable[[], object]
    owner: FakePlay
    sampled: Counter[PolicyVersion]
    """Counter of its tokens, by version."""
    version: PolicyVersion | None = None
    """The version of all its tokens, where several are loaded; None: the engine's version at each time."""
    num_cached: int = 0
    """Tokens of the context that are in the replica's key-value cache."""
    done: int = 0
    """Tokens sampled before it last entered an engine."""
    _began: float = 0.0
    """Step count of the engine at its first token: the request ends at `_began + num_tokens`."""


@dataclass(slots=True)
class Used:
    """Use of a replica's time since its start."""

    busy_s: float = 0.0
    """Seconds with a running request."""
    cache_s: float = 0.0
    """Integral of the used share of the cache over `busy_s`."""
    exposed_s: float = 0.0
    """Seconds that a replica was halted for weights: idle until they arrived, or loading them."""
    environment_s: float = 0.0
    """Working time of environments, in seconds."""
    num_tokens: float = 0.0
    num_prefilled: int = 0
    """Tokens of context that were prefilled."""
    num_cached: int = 0
    """Tokens of context that were cached."""

    def __add__(self, other: Used) -> Used:
        return Used(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Used) -> Used:
        return Used(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class SimEngine:
    """Engine of one replica for `SimRollouts`; calls `on_done` of every finished request."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._decode = profile, profile.decode
        self.used = Used()
        self._num_resident = 1
        self._versions: list[tuple[float, PolicyVersion]] = []
        """(step count, version loaded then), oldest first: more than one only where weights change in flight."""
        self._steps = 0.0
        self._context = 0.0
        """Tokens in the cache."""
        self._debt_s = 0.0
        """Seconds of work before the next decoding step: prompts, weights."""
        self._running: dict[int, SimRequest] = {}
        """Running requests, by order of entry."""
        self._due: list[tuple[float, int]] = []
        """Heap of (step count at the end, order of entry); entries of requests that do not run are skipped."""
        self._waiting: deque[SimRequest] = deque()
        self._is_asleep = False
        self._num_entered = 0
        self._at_s = now()
        self._timer: asyncio.TimerHandle | None = None

    # ----------------------------------------------------------------------------------------------------- what it does

    def submit(self, requests: Sequence[SimRequest]) -> None:
        """Queue requests, which run as soon as there is room."""
        self._advance()
        self._waiting.extend(requests)
        self._go_on()

    def abort(self, owners: Collection[FakePlay]) -> list[SimRequest]:
        """Remove the running and waiting requests of these owners; each keeps its sampled tokens."""
        self._advance()
        ended = [self._leave(order) for order, request in list(self._running.items()) if request.owner in owners]
        ended += [request for request in self._waiting if request.owner in owners]
        self._waiting = deque(request for request in self._waiting if request.owner not in owners)
        self._go_on()
        return ended

    def owners(self) -> list[FakePlay]:
        """Owners of all running and waiting requests."""
        return [request.owner for request in (*self._running.values(), *self._waiting)]

    def change(self, version: PolicyVersion, load_s: float = 0.0, *, recompute: bool = False) -> float:
        """Sample from `version` from here on; return the seconds that running requests are halted.

        These are `load_s`, and with `recompute` the time to recompute their keys and values.
        """
        self._advance()
        if not self._running:
            self._versions.clear()
        self._versions.append((self._steps, version))
        halt_s = load_s + (self._context / self._profile.prefill_tokens_per_s if recompute else 0.0)
        self._debt_s += halt_s if self._running else 0.0
        self._go_on()
        return halt_s

    def share(self, num_versions: int) -> None:
        """Set the number of versions that run side by side: the weights of each are read once a step."""
        self._advance()
        self._num_resident = max(1, num_versions)
        self._go_on()

    def sleep(self) -> None:
        """Stop decoding, and forget keys and values."""
        self._advance()
        self._is_asleep = True
        self._go_on()

    def wake(self) -> None:
        """Go on; keys and values of running requests are computed again."""
        self._advance()
        self._is_asleep = False
        self._debt_s += self._context / self._profile.prefill_tokens_per_s
        self._go_on()

    @property
    def is_busy(self) -> bool:
        """True if a request is running."""
        return bool(self._running)

    def current_use(self) -> Used:
        """Return the use of time up to this moment."""
        self._advance()
        return self.used

    def stats(self) -> EngineStats:
        self._advance()
        share = min(1.0, self._context / self._profile.cache_tokens)
        used = self.used
        return EngineStats(len(self._running), len(self._waiting), share, int(used.num_tokens), used.num_cached)

    # ------------------------------------------------------------------------------------------------------- the clock

    def _advance(self) -> None:
        """Account for the time since the last call."""
        at_s = now()
        elapsed, self._at_s = at_s - self._at_s, at_s
        batch = len(self._running)
        if elapsed <= 0 or not batch or self._is_asleep:
            return
        before = self._context
        paid = min(elapsed, self._debt_s)
        self._debt_s -= paid
        if elapsed > paid:
            steps = self._steps_in(elapsed - paid)
            self._steps += steps
            self._context += batch * steps
            self.used.num_tokens += batch * steps
        self.used.busy_s += elapsed
        self.used.cache_s += elapsed * (before + self._context) / 2 / self._profile.cache_tokens

    def _go_on(self) -> None:
        """Admit waiting requests that fit, and set the timer to the next event."""
        self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._is_asleep:
            steps = self._next_due() - self._steps
            if len(self._running) > 1:
                steps = min(steps, (self._profile.cache_tokens - self._context) / len(self._running))
            delay = self._debt_s + self._time_of(max(0.0, steps))
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        ended = []
        while self._running and self._next_due() <= self._steps + ROUNDING:
            ended.append(self._leave(heappop(self._due)[1]))
        self._make_room()
        self._go_on()
        for request in ended:
            request.on_done()

    def _make_room(self) -> None:
        """If the cache is full, move the youngest requests back to the queue, with their tokens."""
        full = self._profile.cache_tokens - ROUNDING * len(self._running)
        if self._context >= full:
            while len(self._running) > 1 and self._context > MAKE_ROOM * full:
                self._waiting.appendleft(self._leave(next(reversed(self._running))))

    def _next_due(self) -> float:
        while self._due[0][1] not in self._running:
            heappop(self._due)
        return self._due[0][0]

    def _time_of(self, steps: float) -> float:
        batch = len(self._running)
        return steps * self._step_s + self._decode.token_s * batch * steps * steps / 2

    def _steps_in(self, seconds: float) -> float:
        """Inverse of `_time_of`."""
        growth, first_s = self._decode.token_s * len(self._running), self._step_s
        return 2 * seconds / (first_s + sqrt(first_s * first_s + 2 * growth * seconds))

    @property
    def _step_s(self) -> float:
        """Seconds of the next step."""
        decode = self._decode
        linear_s = max(decode.weights_s * self._num_resident, len(self._running) * decode.sequence_s)
        return decode.overhead_s + linear_s + self._context * decode.token_s

    # -------------------------------------------------------------------------------------------------------- requests

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._profile.slots:
            request = self._waiting[0]
            needed = request.num_context + request.done
            if self._running and self._context + needed > ADMIT * self._profile.cache_tokens:
                return
            self._waiting.popleft()
            self._context += needed
            cached = min(request.num_cached, needed)
            self.used.num_cached += cached
            self.used.num_prefilled += needed - cached
            self._debt_s += (needed - cached) / self._profile.prefill_tokens_per_s
            request._began = self._steps - request.done
            self._num_entered += 1
            self._running[self._num_entered] = request
            heappush(self._due, (request._began + request.num_tokens, self._num_entered))

    def _leave(self, order: int) -> SimRequest:
        """Remove a running request, with its sampled tokens."""
        request = self._running.pop(order)
        ends = [steps for steps, _ in self._versions[1:]] + [self._steps]
        for end, (_, version) in zip(ends, self._versions, strict=True):
            upto = min(request.num_tokens, int(end - request._began + ROUNDING))
            if upto > request.done:
                kept = version if request.version is None else request.version
                request.sampled[kept] += upto - request.done
                request.done = upto
        self._context -= request.num_context + (self._steps - request._began)
        if not self._running:
            self._context, self._debt_s = 0.0, 0.0
            del self._versions[:-1]
        request.num_cached = 0
        return request
