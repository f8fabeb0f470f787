"""Rollout files, one per step, of training or of an evaluation. Only the requested group is decoded."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.folders import RunFolder, as_text
from rlsys.errors import DataError
from rlsys.replay.rollout_json import RolloutRecord
from rlsys.replay.rollout_parquet import RolloutFile, step_in

_TICK_NS = 2_000_000_000
_MOST_EPISODES = 20_000
"""Most episodes of a step that are decoded for a list: each takes half a millisecond."""
_KEPT = 4
"""Most decoded groups in memory, since users read several episodes of a group in a row."""


class RolloutFiles:
    """Written rollouts of a run: of its training, or of one of its evaluations."""

    def __init__(self, folder: RunFolder, *parts: str) -> None:
        """`parts`: the folder of the files in that of the run, such as `rollouts`."""
        self._folder, self._parts = folder, parts
        self._listed_ns = -1
        self._names: dict[int, str] = {}
        self._records: OrderedDict[tuple[int, int, int], RolloutRecord] = OrderedDict()
        """Records by step, group id, and modification time of the file."""
        self._corrupt: set[tuple[int, int]] = set()
        """Unreadable groups, by step and place in its file."""

    @property
    def num_corrupt(self) -> int:
        """Unreadable groups among those requested so far."""
        return len(self._corrupt)

    def steps(self) -> list[int]:
        """Steps with written rollouts, ascending."""
        path = self._folder.path.joinpath(*self._parts)
        try:
            changed_ns = path.stat().st_mtime_ns
            if changed_ns != self._listed_ns:
                self._names = {} if self._leads_out else dict(sorted(self._scan_steps(path)))
                # Files added within the same tick of the file system's clock leave the time unchanged: look again.
                is_settled = time.time_ns() - changed_ns > _TICK_NS
                self._listed_ns = changed_ns if is_settled else -1
        except OSError:
            self._names = {}
        return list(self._names)

    @property
    def _leads_out(self) -> bool:
        """True if the folder of rollouts is a link to a folder outside the served one."""
        return not Path(os.path.realpath(self._folder.path.joinpath(*self._parts))).is_relative_to(self._folder.root)

    def _scan_steps(self, path: Path) -> Iterator[tuple[int, str]]:
        with os.scandir(path) as entries:
            for entry in entries:
                step = step_in(entry.name)
                if step is not None and (not entry.is_symlink() or self._folder.file(*self._parts, entry.name)):
                    yield step, entry.name

    def group_ids(self, step: int) -> list[int]:
        """Group ids in the file of a step, in order. Raises `NoSuch`."""
        return [group_id for group_id in self._open_table(step).group_ids if group_id is not None]

    def record(self, step: int, group_id: int) -> RolloutRecord:
        """Decode one group. Raises `NoSuch` if it does not exist, or cannot be read."""
        key = (step, group_id, self._written_ns(step))
        if key not in self._records:
            self._records[key] = self._read_record(step, group_id)
            while len(self._records) > _KEPT:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return self._records[key]

    def records(self, step: int) -> Iterator[RolloutRecord]:
        """Every readable group of a step, of the first `_MOST_EPISODES` episodes. Raises `NoSuch` if the step was not
        written."""
        file, num_episodes = self._open_table(step), 0
        for place in range(len(file.group_ids)):
            num_episodes += file.num_episodes(place)
            if num_episodes > _MOST_EPISODES:
                return
            try:
                yield file.record(place)
            except DataError:  # cut off or damaged: skip it
                self._corrupt.add((step, place))

    def _read_record(self, step: int, group_id: int) -> RolloutRecord:
        file = self._open_table(step)
        if group_id not in file.group_ids:
            raise NoSuch(f"step {step} has no group {group_id}; `/api/groups` lists those that it has")
        place = file.group_ids.index(group_id)
        try:
            return file.record(place)
        except DataError as error:
            self._corrupt.add((step, place))
            raise NoSuch(f"group {group_id} of step {step} cannot be read: {error}") from error

    def _open_table(self, step: int) -> RolloutFile:
        try:
            return RolloutFile(self._path(step))
        except OSError:  # deleted just now, or not readable
            self._missing(step)
        except DataError as error:
            self._corrupt.add((step, 0))
            raise NoSuch(f"the rollouts of step {step} cannot be read: {error}") from error

    def _written_ns(self, step: int) -> int:
        try:
            return self._path(step).stat().st_mtime_ns
        except OSError:
            self._missing(step)

    def _path(self, step: int) -> Path:
        if step not in self._names:
            self.steps()
        name = self._names.get(step) or self._missing(step)
        return self._folder.file(*self._parts, name) or self._missing(step)

    def _missing(self, step: int) -> NoReturn:
        if self._leads_out:
            root = as_text(self._folder.root)
            raise NoSuch(
                f"`{'/'.join(self._parts)}` leads out of {root}, the folder that is served: serve one that holds both"
            )
        steps = self.steps()
        written = f"those of {len(steps)} steps from {steps[0]} to {steps[-1]} were" if steps else "none were"
        raise NoSuch(f"the rollouts of step {step} cannot be read, {written} written; see record.rollouts_every")
