"""Indexes of the runs of a folder, brought up to date in the background while somebody looks at them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.run_index import IndexProblem, RunIndex

_KEPT_S = 600.0
"""Seconds after the last question in which an index is updated."""
_POLL_S = 2.0
_PART_S = 0.5
"""Seconds of updating one index before the next."""
_MOST_KEPT = 64
"""Most indexes, least recently asked for evicted first."""
_AT_ONCE_S = 0.1
"""Most seconds of updating before an answer."""


class IndexFollowers:
    """Indexes by run. Thread-safe.

    Without `start`, an index is updated only before an answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, tuple[RunIndex, float]] = OrderedDict()
        """Index of a run, and the end of the time in which it is updated; least recently asked for first."""
        self._is_asked = threading.Event()

    def want(self, folder: RunFolder, seconds: float = _KEPT_S) -> RunIndex:
        """Return the index of a run, which is updated in the background for so many seconds from now on."""
        with self._lock:
            index, _ = self._indexes.pop(folder.id, None) or (RunIndex(folder), 0.0)
            self._indexes[folder.id] = index, time.monotonic() + seconds
            while len(self._indexes) > _MOST_KEPT:
                self._indexes.popitem(last=False)
        self._is_asked.set()
        return index

    def current(self, folder: RunFolder) -> RunIndex:
        """Return the index of a run with what it wrote last, unless that takes long."""
        index = self.want(folder)
        try:
            index.update(_AT_ONCE_S)
            index.problem = ""
        except IndexProblem as problem:  # the disk is full, for instance: the index is as it was
            index.problem = str(problem)
        return index

    def start(self) -> None:
        """Update indexes in a thread, until this process ends.

        The thread polls, because file systems of clusters do not notify of writes by another machine.
        """
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            self._is_asked.wait(_POLL_S if self._active_indexes() else None)
            self._is_asked.clear()
            behind = self._active_indexes()
            while behind:  # in turn, so that a long run does not keep the others waiting
                behind = [index for index in behind if not self._is_current(index)]

    def _active_indexes(self) -> list[RunIndex]:
        now_s = time.monotonic()
        with self._lock:
            return [index for index, until_s in self._indexes.values() if until_s > now_s]

    def _is_current(self, index: RunIndex) -> bool:
        try:
            return index.update(_PART_S)
        except Exception:  # noqa: BLE001  (the thread's boundary: one odd run must not stop the others)
            return True  # a full disk, for instance: the next poll tries again
