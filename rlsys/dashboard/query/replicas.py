"""State of replicas, failures and restarts, and size of the queue: a fold over events."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from rlsys.dashboard.query.lanes import kind_of, natural
from rlsys.dashboard.responses import QueuePoint, ReplicaRow, RestartRow
from rlsys.monitoring.events import (
    EngineChosen,
    Event,
    QueueSeen,
    ReplicaSeen,
    RunStarted,
    WeightsPublished,
    WorkerFailed,
    WorkerLeft,
    WorkerRestarted,
)

_UNSEEN_S = 30.0
"""A replica without an answer for this time, while others answered, counts as unresponsive and stale."""
_LOOKS = 3
"""A replica is stale if it was too far behind at this many polls in a row."""
_RATE_S = 60.0
"""Time over which tokens per second are averaged."""


class _Held(NamedTuple):
    """Version of a replica and newest version at one moment."""

    version: int
    newest: int | None
    """Newest published version."""

    @property
    def behind(self) -> int | None:
        return None if self.newest is None else self.newest - self.version


@dataclass(slots=True)
class _Replica:
    seen_s: float
    seen: ReplicaSeen | None = None
    """None: only its start is known."""
    held: deque[_Held] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    """Versions at the last polls."""
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    """Poll time and number of tokens, over the last `_RATE_S`."""

    def look(self, seen: ReplicaSeen, newest: int | None, time_s: float) -> None:
        self.seen, self.seen_s = seen, time_s
        self.held.append(_Held(seen.version, newest))
        self.tokens.append((time_s, seen.num_tokens))
        while time_s - self.tokens[0][0] > _RATE_S and len(self.tokens) > 2:
            self.tokens.popleft()

    def lags(self, most: int) -> bool:
        """True if it was more than `most` versions behind at all its last polls; at a single one, a pull may be due."""
        return len(self.held) == _LOOKS and min(held.behind or 0 for held in self.held) > most

    @property
    def tokens_per_s(self) -> float | None:
        if len(self.tokens) < 2:
            return None
        (first_s, first), (last_s, last) = self.tokens[0], self.tokens[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last >= first else None


@dataclass
class Replicas:
    """Current replicas, and the failures of all workers."""

    newest_version: int | None = None
    """Newest published version."""
    restarts: list[RestartRow] = field(default_factory=list)
    """Oldest first."""
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    _queue_s: array[float] = field(default_factory=lambda: array("d"))
    _queue: array[int] = field(default_factory=lambda: array("q"))
    """Open and finished groups, alternating."""

    HEARS = (
        RunStarted,
        EngineChosen,
        ReplicaSeen,
        WeightsPublished,
        WorkerFailed,
        WorkerRestarted,
        WorkerLeft,
        QueueSeen,
    )

    def observe(self, event: Event, time_s: float) -> None:
        """Process one of the events in `HEARS`."""
        match event:
            case EngineChosen(worker=worker):
                if kind_of(worker) == "rollout":
                    self._there(worker, time_s)
            case ReplicaSeen(worker=worker):
                self._there(worker, time_s).look(event, self.newest_version, time_s)
            case WeightsPublished(version=version):
                self.newest_version = version
            case WorkerFailed(worker=worker, phase=phase, detail=detail):
                self.restarts.append(
                    RestartRow(worker=worker, phase=phase, detail=detail, failed_s=time_s, back_s=None)
                )
            case WorkerRestarted(worker=worker):
                self._back(worker, time_s)
            case WorkerLeft(worker=worker):
                self._replicas.pop(worker, None)
            case QueueSeen(num_open=num_open, num_finished=num_finished):
                self._queue_s.append(time_s)
                self._queue.extend((num_open, num_finished))
            case RunStarted():  # maybe a resume: replicas that answered before are other processes
                self._replicas = {name: r for name, r in self._replicas.items() if r.seen is None}
            case _:
                pass

    def rows(self, bound: int | None) -> list[ReplicaRow]:
        """Rows of the replicas. `bound`: the run's `max_staleness`; a healthy replica may be one version older."""
        last_s = max((replica.seen_s for replica in self._replicas.values()), default=0.0)
        names = sorted(self._replicas, key=natural)
        return [self._row(name, self._replicas[name], last_s, (bound or 0) + 1) for name in names]

    @property
    def names(self) -> list[str]:
        """Names of current replicas."""
        return list(self._replicas)

    def queue(self, from_s: float, to_s: float, width: int) -> list[QueuePoint]:
        """Queue sizes in a time window, at most about `width` points: the maximum of each stretch."""
        first, last = bisect_left(self._queue_s, from_s), bisect_right(self._queue_s, to_s)
        num = max(1, min(width, last - first))
        edges = [first + bucket * (last - first) // num for bucket in range(num + 1)]
        at = [max(range(a, b), key=lambda i: self._queue[2 * i]) for a, b in pairwise(edges) if b > a]
        return [QueuePoint(self._queue_s[i], self._queue[2 * i], self._queue[2 * i + 1]) for i in at]

    def _there(self, worker: str, time_s: float) -> _Replica:
        """Get the replica of this name; a new one replaces the others in its slot."""
        if worker not in self._replicas:
            for other in [other for other in self._replicas if _slot(other) == _slot(worker)]:
                del self._replicas[other]
            self._replicas[worker] = _Replica(time_s)
        return self._replicas[worker]

    def _back(self, worker: str, time_s: float) -> None:
        for at in reversed(range(len(self.restarts))):
            row = self.restarts[at]
            if _slot(row.worker) == _slot(worker) and row.back_s is None:
                self.restarts[at] = replace(row, back_s=time_s)
                return

    def _row(self, name: str, replica: _Replica, last_s: float, most: int) -> ReplicaRow:
        seen, held = replica.seen, replica.held[-1] if replica.held else None
        answers = seen is None or last_s - replica.seen_s <= _UNSEEN_S
        return ReplicaRow(
            worker=name,
            version=held.version if held else None,
            behind=held.behind if held else None,
            is_stale=not answers or replica.lags(most),
            answers=answers,
            is_loading=seen.is_loading if seen else False,
            num_running=seen.num_running if seen else 0,
            num_waiting=seen.num_waiting if seen else 0,
            kv_used=seen.kv_used if seen else 0.0,
            tokens_per_s=replica.tokens_per_s,
            seen_s=replica.seen_s,
            restarts=sum(_slot(row.worker) == _slot(name) for row in self.restarts),
        )


def _slot(worker: str) -> str:
    """Slot of a replica: `rollout-2` for `rollout-2.1` and other replacements."""
    return re.sub(r"\.\d+", "", worker)
