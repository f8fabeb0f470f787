"""Swim-lanes: activity of every worker in a time window."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rlsys.dashboard.index.spans import Stretch, Tracks, merge_stretches
from rlsys.dashboard.responses import Lane, LaneSpan

_ORDER = ("actor", "critic", "rollout", "reward", "reference", "eval", "relay")


def lanes(tracks: Tracks, workers: Iterable[str], from_s: float, to_s: float, width: int) -> list[Lane]:
    """Lane of each active worker, and of each of `workers`, which may have been idle."""
    by_worker: dict[str, dict[str, list[Stretch]]] = {worker: {} for worker in workers}
    for (worker, activity), stretches in tracks.items():
        clipped = (_clip_stretch(stretch, from_s, to_s) for stretch in stretches)
        by_worker.setdefault(worker, {})[activity] = list(merge_stretches(clipped, (to_s - from_s) / width))
    return [_lane(worker, by_worker[worker], to_s - from_s) for worker in sorted(by_worker, key=_place)]


def kind_of(worker: str) -> str:
    """Kind of a worker: `rollout` for `rollout-2.1`."""
    return re.split(r"[^a-z_]", worker, maxsplit=1)[0]


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that orders `rollout-10` after `rollout-9`."""
    parts = re.split(r"([0-9]+)", name)  # a number may have more digits than Python converts
    return [(len(d := part.lstrip("0")), d) if part.isdecimal() else (0, part) for part in parts]


def _place(worker: str) -> tuple[int, list[tuple[int, str]]]:
    kind = kind_of(worker)
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER)), natural(worker)


def _clip_stretch(stretch: Stretch, from_s: float, to_s: float) -> Stretch:
    """Cut a stretch to the window; its idle time is assumed to be evenly distributed."""
    start_s, end_s, busy_s = stretch
    if from_s <= start_s and end_s <= to_s:
        return stretch
    first_s, last_s = max(start_s, from_s), min(end_s, to_s)
    return first_s, last_s, busy_s * (last_s - first_s) / (end_s - start_s) if end_s > start_s else 0.0


def _lane(worker: str, did: Mapping[str, Sequence[Stretch]], window_s: float) -> Lane:
    by_activity = {
        activity: min(1.0, sum(busy_s for _, _, busy_s in stretches) / window_s) for activity, stretches in did.items()
    }
    spans = [
        LaneSpan(activity, start_s, end_s) for activity, stretches in did.items() for start_s, end_s, _ in stretches
    ]
    spans.sort(key=lambda span: span.start_s)
    # Activities may overlap, so their sum is too large. A merged span may be partly idle, so its length is too.
    covered = merge_stretches(((span.start_s, span.end_s, span.end_s - span.start_s) for span in spans), 0.0)
    busy = min(1.0, sum(by_activity.values()), sum(busy_s for _, _, busy_s in covered) / window_s)
    return Lane(
        worker=worker,
        kind=kind_of(worker),
        spans=spans,
        busy_share=busy,
        by_activity={**by_activity, "idle": 1.0 - busy},
    )
