"""Speed of every worker over time: a fold over the groups that it rolled out or scored."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from rlsys.dashboard.query.lanes import natural
from rlsys.dashboard.responses import SpeedPoint, WorkerSpeed
from rlsys.monitoring.events import Event, GroupRolledOut, GroupScored
from rlsys.monitoring.worker_signals import LEAST_GROUPS, usual


class Straggler(NamedTuple):
    """Worker that is slower than its peers."""

    worker: str
    ratio: float
    """Its typical seconds per unit of work, over those of its peers."""
    sure: float
    """The same of what nearly all of its groups exceed."""


@dataclass(slots=True)
class _Work:
    """Groups of one worker, in the order of their ends."""

    ends_s: array[float] = field(default_factory=lambda: array("d"))
    units: array[int] = field(default_factory=lambda: array("q"))
    """Tokens, or episodes."""
    seconds: array[float] = field(default_factory=lambda: array("d"))

    def put(self, end_s: float, units: int, seconds: float) -> None:
        self.ends_s.append(end_s)
        self.units.append(units)
        self.seconds.append(seconds)

    def since(self, from_s: float) -> _Work:
        """Groups that ended after `from_s`."""
        at = bisect_right(self.ends_s, from_s)
        return _Work(self.ends_s[at:], self.units[at:], self.seconds[at:])


class Paces:
    """Work of every replica and reward worker."""

    HEARS = (GroupRolledOut, GroupScored)

    def __init__(self) -> None:
        self._work: dict[str, dict[str, _Work]] = {"rollout": {}, "reward": {}}

    def observe(self, event: Event, time_s: float) -> None:
        """Process one of the events in `HEARS`. Older versions did not record who scored a group."""
        match event:
            case GroupRolledOut(worker=worker, lengths=lengths, seconds=seconds):
                self._work["rollout"].setdefault(worker, _Work()).put(time_s, sum(lengths), seconds)
            case GroupScored(worker=worker, rewards=rewards, seconds=seconds) if worker:
                self._work["reward"].setdefault(worker, _Work()).put(time_s, len(rewards), seconds)
            case _:
                pass

    def speeds(self, from_s: float, to_s: float, width: int) -> list[WorkerSpeed]:
        """Speed of each replica in a time window, in at most about `width` points each."""
        replicas = self._work["rollout"]
        found = ((name, _points(replicas[name], from_s, to_s, width)) for name in sorted(replicas, key=natural))
        return [WorkerSpeed(name, points) for name, points in found if points]

    def straggler(self, kind: str, from_s: float) -> Straggler | None:
        """Slowest worker of a kind since `from_s`, compared with its peers; None: too few of them, or of its groups."""
        found = {name: _paces(done) for name, done in self._since(kind, from_s).items()}
        paces = {name: own for name, own in found.items() if len(own) >= LEAST_GROUPS}
        if len(paces) < 2:
            return None
        typical = {name: median(own) for name, own in paces.items()}
        slowest = max(paces, key=lambda name: usual(paces[name]))
        peers = median(pace for name, pace in typical.items() if name != slowest)
        return Straggler(slowest, typical[slowest] / peers, usual(paces[slowest]) / peers) if peers > 0 else None

    def busiest(self, kind: str, from_s: float) -> str:
        """Worker of a kind with the most seconds of work since `from_s`; empty if none is known."""
        seconds = {name: sum(done.seconds) for name, done in self._since(kind, from_s).items()}
        return max(seconds, key=lambda name: seconds[name], default="")

    def group_s(self, from_s: float) -> float | None:
        """Mean seconds that a group was at its replica, since `from_s`."""
        seconds = [s for done in self._since("rollout", from_s).values() for s in done.seconds]
        return sum(seconds) / len(seconds) if seconds else None

    def _since(self, kind: str, from_s: float) -> Mapping[str, _Work]:
        recent = {name: done.since(from_s) for name, done in self._work[kind].items()}
        return {name: done for name, done in recent.items() if done.ends_s}


def _paces(done: _Work) -> list[float]:
    """Seconds per unit of work of each group."""
    return [seconds / units for seconds, units in zip(done.seconds, done.units, strict=True) if units and seconds > 0]


def _points(done: _Work, from_s: float, to_s: float, width: int) -> list[SpeedPoint]:
    first, last = bisect_left(done.ends_s, from_s), bisect_right(done.ends_s, to_s)
    num = max(1, min(width, last - first))
    edges = list(accumulate((to_s - from_s) / num for _ in range(num))) if last > first else []
    points, begin = [], first
    for edge in edges:
        end = bisect_right(done.ends_s, from_s + edge, begin, last)
        seconds = sum(done.seconds[begin:end])
        if end > begin and seconds > 0:
            points.append(SpeedPoint(done.ends_s[end - 1], sum(done.units[begin:end]) / seconds))
        begin = end
    return points
