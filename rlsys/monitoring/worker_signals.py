"""Signals of workers, groups and files that alerts compare with thresholds: each hears events as they happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median

from rlsys.monitoring.alert_signals import SignalReading
from rlsys.monitoring.events import (
    EndpointFailed,
    Event,
    FileSkipped,
    FileStalled,
    GroupDropped,
    GroupIssued,
    GroupPlaced,
    GroupRolledOut,
    GroupScored,
    QueueSeen,
    ReplicaSeen,
    RolledBack,
    RunStarted,
    StepDone,
    WeightsPublished,
    WorkerFailed,
)

_LEAST_STUCK_S = 60.0
"""A younger group is not stuck, however quick the others are."""
_LEAST_DONE = 20
"""Groups that must be scored before any other can count as stuck."""
LEAST_GROUPS = 4
"""Groups of a worker below which it is not compared with its peers."""
_LEAST_WORK_S = 0.1
"""Workers that need less than this for a group are all quick enough."""


class Slowest:
    """Seconds per unit of work of the slowest worker, as a multiple of those of its peers.

    Work is tokens for replicas, episodes for reward workers. Nearly all of the worker's last groups must be slow, so
    that a few long ones do not count.
    """

    hears = (GroupRolledOut, GroupScored, WorkerFailed, RunStarted, StepDone)

    def __init__(self) -> None:
        self._paces_s: dict[str, dict[str, deque[float]]] = {"token": {}, "episode": {}}
        """Unit -> worker -> seconds per unit of its last groups."""
        self._group_s: dict[str, float] = {}
        """Worker -> seconds of its last group."""

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        match event:
            case GroupRolledOut(worker=worker, lengths=lengths, seconds=seconds):
                self._add("token", worker, seconds, sum(lengths))
            case GroupScored(worker=worker, rewards=rewards, seconds=seconds) if worker:
                self._add("episode", worker, seconds, len(rewards))
            case WorkerFailed(worker=worker):
                for paces_s in self._paces_s.values():
                    paces_s.pop(worker, None)
            case RunStarted():
                self._paces_s = {unit: {} for unit in self._paces_s}
            case StepDone():
                return max((r for unit in self._paces_s for r in self._compare_workers(unit)), default=None)
            case _:
                pass
        return None

    def _add(self, unit: str, worker: str, seconds: float, num: int) -> None:
        if num and seconds > 0:
            self._paces_s[unit].setdefault(worker, deque(maxlen=12)).append(seconds / num)
            self._group_s[worker] = seconds

    def _compare_workers(self, unit: str) -> list[SignalReading]:
        paces_s = {worker: paces for worker, paces in self._paces_s[unit].items() if len(paces) >= LEAST_GROUPS}
        typical_s = {worker: median(paces) for worker, paces in paces_s.items()}
        readings = []
        for worker, paces in paces_s.items() if len(paces_s) > 1 else ():
            peers_s = median(pace for peer, pace in typical_s.items() if peer != worker)
            ratio = usual(paces) / peers_s if self._group_s[worker] >= _LEAST_WORK_S else 1.0
            words = (
                f"{worker} takes {typical_s[worker] / peers_s:.1f} times as long as its peers: "
                f"{_per(typical_s[worker], unit)}, they {_per(peers_s, unit)}"
            )
            readings.append(SignalReading(ratio, "time/rollout" if unit == "token" else "time/reward", words))
        return readings


def usual(paces: Collection[float]) -> float:
    """Pace that nearly all groups of a worker exceed: a worker is slow only if this is. Of few groups, the fastest."""
    return sorted(paces)[len(paces) // 4 if len(paces) >= 8 else 0]


def _per(seconds: float, unit: str) -> str:
    return f"{1000 * seconds:.3g} ms per {unit}"


class Behind:
    """Versions by which a busy or loading replica is behind, beyond those that the run's bound explains.

    It must be behind at 3 polls in a row: at a single one, a change of weights may be under way. 0 for runs that do not
    record their bound.
    """

    hears = (ReplicaSeen, WeightsPublished, WorkerFailed, RunStarted)
    _LOOKS = 3

    def __init__(self) -> None:
        self._newest = 0
        self._bound: int | None = None
        self._behind: dict[str, deque[int]] = {}
        self._versions: dict[str, int] = {}

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        match event:
            case RunStarted(max_staleness=bound):
                self._bound, self._behind = (bound if bound >= 0 else None), {}
            case WeightsPublished(version=version):
                self._newest = version
            case WorkerFailed(worker=worker):
                self._behind.pop(worker, None)
            case ReplicaSeen(worker=worker, version=version):
                is_at_work = event.is_loading or event.num_running + event.num_waiting > 0
                looks = self._behind.setdefault(worker, deque(maxlen=self._LOOKS))
                looks.append(self._newest - version if is_at_work else 0)
                self._versions[worker] = version
                return self._worst()
            case _:
                pass
        return None

    def _worst(self) -> SignalReading | None:
        behind = {worker: min(looks) for worker, looks in self._behind.items() if len(looks) == self._LOOKS}
        if self._bound is None or not behind:
            return None
        worker = max(behind, key=lambda name: behind[name])
        words = f"{worker} has weights of version {self._versions[worker]}, and {self._newest} is the newest"
        return SignalReading(behind[worker] - (self._bound + 1), "", words)


class Stuck:
    """Age of the oldest group without rewards, as a multiple of the time that the slowest of the last 200 took."""

    hears = (
        GroupIssued,
        GroupPlaced,
        GroupRolledOut,
        GroupScored,
        GroupDropped,
        RunStarted,
        RolledBack,
        StepDone,
        QueueSeen,
        ReplicaSeen,
    )

    def __init__(self) -> None:
        self._pending: dict[int, tuple[float, str, str]] = {}
        """Group -> time of issue, task, and where it is; oldest first."""
        self._took_s: deque[float] = deque(maxlen=200)

    def observe(self, event: Event, time_s: float) -> SignalReading | None:
        match event:
            case GroupIssued(group_id=group_id, task_id=task_id):
                self._pending.pop(group_id, None)
                self._pending[group_id] = (time_s, task_id, "a replica")
            case GroupPlaced(group_id=group_id, worker=worker) if group_id in self._pending:
                self._pending[group_id] = (*self._pending[group_id][:2], worker)
            case GroupRolledOut(group_id=group_id) if group_id in self._pending:
                self._pending[group_id] = (*self._pending[group_id][:2], "a reward worker")
            case GroupScored(group_id=group_id) if group_id in self._pending:
                self._took_s.append(time_s - self._pending.pop(group_id)[0])
            case GroupDropped(group_id=group_id):
                self._pending.pop(group_id, None)
            case RunStarted() | RolledBack():
                self._pending.clear()
            case StepDone() | QueueSeen() | ReplicaSeen():
                return self._oldest(time_s)
            case _:
                pass
        return None

    def _oldest(self, time_s: float) -> SignalReading | None:
        if len(self._took_s) < _LEAST_DONE:
            return None
        if not self._pending:
            return SignalReading(0.0, "", "")
        group_id, (since_s, task_id, where) = next(iter(self._pending.items()))
        age_s = time_s - since_s
        if age_s < _LEAST_STUCK_S or (slowest_s := max(self._took_s)) <= 0:
            return SignalReading(0.0, "", "")
        words = (
            f"group {group_id} of task `{task_id}` has waited {age_s:.0f} s for {where}; the slowest of the last "
            f"{len(self._took_s)} groups took {slowest_s:.3g} s"
        )
        return SignalReading(age_s / slowest_s, "", words)


class Happened:
    """Number of events of some kinds within the last 10 steps. Those before training begins do not count."""

    def __init__(self, *kinds: type[Event]) -> None:
        self.hears = (*kinds, RunStarted, StepDone)
        self._has_begun = False
        self._steps: deque[int] = deque()
        """Step of each event that counts."""
        self._step, self._last = 0, ""

    def observe(self, event: Event, time_s: float) -> SignalReading:
        match event:
            case StepDone(step=step) | RunStarted(first_step=step):
                self._step, self._has_begun = step, True
            case _ if self._has_begun:
                self._steps.append(self._step)
                self._last = _event_text(event)
            case _:
                pass
        while self._steps and self._step - self._steps[0] >= 10:
            self._steps.popleft()
        more = f", after {len(self._steps) - 1} others in 10 steps" if len(self._steps) > 1 else ""
        return SignalReading(len(self._steps), "", f"{self._last}{more}")


def _event_text(event: Event) -> str:
    match event:
        case WorkerFailed(worker=worker, phase=phase, detail=detail):
            return f"{worker} failed while {phase}: {detail.removeprefix(f'{worker} while {phase}: ')}"
        case EndpointFailed(endpoint=endpoint, detail=detail):
            return f"{endpoint} does not answer: {detail}"
        case FileSkipped(path=path, problem=problem) | FileStalled(path=path, problem=problem):
            return f"{path} could not be written: {problem}"
        case _:
            return event.kind
