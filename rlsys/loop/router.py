"""Which replica a request goes to: prefix-aware weighted load balancing, as in AgentMath (arXiv:2512.20745).

A request weighs the more, the longer its prefix is. It goes to the replica with the least total weight outstanding; but
a session, whose requests share their prefix, goes back to the replica that has it cached, unless that is overloaded.

    router = Router(num_replicas=4)
    replica = router.route(request_weight(len(prompt_ids)), session)
    ...                                                             # the replica answers
    router.release(replica, request_weight(len(prompt_ids)))
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from rlsys.types import EngineStats

BASE_WEIGHT = 1
"""Weight of a request without a prefix: the paper's w_base. It publishes no value for this and the next."""
PREFIX_TOKENS = 1024
"""Tokens of prefix that add 1 to the weight: the paper's L_base."""
OVERLOAD = 1.5
"""A session leaves a replica that would hold more than this many times the weight of the least loaded one."""
KV_FULL = 0.9
"""Share of the cache in use from which a replica that lets requests wait counts as full."""
MAX_SESSIONS = 10_000
"""Sessions remembered; the one unused for longest is forgotten first."""


def request_weight(num_tokens: int) -> int:
    """floor(L / L_base) + w_base of a request with a prefix of `num_tokens`."""
    return num_tokens // PREFIX_TOKENS + BASE_WEIGHT


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What is known of one replica."""

    weight: int = 0
    """Total weight of the requests it was sent and has not answered."""
    is_live: bool = True
    stats: EngineStats | None = None
    """What it last told of itself."""

    @property
    def is_full(self) -> bool:
        """Its cache is nearly used up, and requests wait. One without work is not full, whatever it told last."""
        stats = self.stats
        return self.weight > 0 and stats is not None and stats.num_waiting > 0 and stats.kv_used >= KV_FULL


def choose(
    loads: Sequence[RouterLoad], weight: int, home: int | None = None, among: Collection[int] | None = None
) -> int:
    """The replica that a request of `weight` goes to; `home` has its prefix cached.

    Home, unless that is overloaded; else the one with the least weight, the first of equals. Full replicas are passed
    over while another is not, those not `among` the given while one of them lives, dead ones always. Raises
    `ValueError` if none lives.
    """
    live = [i for i, load in enumerate(loads) if load.is_live]
    if not live:
        raise ValueError("no replica is live: wait for one to join")
    live = [i for i in live if among is not None and i in among] or live
    fit = [i for i in live if not loads[i].is_full] or live
    least = min(fit, key=lambda i: loads[i].weight)
    if home in fit and loads[home].weight + weight <= OVERLOAD * (loads[least].weight + weight):
        return home
    return least


class Router:
    """The state between two choices: the load of each replica, and where each session was sent last."""

    def __init__(self, num_replicas: int, max_sessions: int = MAX_SESSIONS) -> None:
        self._loads = [RouterLoad() for _ in range(num_replicas)]
        self._homes: dict[Hashable, int] = {}
        self._max_sessions = max_sessions

    @property
    def loads(self) -> tuple[RouterLoad, ...]:
        """The load of each replica."""
        return tuple(self._loads)

    def route(self, weight: int, session: Hashable, among: Collection[int] | None = None) -> int:
        """Choose a replica, one of `among` if it can be, and count the request as its own until `release`."""
        replica = choose(self._loads, weight, self._homes.pop(session, None), among)
        self._homes[session] = replica
        if len(self._homes) > self._max_sessions:
            del self._homes[next(iter(self._homes))]
        self._add(replica, weight)
        return replica

    def release(self, replica: int, weight: int) -> None:
        """A request that was routed there is answered, or never will be."""
        self._add(replica, -weight)

    def transfer(self, source: int, to: int, weight: int) -> None:
        """A request that was routed to `source` goes on at `to`, and is released there."""
        self._add(source, -weight)
        self._add(to, weight)

    def report(self, replica: int, stats: EngineStats | None) -> None:
        """What a replica tells of itself."""
        self._loads[replica] = replace(self._loads[replica], stats=stats)

    def leave(self, replica: int) -> None:
        """A replica is gone, and its cache with it: nothing goes there until it joins again."""
        self._loads[replica] = replace(self._loads[replica], is_live=False, stats=None)
        self._homes = {session: home for session, home in self._homes.items() if home != replica}

    def join(self, replica: int) -> None:
        """A replica is ready for requests."""
        self._loads[replica] = replace(self._loads[replica], is_live=True)

    def _add(self, replica: int, weight: int) -> None:
        load = self._loads[replica]
        self._loads[replica] = replace(load, weight=load.weight + weight)
