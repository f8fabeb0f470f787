"""Run that the dashboard keeps open."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.folders import EVALUATIONS, EVENTS, METRICS, RunFolder
from rlsys.dashboard.index.machine_use import MachineUse
from rlsys.dashboard.query.configs import RunConfig, modification_stamp, read_config
from rlsys.dashboard.query.history import EventHistory
from rlsys.dashboard.query.rollout_files import RolloutFiles
from rlsys.dashboard.query.rollout_listing import Lists
from rlsys.replay.rollout_json import RolloutRecord

_AT_ONCE = 16
"""Most blocks of spans to summarise during a request; if there are more, a thread summarises them."""


class OpenedRun:
    """Current state of a run, used as a context manager by one thread at a time.

    with opened:
        opened.history.step
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.config = RunConfig()
        self.rollouts = RolloutFiles(folder, "rollouts")
        self.machine = MachineUse(folder)
        self._samples: dict[str, RolloutFiles] = {}
        """Samples of evaluations, by data set."""
        self._config_at = (-1, -1)
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

    def datasets(self) -> list[str]:
        """Data sets with evaluations on disk, by name."""
        return self.folder.folders(EVALUATIONS)

    def rollouts_of(self, dataset: str) -> RolloutFiles:
        """Samples of the evaluations on a data set; empty: rollouts of training. Raises `NoSuch`."""
        if not dataset:
            return self.rollouts
        if dataset not in self._samples:
            if dataset not in self.datasets():
                raise NoSuch(f"no evaluation on {dataset!r:.200} is on disk; `/api/evaluations` lists those that are")
            self._samples[dataset] = RolloutFiles(self.folder, EVALUATIONS, dataset)
        return self._samples[dataset]

    def is_replayable(self, record: RolloutRecord) -> bool:
        """True if all that `rlsys replay` needs to train the step of `record` again was written.

        That is every group of every step since the newest checkpoint before it, or since the beginning.
        """
        step, folder = record.step, self.folder.path / "checkpoints"
        saved = [path.parent.name.removeprefix("step_") for path in folder.glob("step_*/manifest.json")]
        start = max((int(name) for name in saved if name.isdecimal() and int(name) < step), default=0)
        return sum(start < written <= step for written in self.rollouts.steps()) == step - start

    def _look(self) -> None:
        """Process new data. If alert thresholds changed or files were replaced, read everything again."""
        files = self.folder.file(EVENTS), self.folder.file(METRICS)
        if self._read_config() or files != self._files or self.history.was_replaced:
            self._files = files
            self.history = EventHistory(*files, self.config.thresholds)
            self.lists = Lists(self.history.groups, self.rollouts)
        self.history.look()
        self._summarise()

    def _read_config(self) -> bool:
        """Read the configuration if it changed. Returns True if the thresholds changed."""
        at = modification_stamp(self.folder)
        if at == self._config_at:
            return False
        before, self._config_at = self.config.thresholds, at
        self.config = read_config(self.folder)
        return self.config.thresholds != before

    def _summarise(self) -> None:
        """Summarise spans of workers: a few at once here, many in a background thread."""
        spans = self.history.spans
        blocks = spans.blocks_to_summarise()
        if len(blocks) <= _AT_ONCE:
            spans.summarise(blocks)
        elif not (self._summarising and self._summarising.is_alive()):
            self._summarising = threading.Thread(target=spans.summarise, args=[blocks[1:]], daemon=True)
            self._summarising.start()
