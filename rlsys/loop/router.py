"""Router of requests to replicas: prefix-aware weighted load balancing, as in AgentMath (arXiv:2512.20745).

The weight of a request grows with its prefix. It goes to the replica with the least total outstanding weight. A
session, whose requests share a prefix, returns to the replica that caches it, unless that replica is overloaded.

    router = Router(num_replicas=4)
    replica = router.route(request_weight(len(prompt_ids)), session)
    ...                                                             # the replica answers
    router.release(replica, request_weight(len(prompt_ids)))
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from rlsys.types import EngineStats

BASE_WEIGHT = 1
"""Weight of a request without a prefix: the paper's w_base. The paper gives no value for this and the next constant."""
PREFIX_TOKENS = 1024
"""Prefix tokens that add 1 to the weight: the paper's L_base."""
OVERLOAD = 1.5
"""A session leaves a replica whose weight would exceed this multiple of the least loaded replica's."""
KV_FULL = 0.9
"""Share of cache in use from which a replica with waiting requests counts as full."""
MAX_SESSIONS = 10_000
"""Maximum number of remembered sessions; the least recently used is removed first."""


def request_weight(num_tokens: int) -> int:
    """Return floor(L / L_base) + w_base for a request with a prefix of L = `num_tokens`."""
    return num_tokens // PREFIX_TOKENS + BASE_WEIGHT


@dataclass(slots=True)
class RouterLoad:
    """Load of one replica."""

    weight: int = 0
    """Total weight of its unanswered requests."""
    is_live: bool = True
    stats: EngineStats | None = None
    """Last reported statistics of its engine."""
    is_stuck: bool = False
    """Is it live, and makes no progress at the moment?"""

    @property
    def is_full(self) -> bool:
        """True if its cache is nearly used up and requests wait. An idle replica is not full, whatever it last
        reported."""
        stats = self.stats
        return self.weight > 0 and stats is not None and stats.num_waiting > 0 and stats.kv_used >= KV_FULL


def choose(
    loads: Sequence[RouterLoad], weight: int, home: int | None = None, among: Collection[int] | None = None
) -> int:
    """Return the replica for a request of `weight`; `home` has its prefix cached.

    The result is `home`, unless overloaded, else the first replica with the least weight. Full replicas are used only
    if all are full, replicas outside `among` only if none of those is live, stuck ones only if all are stuck, and dead
    ones never. Raises `ValueError` if none is live.
    """
    live = [i for i, load in enumerate(loads) if load.is_live]
    if not live:
        raise ValueError("no replica is live: wait for one to join")
    live = [i for i in live if not loads[i].is_stuck] or live
    live = [i for i in live if among is not None and i in among] or live
    fit = [i for i in live if not loads[i].is_full] or live
    least = min(fit, key=lambda i: loads[i].weight)
    if home in fit and loads[home].weight + weight <= OVERLOAD * (loads[least].weight + weight):
        return home
    return least


class Router:
    """State between two choices: the load of each replica, and the last replica of each session."""

    def __init__(self, num_replicas: int, max_sessions: int = MAX_SESSIONS) -> None:
        self.loads = [RouterLoad() for _ in range(num_replicas)]
        self._homes: dict[Hashable, int] = {}
        self._max_sessions = max_sessions

    def route(self, weight: int, session: Hashable, among: Collection[int] | None = None) -> int:
        """Choose a replica, preferably of `among`, and count the request there until `release`."""
        replica = choose(self.loads, weight, self._homes.pop(session, None), among)
        self._homes[session] = replica
        if len(self._homes) > self._max_sessions:
            del self._homes[next(iter(self._homes))]
        self.loads[replica].weight += weight
        return replica

    def release(self, replica: int, weight: int) -> None:
        """End a request routed to `replica`: it is answered, or never will be."""
        self.loads[replica].weight -= weight

    def transfer(self, source: int, to: int, weight: int) -> None:
        """Move a request from `source` to the replica `to`, where it is released later."""
        self.loads[source].weight -= weight
        self.loads[to].weight += weight

    def report(self, replica: int, stats: EngineStats | None) -> None:
        """Record the latest statistics of a replica."""
        self.loads[replica].stats = stats

    def set_stuck(self, replica: int, is_stuck: bool) -> None:
        """Pass a replica over, or no longer."""
        self.loads[replica].is_stuck = is_stuck

    def leave(self, replica: int) -> None:
        """Mark a replica as gone, with its cache: no request goes there until `join`."""
        self.loads[replica] = RouterLoad(self.loads[replica].weight, is_live=False)
        self._homes = {session: home for session, home in self._homes.items() if home != replica}

    def join(self, replica: int) -> None:
        """Mark a replica as ready for requests."""
        self.loads[replica].is_live = True
