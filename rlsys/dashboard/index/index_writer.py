"""Writer of the index of a run, from the files of the run."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rlsys.dashboard.index.event_decoding import UnknownKind, Unreadable, decode, decode_metrics
from rlsys.dashboard.index.folders import EVENTS, METRICS, RunFolder, as_text, size_of
from rlsys.dashboard.index.index_events import PUT_LOG, IndexedEvents
from rlsys.dashboard.index.index_rollouts import IndexedEpisode, IndexedGroups, indexed_groups
from rlsys.dashboard.index.machine_use import MachineUse
from rlsys.dashboard.index.run_files import Tail
from rlsys.dashboard.index.spans import PREFIX
from rlsys.dashboard.index.worker_logs import lines_in
from rlsys.monitoring.machine_samples import LOGS
from rlsys.replay.rollout_parquet import step_in
from rlsys.util.regular_files import open_regular

_PART_BYTES = 2**22
"""Bytes of lines in a transaction."""
_PART_S = 0.3
"""Seconds of reading rollout files for a transaction."""
_LEAST_LETTERS, _MOST_GROWTH = 2**26, 20
"""Letters that are indexed of a rollout file anyway, and for each of its bytes. Further groups count as damaged."""
_EPISODE_LETTERS = 1000
"""Letters that an episode counts beside its texts."""
_HEAD_BYTES = 256
"""First bytes of a file of lines, which tell it from another file of its name."""
_LOG, _BEFORE = ".log", ".1"
"""Endings of a log, and of the part before it began anew."""

_GROUPS = """
INSERT OR IGNORE INTO groups (
    group_id, task, step, state, worker, episodes, failed, truncated, reward, reward_min, reward_max, length, oldest
)
SELECT group_id, min(task), step, 'trained', min(replica), count(*), sum(reward IS NULL), sum(outcome = 'truncated'),
    avg(reward), min(reward), max(reward), avg(length), step - 1 - max(staleness)
FROM episodes WHERE file = ? AND dataset = '' GROUP BY group_id
"""
"""Groups of a file that no event told of, because the run is of an older version."""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Transaction that waits for those of other processes; an error undoes it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@dataclass(frozen=True, slots=True)
class _Listed:
    """Rollout file."""

    name: str
    """Its path in the run's folder."""
    path: Path
    dataset: str
    """Of the evaluation that it is from; empty for training."""
    stamp: tuple[int, int]
    """Size, and time of modification in ns."""


class IndexWriter:
    """Writer of what a run has written since it was last read, in short transactions.

    The database notes how far each file is read, so that several processes can write in turn.
    """

    def __init__(self, connection: sqlite3.Connection, folder: RunFolder, machine: MachineUse) -> None:
        """`machine`: samples of the run's workers, which tell when the lines of their logs were written."""
        self._connection, self._folder, self._machine = connection, folder, machine
        self._num_bytes = 0
        """Bytes of events and rollouts."""
        self.num_bytes = 0
        """Bytes of all files that the index is made of."""

    def work(self) -> Iterator[None]:
        """Write everything; yields after each transaction."""
        events = EVENTS if size_of(self._folder.path / EVENTS) else METRICS
        rollouts = list(self._rollout_files())
        self._num_bytes = size_of(self._folder.path / events) + sum(file.stamp[0] for file in rollouts)
        logs = self._log_names()
        self.num_bytes = self._num_bytes + sum(size_of(self._folder.path / name) for name in logs)
        yield from self._lines(events, self._put_events)
        yield from self._rollouts(rollouts)
        for name in logs:
            yield from self._lines(name, self._put_log)

    def share(self) -> float:
        """Share of events and rollouts that is written."""
        ((done,),) = self._connection.execute("SELECT coalesce(sum(size), 0) FROM files")
        return min(1.0, done / self._num_bytes) if self._num_bytes else 0.0

    def _lines(self, name: str, put: Callable[[str, bytes, int], int]) -> Iterator[None]:
        """Write the lines of a file. `put` takes them with their offset, and returns how many it cannot read."""
        path = self._folder.file(name)
        while path is not None:
            with transaction(self._connection):
                begin = self._read_to(name, path)
                data = _lines_from(path, begin)
                if not data:
                    return
                num_corrupt, end = put(name, data, begin), begin + len(data)
                self._connection.execute(
                    "INSERT INTO files VALUES (?, ?, 0, ?, ?) ON CONFLICT (path) DO UPDATE SET size = excluded.size, "
                    "head = excluded.head, num_corrupt = num_corrupt + excluded.num_corrupt",
                    (name, end, _head(path, end), num_corrupt),
                )
            yield

    def _read_to(self, name: str, path: Path) -> int:
        """Offset of the first line that is not written. If the file was replaced, delete its rows: it is 0."""
        row = self._connection.execute("SELECT size, head FROM files WHERE path = ?", (name,)).fetchone()
        if row is None:
            return 0
        if size_of(path) >= row[0] and _head(path, row[0]) == row[1]:
            return row[0]
        if name in (EVENTS, METRICS):
            IndexedEvents(self._connection, name).forget()
        else:
            self._connection.execute("DELETE FROM logs WHERE file = ?", (name,))
        self._connection.execute("DELETE FROM files WHERE path = ?", (name,))
        return 0

    def _put_events(self, name: str, data: bytes, begin: int) -> int:
        events, num_corrupt = IndexedEvents(self._connection, name), 0
        decoded = decode if name == EVENTS else decode_metrics
        for line in data.split(b"\n"):
            if not line or line.startswith(PREFIX):
                continue
            try:
                event, time_s = decoded(line)
            except Unreadable:
                num_corrupt += 1
            except UnknownKind:
                pass
            else:
                events.put(event, time_s)
        return num_corrupt

    def _put_log(self, name: str, data: bytes, begin: int) -> int:
        self._machine.look()
        file = Path(name).name
        worker = file.removesuffix(_BEFORE).removesuffix(_LOG)
        turn = self._machine.log_turn(worker) - file.endswith(_BEFORE)
        written_s = _stamp(self._folder.path / name)[1] / 1e9
        lines = lines_in(data, begin, worker, turn, self._machine, written_s)
        rows = ((name, line.time_s, line.level, worker, "line", line.text) for line in lines)
        self._connection.executemany(PUT_LOG, rows)
        return 0

    def _log_names(self) -> list[str]:
        """Names of log files in the run's folder; a link is none, because it may lead to another file."""
        names = (entry.name for entry in _entries(self._folder.path / LOGS) if not entry.is_symlink())
        return [f"{LOGS}/{name}" for name in names if name.endswith((_LOG, _LOG + _BEFORE))]

    def _rollouts(self, listed: Sequence[_Listed]) -> Iterator[None]:
        """Write files that are new or were replaced, and delete the rows of those that are gone."""
        known = {
            name: (size, mtime_ns)
            for name, size, mtime_ns in self._connection.execute(
                "SELECT path, size, mtime_ns FROM files WHERE mtime_ns"
            )
        }
        if gone := known.keys() - {file.name for file in listed}:
            with transaction(self._connection):
                for name in gone:
                    self._forget(name)
            yield
        changed = [file for file in reversed(listed) if known.get(file.name) != file.stamp]
        while changed:
            begin_s, read = time.monotonic(), list[tuple[_Listed, Iterator[IndexedGroups]]]()
            while changed and time.monotonic() - begin_s < _PART_S:
                file = changed.pop()
                parts = indexed_groups(file.path)
                try:
                    first = next(parts)  # all of a file that is not large
                except OSError:  # deleted just now, or not readable
                    continue
                read.append((file, chain([first], parts)))
            with transaction(self._connection):
                for file, parts in read:
                    self._put_file(file, parts)
            yield

    def _put_file(self, file: _Listed, parts: Iterable[IndexedGroups]) -> None:
        known = self._connection.execute("SELECT size, mtime_ns FROM files WHERE path = ?", (file.name,)).fetchone()
        if known == file.stamp:  # another process has written it since
            return
        self._forget(file.name)
        num_letters = num_corrupt = 0
        for part in parts:
            num_letters += sum(len(e.prompt) + len(e.answer) + _EPISODE_LETTERS for e in part.episodes)
            num_corrupt += part.num_corrupt
            if num_letters > _LEAST_LETTERS + _MOST_GROWTH * file.stamp[0]:
                num_corrupt += 1
                break
            for episode in part.episodes:
                self._put_episode(file, episode)
        self._connection.execute(_GROUPS, (file.name,))
        self._connection.execute("INSERT INTO files VALUES (?, ?, ?, NULL, ?)", (file.name, *file.stamp, num_corrupt))

    def _put_episode(self, file: _Listed, episode: IndexedEpisode) -> None:
        columns = {"file": file.name, "dataset": file.dataset, **episode.columns}
        execute = self._connection.execute
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        row_id = execute(f"INSERT INTO episodes ({names}) VALUES ({marks})", tuple(columns.values())).lastrowid
        execute("INSERT INTO answers VALUES (?, ?)", (row_id, episode.answer))
        execute("INSERT OR IGNORE INTO prompts VALUES (?, ?)", (columns["prompt_id"], episode.prompt))

    def _forget(self, name: str) -> None:
        """Delete the rows of a rollout file."""
        self._connection.execute("DELETE FROM answers WHERE id IN (SELECT id FROM episodes WHERE file = ?)", (name,))
        self._connection.execute("DELETE FROM episodes WHERE file = ?", (name,))
        self._connection.execute("DELETE FROM files WHERE path = ?", (name,))

    def _rollout_files(self) -> Iterator[_Listed]:
        """Rollout files, of training and of evaluations; none that leads out of the served folder."""
        run = self._folder.path
        folders = [("rollouts", "")]
        folders += [(f"evaluations/{e.name}", e.name) for e in _entries(run / "evaluations") if e.is_dir()]
        for place, dataset in folders:
            if not (run / place).resolve().is_relative_to(self._folder.root):
                continue
            by_step = {step: e for e in _entries(run / place) if (step := step_in(e.name)) is not None}
            for entry in by_step.values():
                name = f"{place}/{entry.name}"
                if not entry.is_symlink() or self._folder.file(name):
                    yield _Listed(name, run / name, dataset, _stamp(entry))


def _stamp(file: Path | os.DirEntry[str]) -> tuple[int, int]:
    """Size, and time of modification in ns; 0 if the file was deleted just now."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder by name, so that of two files of a step the newer format is last; empty without a folder.

    Names that are not UTF-8 are left out.
    """
    try:
        with os.scandir(path) as entries:
            return sorted((e for e in entries if as_text(e.name) == e.name), key=lambda entry: entry.name)
    except OSError:
        return []


def _lines_from(path: Path, offset: int) -> bytes:
    """Complete lines from an offset on, of about `_PART_BYTES`."""
    data = bytearray()
    for chunk in Tail(path, offset).read():
        data += chunk.data
        if len(data) > _PART_BYTES:
            break
    return bytes(data)


def _head(path: Path, size: int) -> bytes:
    """First bytes of the first `size` of a file; empty if it was deleted just now."""
    try:
        with open_regular(path) as file:
            return file.read(min(size, _HEAD_BYTES))
    except OSError:
        return b""
