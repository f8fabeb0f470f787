"""Routing of single turns: a turn that would wait at the replica of its session is sampled by another.

The driver routes groups to replicas before it knows how long their sessions are. So some replicas have too many
requests while others have free slots. Requests are therefore routed one by one, as in AgentMath (arXiv:2512.20745).
Its balancer knows all replicas; here each replica asks a few peers, and only when its own slots are taken, so that no
process sees every request (the power of two choices: Mitzenmacher, IEEE TPDS 12(10), 2001).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rlsys.errors import WorkerError
from rlsys.types import Acknowledged
from workers.text.known_prefixes import KnownPrefixes

if TYPE_CHECKING:
    from workers.rollout.generator import Generator

P = TypeVar("P")
NUM_ASKED = 2
"""Peers that are asked, besides the one that sampled the turn before."""
ANSWER_S = 1.0
"""Deadline of their answers: until then the turn waits."""
REST_S = 10.0
"""Seconds for which a peer that failed is not asked."""
MAX_PREFIXES = 1000
"""Maximum number of remembered prefixes; the oldest is removed first."""


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """Load of one replica, as input of `place_of_turn`."""

    weight: int
    """Total `request_weight` of the requests at its engine."""
    has_room: bool
    """True if its engine would start another request at once."""
    held: Acknowledged | None = None
    """The weights that it samples from; None for those that it was started with."""

    def fits(self, held: Acknowledged | None) -> bool:
        """True if it samples from exactly the weights `held`, and has room."""
        return self.has_room and _weights(self.held) == _weights(held)


def place_of_turn(home: TurnLoad, peers: Sequence[tuple[P, TurnLoad]], last: P | None) -> P | None:
    """Return the peer for a turn; None if it stays at home.

    `last` sampled the turn before and has its prefix cached: it has the turn if it has room. Otherwise the turn stays,
    if there is room at home or at none of the peers, or goes to the peer with the least weight.
    """
    fit = [(peer, load) for peer, load in peers if load.fits(home.held)]
    if last is not None and any(peer is last for peer, _ in fit):
        return last
    if home.has_room or not fit:
        return None
    return min(fit, key=lambda each: each[1].weight)[0]


@dataclass
class TurnRouter:
    """The peers of one replica for one policy, and which of them sampled what."""

    num_slots: int
    """Requests that the replica's engine runs at a time."""
    peers: tuple[Generator, ...] = ()
    """In other processes: their methods may raise `WorkerError`."""
    num_away: int = 0
    """Turns that peers have sampled."""
    _chance: random.Random = field(default_factory=random.Random)
    _rests_until_s: dict[str, float] = field(default_factory=dict)
    _prefixes: KnownPrefixes[Generator] = field(default_factory=KnownPrefixes)
    """Peers by the prefix that they have cached."""

    async def choose(self, home: TurnLoad, prompt_ids: tuple[int, ...]) -> Generator | None:
        """Return the peer for a turn; None if it stays at home. Waits for the peers' answers, `ANSWER_S` at most."""
        if not self.peers:
            return None
        last = self._cached(prompt_ids)
        if home.has_room and last is None:
            return None
        at_s = time.monotonic()
        others = [p for p in self.peers if p is not last and self._rests_until_s.get(p.name, 0.0) <= at_s]
        asked = self._chance.sample(others, min(NUM_ASKED, len(others)))
        if last is not None:
            asked.append(last)
        told = await asyncio.gather(*map(self._load, asked))
        return place_of_turn(home, [(p, t) for p, t in zip(asked, told, strict=True) if t is not None], last)

    def note(self, peer: Generator, token_ids: tuple[int, ...]) -> None:
        """Remember that `peer` sampled a turn that ended with these tokens."""
        self.num_away += 1
        self._prefixes.put(token_ids, peer)
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.pop_oldest()

    def failed(self, peer: Generator) -> None:
        """Leave a peer alone for a while."""
        self._rests_until_s[peer.name] = time.monotonic() + REST_S

    async def _load(self, peer: Generator) -> TurnLoad | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await peer.turn_load()
        except (WorkerError, TimeoutError):
            self.failed(peer)
            return None

    def _cached(self, prompt_ids: tuple[int, ...]) -> Generator | None:
        """The peer that has the longest prefix of a prompt cached, and takes it from memory: a prompt has one turn."""
        peer = self._prefixes.longest(prompt_ids, removes=True)
        return peer if any(peer is each for each in self.peers) else None


def _weights(held: Acknowledged | None) -> tuple[int, str] | None:
    return None if held is None else (held.version, held.hash)
