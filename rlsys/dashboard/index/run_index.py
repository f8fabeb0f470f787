"""Index of a run, an SQLite database in the user's cache, for queries over all steps.

    index = RunIndex(folder)
    while not index.update(1.0):
        ...
    index.sql("select task from episodes where reward < 0.1")

It holds no more than the files of the run, of which it notes how far they are read. So it is updated while the run goes
on, by any number of processes in turn, and is rebuilt after damage or by another version of rlsys. Only the readers of
a run write it. `rlsys.dashboard.index.index_cache` says where it is.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage

from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.index_cache import index_path, mark_used
from rlsys.dashboard.index.index_schema import INDEXED, STORED, VERSION
from rlsys.dashboard.index.index_writer import IndexWriter, transaction
from rlsys.dashboard.index.machine_use import MachineUse
from rlsys.dashboard.index.sql_query import QueryPage, QueryTable, TableQuery, page_of, run_sql
from rlsys.errors import RlsysError

_LOCKED_S = 5.0
"""Seconds to wait for another process that writes the index."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Errors after which the index is deleted."""
_LEAST_LIMIT, _MOST_GROWTH = 2**28, 20
"""Bytes that an index may have anyway, and bytes for each byte of the files of the run: few, as they are compressed."""
_LEAST_FREE = 2**28
"""Bytes of the disk below which the index does not grow."""


class IndexProblem(RlsysError):
    """The index cannot be read or written. Names the file, and the reason."""


class RunIndex:
    """Index of a run. Thread-safe."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._machine = MachineUse(folder)
        self._lock = threading.Lock()
        self.share = 0.0
        """Share of the run's bytes that the index covers, at the last update."""
        self.problem = ""
        """Reason for which the index lacks what the run wrote last; empty if it does not."""

    @property
    def path(self) -> Path:
        """The database. Raises `OSError`, see `index_path`."""
        return index_path(self._folder.path)

    def update(self, seconds: float) -> bool:
        """Add what the run has written, for about `seconds`. Returns True if nothing is left.

        Waits as long for another thread that updates the index. Raises `IndexProblem`.
        """
        end_s = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            with self._connect() as connection:
                mark_used(self.path)
                self._leave_room()
                writer = IndexWriter(connection, self._folder, self._machine)
                for _ in writer.work():
                    self._check_growth(writer.num_bytes)
                    if time.monotonic() >= end_s:
                        self.share = writer.share()
                        return False
                self.share = 1.0
                return True
        finally:
            self._lock.release()

    def page(self, query: TableQuery, letters: int | None) -> QueryPage:
        """Answer a page as of the last update; see `rlsys.dashboard.index.sql_query.page_of`. Raises `IndexProblem`."""
        with self._connect() as connection:
            table = INDEXED[query.table](connection, query.between)
        return page_of(self.path, table, query, letters)

    def sql(self, text: str, between: tuple[int, int] | None = None, letters: int | None = None) -> QueryPage:
        """Answer a query in SQL as of the last update; see `sql_query.run_sql`. `between` are the steps of the view
        `tasks`. Raises `IndexProblem`."""
        words = set(re.findall(r"\w+", text))
        tables = self.tables(between)
        return run_sql(self.path, [table for table in tables if table.name in words] or tables, text, letters)

    def tables(self, between: tuple[int, int] | None = None) -> list[QueryTable]:
        """Every table with its columns, as of the last update. Raises `IndexProblem`."""
        with self._connect() as connection:
            return [make(connection, between) for make in INDEXED.values()]

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open the database, with its tables. A damaged one is deleted, so that the next update builds it again."""
        try:
            with closing(_open_database(self.path)) as connection:
                yield connection
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)  # errors of Python's module have none
            if code & 0xFF not in _DAMAGED:
                raise IndexProblem(f"the index {self.path} cannot be used now: {error}") from error
            self._delete()
            raise IndexProblem(f"the index {self.path} was damaged, and is being rebuilt: ask again") from error
        except OSError as error:
            reason = f"there is no place for an index: {error}"
            raise IndexProblem(f"{reason}; or set XDG_CACHE_HOME to a folder of yours") from error

    def _leave_room(self) -> None:
        """Raise `IndexProblem` if the disk is nearly full: what is left is for the run."""
        if (free := disk_usage(self.path.parent).free) < _LEAST_FREE:
            raise IndexProblem(f"the index {self.path} is not updated: the disk has only {free / 2**20:.0f} MiB left")

    def _check_growth(self, num_bytes: int) -> None:
        """Raise `IndexProblem` if the index is far larger than `num_bytes`, those of the files of the run."""
        if (size := self.path.stat().st_size) > _LEAST_LIMIT + _MOST_GROWTH * num_bytes:
            raise IndexProblem(
                f"the index {self.path} is not complete: it has {size / 2**20:.0f} MiB, and the files of the run "
                f"{num_bytes / 2**20:.0f} MiB, which cannot be those of a run"
            )

    def _delete(self) -> None:
        self.share = 0.0
        for end in ("", "-journal"):
            with suppress(OSError):
                Path(f"{self.path}{end}").unlink()


def _open_database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_LOCKED_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cache_size = -65536")
        connection.execute("PRAGMA synchronous = NORMAL")
        if _version(connection) != VERSION:
            _create(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    ((version,),) = connection.execute("PRAGMA user_version")
    return version


def _create(connection: sqlite3.Connection) -> None:
    """Make the tables, in place of those of another version."""
    with transaction(connection):
        if _version(connection) == VERSION:
            return
        for name, kind in connection.execute("SELECT name, type FROM sqlite_master WHERE type = 'table'").fetchall():
            if not name.startswith("sqlite_"):
                connection.execute(f'DROP {kind} IF EXISTS "{name}"')
        for statement in filter(str.strip, STORED.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
