"""Answers to queries of tables: those of a run's index, and those made from answers of `Readings`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing

from rlsys.dashboard.configs import RunConfig, changed_at, read_config
from rlsys.dashboard.folders import RunFolder
from rlsys.dashboard.http_problems import BadQuery, BadRequest
from rlsys.dashboard.index_followers import IndexFollowers
from rlsys.dashboard.index_schema import INDEXED
from rlsys.dashboard.listed_tables import (
    RunRow,
    alerts_table,
    failures_table,
    pending_table,
    replicas_table,
    runs_table,
)
from rlsys.dashboard.queries import Readings
from rlsys.dashboard.query_language import TableQuery, parse_columns, parse_condition, parse_order
from rlsys.dashboard.query_sql import QueryColumn, QueryPage, QueryTable, answer, unknown
from rlsys.dashboard.responses import TableAnswer, TableColumn, TableDescription, TablesAnswer

LETTERS = 200
"""Most letters of a text on a page."""
RUNS = "runs"


class Tables:
    """Tables of a folder of runs, or of one run. Thread-safe.

    Methods raise `NoSuch` for a run that does not exist, `BadQuery` for a query that cannot be answered, and
    `IndexProblem` if there is no place for an index.
    """

    def __init__(self, readings: Readings, indexes: IndexFollowers) -> None:
        self._readings, self._indexes = readings, indexes
        self._configs: dict[str, tuple[tuple[int, int], RunConfig]] = {}
        """Configuration of each run, with what tells whether it changed."""
        self._listed: Mapping[str, Callable[[sqlite3.Connection, str], QueryTable]] = {
            "alerts": lambda connection, run: alerts_table(connection, self._readings.alerts(run).alerts),
            "pending": lambda connection, run: pending_table(connection, self._readings.ledger(run).pending),
            "replicas": lambda connection, run: replicas_table(connection, self._readings.cluster(run).replicas),
            "worker_failures": lambda connection, run: failures_table(connection, self._readings.cluster(run).restarts),
        }

    def prepare(self, run: str) -> None:
        """Begin to index a run, because its tables will be asked for."""
        self._indexes.want(self._readings.folder(run))

    def answer(self, run: str | None, query: TableQuery, letters: int | None = LETTERS) -> TableAnswer:
        """Answer a query about a run; without `run`, about the table of runs. `letters`: see `query_sql.answer`."""
        if query.table == RUNS:
            return self._of_rows(self._runs, query, letters)
        if query.table not in {**INDEXED, **self._listed}:
            unknown(f"table `{query.table}`", query.table, [RUNS, *INDEXED, *self._listed])
        if run is None:
            raise BadRequest(f"run: `{query.table}` is a table of one run; name the run")
        if query.table in self._listed:
            folder = self._readings.folder(run)
            return self._of_rows(lambda connection: self._listed[query.table](connection, folder.id), query, letters)
        index = self._indexes.current(self._readings.folder(run))
        try:
            return _answer(query, index.answer(query, letters), index.share, index.problem)
        except BadQuery as error:
            if index.share == 1.0:
                raise
            raise BadQuery(f"{error} (the index covers {100 * index.share:.0f} % of the run so far)") from error

    def tables(self, run: str | None) -> TablesAnswer:
        """Every table with its columns."""
        with closing(sqlite3.connect(":memory:")) as connection:
            found = [self._runs(connection)]
            if run is not None:
                folder = self._readings.folder(run)
                found += [make(connection, folder.id) for make in self._listed.values()]
                found += self._indexes.current(folder).tables()
        return TablesAnswer([TableDescription(t.name, t.help, _columns(t.columns), t.shown) for t in found])

    def _of_rows(
        self, make: Callable[[sqlite3.Connection], QueryTable], query: TableQuery, letters: int | None
    ) -> TableAnswer:
        with closing(sqlite3.connect(":memory:")) as connection:
            return _answer(query, answer(connection, make(connection), query, letters), 1.0)

    def _runs(self, connection: sqlite3.Connection) -> QueryTable:
        found = self._readings.runs_with_metrics()
        return runs_table(connection, [RunRow(row, self._config(folder), metrics) for folder, row, metrics in found])

    def _config(self, folder: RunFolder) -> RunConfig:
        at = changed_at(folder)
        kept = self._configs.get(folder.id)
        if kept is None or kept[0] != at:
            kept = self._configs[folder.id] = (at, read_config(folder))
        return kept[1]


def query_of(
    table: str,
    *,
    condition: str = "",
    search: str = "",
    order: str = "",
    show: str = "",
    group: str = "",
    between: tuple[int, int] | None = None,
    limit: int = 50,
    offset: int = 0,
) -> TableQuery:
    """Query of its parts, as a page keeps them in its address. Raises `BadQuery`."""
    return TableQuery(
        table=table,
        condition=parse_condition(condition),
        between=between,
        group_by=parse_columns(group),
        order_by=parse_order(order),
        show=parse_columns(show),
        limit=limit,
        offset=offset,
        search=search,
    )


def _answer(query: TableQuery, page: QueryPage, share: float, problem: str = "") -> TableAnswer:
    return TableAnswer(
        table=query.table,
        columns=_columns(page.columns),
        rows=page.rows,
        num_rows=page.num_rows,
        offset=query.offset,
        indexed=share,
        problem=problem,
    )


def _columns(columns: Mapping[str, QueryColumn]) -> list[TableColumn]:
    return [TableColumn(name, column.kind, column.help) for name, column in columns.items()]
