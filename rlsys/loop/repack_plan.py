"""Planner of moves of the last trajectories between replicas: Laminar's Algorithm 1 (arXiv:2510.12633). Pure.

Most of a batch finishes long before its longest trajectories. Until those end, their replica decodes at a fraction of
its speed and keeps old weights. Packed on a few replicas they take no longer, and the emptied replicas load new weights
and start again.

    moves = plan_repack(loads, before={"rollout-0": 0.9, "rollout-1": 0.8}, newest=7, kv_max=0.9, max_requests=64)
    assert moves == (Move(source="rollout-1", to="rollout-0", version=6),)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlsys.types import PolicyVersion, ReplicaLoad


@dataclass(frozen=True, slots=True)
class Move:
    """Move of all running requests of `source` to replica `to`; both have `version` loaded."""

    source: str
    to: str
    version: PolicyVersion


@dataclass(slots=True)
class _Bin:
    """A candidate, with its load in the plan so far."""

    replica: str
    kv_used: float
    num_requests: int
    is_source: bool = False
    is_destination: bool = False


def plan_repack(
    loads: Sequence[ReplicaLoad],
    before: Mapping[str, float],
    newest: PolicyVersion,
    kv_max: float,
    max_requests: int,
) -> tuple[Move, ...]:
    """Plan the moves that empty replicas, best fit first: each source goes into the fullest bin with room for it.

    A replica is a candidate if all of these are true. Its cache use is below `kv_max` and below its use `before` (by
    replica; a new replica is no candidate). No request waits, and 1 to `max_requests` - 1 requests run. It is not
    loading weights, and its version is older than `newest`, so it starts nothing new until it is empty. No bin exceeds
    `kv_max` or `max_requests`. A replica is source or destination, never both.
    """
    candidates = [load for load in loads if _is_candidate(load, before, newest, kv_max, max_requests)]
    candidates.sort(key=lambda load: (load.version, load.stats.kv_used, load.replica))
    return tuple(
        Move(source.replica, to.replica, version)
        for version, group in groupby(candidates, key=lambda load: load.version)
        for source, to in _consolidated(list(group), kv_max, max_requests)
    )


def _is_candidate(
    load: ReplicaLoad, before: Mapping[str, float], newest: PolicyVersion, kv_max: float, max_requests: int
) -> bool:
    stats = load.stats
    is_emptying = stats.kv_used < min(kv_max, before.get(load.replica, 0.0))
    has_work = 0 < stats.num_running < max_requests and stats.num_waiting == 0
    return is_emptying and has_work and not load.is_loading and load.version < newest


def _consolidated(loads: Sequence[ReplicaLoad], kv_max: float, max_requests: int) -> list[tuple[_Bin, _Bin]]:
    """Return (source, destination) pairs among replicas of one version, given by ascending cache use."""
    bins = [_Bin(load.replica, load.stats.kv_used, load.stats.num_running) for load in loads]
    pairs = []
    for source in bins:
        if source.is_destination:
            continue
        fitting = [
            to
            for to in bins
            if to is not source
            and not to.is_source
            and to.kv_used + source.kv_used <= kv_max
            and to.num_requests + source.num_requests <= max_requests
        ]
        if fitting:
            to = max(fitting, key=lambda to: to.kv_used)
            source.is_source = to.is_destination = True
            to.kv_used += source.kv_used
            to.num_requests += source.num_requests
            pairs.append((source, to))
    return pairs
