"""Cluster overview: the activity of every worker in a time window, and the state of replicas now."""

from __future__ import annotations

from typing import NamedTuple

from rlsys.dashboard.http_problems import BadRequest
from rlsys.dashboard.query.bottleneck import bottleneck
from rlsys.dashboard.query.history import EventHistory
from rlsys.dashboard.query.lanes import lanes
from rlsys.dashboard.responses import ClusterAnswer

_WINDOW_S = 600.0


class TimeWindow(NamedTuple):
    """Time window to show, in Unix seconds."""

    from_s: float
    to_s: float


def window(history: EventHistory, from_s: float | None, to_s: float | None) -> TimeWindow | None:
    """Requested time window, else the last 10 minutes; None if the run has no events. Raises `BadRequest`."""
    if history.first_s is None or history.last_s is None:
        return None
    to_s = history.last_s if to_s is None else to_s
    if from_s is None:
        earliest_s = to_s - _WINDOW_S
        from_s = max(earliest_s, history.first_s) if history.first_s < to_s else earliest_s
    if from_s >= to_s:
        raise BadRequest(f"from={from_s} to={to_s}: `from` must be before `to`")
    return TimeWindow(from_s, to_s)


def cluster(history: EventHistory, bound: int | None, shown: TimeWindow | None, width: int) -> ClusterAnswer:
    """Build a `ClusterAnswer`. `bound`: the run's `max_staleness`; `width`: pixels."""
    replicas = history.replicas
    return ClusterAnswer(
        begin_s=history.first_s,
        end_s=history.last_s,
        from_s=shown.from_s if shown else None,
        to_s=shown.to_s if shown else None,
        newest_version=replicas.newest_version,
        staleness_bound=bound,
        lanes=lanes(history.spans.within(*shown), replicas.names, *shown, width) if shown else [],
        speeds=history.paces.speeds(*shown, max(1, width // 8)) if shown else [],
        replicas=replicas.rows(bound),
        restarts=replicas.restarts[::-1],
        queue=replicas.queue(*shown, width) if shown else [],
        bottleneck=bottleneck(history, bound),
    )
