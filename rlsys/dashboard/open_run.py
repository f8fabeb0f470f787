"""One run that somebody looks at."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from rlsys.dashboard.configs import RunConfig, changed_at, read_config
from rlsys.dashboard.folders import EVENTS, METRICS, RunFolder
from rlsys.dashboard.history import EventHistory
from rlsys.dashboard.rollout_files import RolloutFiles
from rlsys.dashboard.rollout_listing import Lists

_AT_ONCE = 16
"""Blocks of spans that are summarised while somebody waits; of a long run, a thread does the others."""


class OpenedRun:
    """What is known of a run as of now, for who has entered it: one thread at a time.

    with opened:
        opened.history.step
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.config = RunConfig()
        self.rollouts = RolloutFiles(folder)
        self._config_at = (-1, -1)
        """See `changed_at`."""
        self._lock = threading.Lock()
        self._summarising: threading.Thread | None = None
        self._files: tuple[Path | None, Path | None] = (None, None)
        self.history = EventHistory(None, None, {})
        self.lists = Lists(self.history.groups, self.rollouts)

    def __enter__(self) -> OpenedRun:
        self._lock.acquire()
        try:
            self._look()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    def _look(self) -> None:
        """Take in what was written since. New thresholds of alerts, or other files: everything is told anew."""
        files = self.folder.file(EVENTS), self.folder.file(METRICS)
        if self._read_config() or files != self._files or self.history.was_replaced:
            self._files = files
            self.history = EventHistory(*files, self.config.thresholds)
            self.lists = Lists(self.history.groups, self.rollouts)
        self.history.look()
        self._summarise()

    def _read_config(self) -> bool:
        """Read the configuration if it changed; are thresholds others now?"""
        at = changed_at(self.folder)
        if at == self._config_at:
            return False
        before, self._config_at = self.config.thresholds, at
        self.config = read_config(self.folder)
        return self.config.thresholds != before

    def _summarise(self) -> None:
        """Have what is told of workers summed up: a little of it here, much of it in a thread that nobody waits for."""
        spans = self.history.spans
        blocks = spans.unsummarised()
        if len(blocks) <= _AT_ONCE:
            spans.summarise(blocks)
        elif not (self._summarising and self._summarising.is_alive()):
            self._summarising = threading.Thread(target=spans.summarise, args=[blocks[1:]], daemon=True)
            self._summarising.start()
