"""Answers to queries of tables: those of a run's index, and those made from answers of `Readings`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlsys.dashboard.http_problems import BadQuery, BadRequest
from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.index_followers import IndexFollowers
from rlsys.dashboard.index.index_schema import INDEXED
from rlsys.dashboard.index.run_index import RunIndex
from rlsys.dashboard.index.sql_query import QueryColumn, QueryPage, QueryTable, TableQuery, page_of, run_sql, unknown
from rlsys.dashboard.query.configs import RunConfig, modification_stamp, read_config
from rlsys.dashboard.query.listed_tables import (
    RunRow,
    alerts_table,
    failures_table,
    pending_table,
    replicas_table,
    runs_table,
)
from rlsys.dashboard.query.queries import Readings
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
        self._listed: Mapping[str, Callable[[str], QueryTable]] = {
            "alerts": lambda run: alerts_table(self._readings.alerts(run).alerts),
            "pending": lambda run: pending_table(self._readings.ledger(run).pending),
            "replicas": lambda run: replicas_table(self._readings.cluster(run).replicas),
            "worker_failures": lambda run: failures_table(self._readings.cluster(run).restarts),
        }

    def prepare(self, run: str) -> None:
        """Begin to index a run, because its tables will be asked for."""
        self._indexes.want(self._readings.folder(run))

    def page(self, run: str | None, query: TableQuery, letters: int | None = LETTERS) -> TableAnswer:
        """Answer a page about a run; without `run`, about the table of runs. `letters`: see `page_of`."""
        if query.table == RUNS:
            return _answer(query.table, page_of(None, self._runs(), query, letters), 1.0, offset=query.offset)
        if query.table not in {**INDEXED, **self._listed}:
            unknown(f"table `{query.table}`", query.table, [RUNS, *INDEXED, *self._listed])
        if run is None:
            raise BadRequest(f"run: `{query.table}` is a table of one run; name the run")
        folder = self._readings.folder(run)
        if query.table in self._listed:
            table = self._listed[query.table](folder.id)
            return _answer(query.table, page_of(None, table, query, letters), 1.0, offset=query.offset)
        index = self._indexes.current(folder)
        with _with_coverage(index):
            found = index.page(query, letters)
        return _answer(query.table, found, index.share, index.problem, offset=query.offset)

    def sql(
        self,
        run: str | None,
        text: str,
        between: tuple[int, int] | None = None,
        letters: int | None = LETTERS,
    ) -> TableAnswer:
        """Answer a query in SQL about a run; without `run`, about the table of runs. A query reads the views of the
        index, or some of the short lists. `between` are the steps of `tasks`."""
        words = set(re.findall(r"\w+", text))
        if RUNS in words:
            return _answer(RUNS, run_sql(None, [self._runs()], text, letters), 1.0)
        if run is None:
            raise BadRequest("run: without a run only the table `runs` can be asked; name the run")
        folder = self._readings.folder(run)
        if listed := [make(folder.id) for name, make in self._listed.items() if name in words]:
            return _answer("", run_sql(None, listed, text, letters), 1.0)
        index = self._indexes.current(folder)
        with _with_coverage(index):
            found = index.sql(text, between, letters)
        return _answer("", found, index.share, index.problem)

    def tables(self, run: str | None) -> TablesAnswer:
        """Every table with its columns."""
        found = [self._runs()]
        if run is not None:
            folder = self._readings.folder(run)
            found += [make(folder.id) for make in self._listed.values()]
            found += self._indexes.current(folder).tables()
        return TablesAnswer([TableDescription(t.name, t.help, _columns(t.columns), t.shown) for t in found])

    def _runs(self) -> QueryTable:
        found = self._readings.runs_with_metrics()
        return runs_table([RunRow(row, self._config(folder), metrics) for folder, row, metrics in found])

    def _config(self, folder: RunFolder) -> RunConfig:
        at = modification_stamp(folder)
        kept = self._configs.get(folder.id)
        if kept is None or kept[0] != at:
            kept = self._configs[folder.id] = (at, read_config(folder))
        return kept[1]


@contextmanager
def _with_coverage(index: RunIndex) -> Iterator[None]:
    """Say in a refusal how much of the run is indexed: a metric may be a column later."""
    try:
        yield
    except BadQuery as error:
        if index.share == 1.0:
            raise
        raise BadQuery(f"{error} (the index covers {100 * index.share:.0f} % of the run so far)") from error


def _answer(table: str, page: QueryPage, share: float, problem: str = "", *, offset: int = 0) -> TableAnswer:
    return TableAnswer(
        table=table,
        columns=_columns(page.columns),
        rows=page.rows,
        num_rows=page.num_rows,
        offset=offset,
        indexed=share,
        problem=problem,
    )


def _columns(columns: Mapping[str, QueryColumn]) -> list[TableColumn]:
    return [TableColumn(name, column.kind, column.help) for name, column in columns.items()]
