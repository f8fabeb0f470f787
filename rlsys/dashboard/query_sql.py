"""Queries of `rlsys.dashboard.query_language` as parameterised SQL over tables of SQLite.

    page = answer(connection, table, parse_query("episodes where reward < 0.1"))

A name from a query selects a `QueryColumn`, whose SQL is ours; values are bound as parameters. So no text from outside
becomes SQL.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from math import isinf, sqrt
from typing import Any, Literal, NoReturn, TypeAlias

import regex

from rlsys.dashboard.http_problems import BadQuery
from rlsys.dashboard.query_language import (
    ColumnCondition,
    Combination,
    Condition,
    Not,
    Ordering,
    TableQuery,
    Value,
    columns_in,
    needles_of,
)
from rlsys.types import Json

Kind: TypeAlias = Literal["int", "float", "text", "bool", "time"]
_Sql: TypeAlias = tuple[str, tuple[Value, ...]]
"""SQL and its parameters."""

MOST_S = 5.0
"""Most seconds of a query."""
_MOST_TRIGRAMS = 30
"""Most trigrams of a text to look up."""
_BEFORE = 40
"""Letters of a preview before the text that was looked for."""


@dataclass(frozen=True, slots=True)
class QueryColumn:
    """Column of a table."""

    kind: Kind
    """`time`: Unix seconds."""
    help: str
    sql: str
    """Expression over the table's `source`."""
    parameters: tuple[str, ...] = ()
    words: tuple[str, str] | None = None
    """Table of FTS5 with the trigrams of a text, and the expression that equals its row id; None: texts are scanned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTable:
    """Table that queries can name."""

    name: str
    help: str
    source: str
    """SQL of the rows: the text after FROM."""
    key: str
    """Expression that is unique for each row."""
    columns: Mapping[str, QueryColumn]
    shown: Sequence[str]
    """Columns shown by default."""
    identity: Sequence[str] = ()
    """Columns that every row has, because links need them."""
    order_by: tuple[Ordering, ...] = ()
    searched: Sequence[str] = ()
    """Columns in which the search of a page looks."""
    step: str | None = "step"
    """Column that `between` restricts; None if there are no steps."""


@dataclass(frozen=True, slots=True)
class QueryPage:
    """Rows of an answer."""

    columns: Mapping[str, QueryColumn]
    """Columns to show, in order."""
    rows: Sequence[Mapping[str, Json]]
    """Column -> value; also the table's `identity`."""
    num_rows: int
    """Rows without limit and offset."""


def answer(
    connection: sqlite3.Connection, table: QueryTable, query: TableQuery, letters: int | None, seconds: float = MOST_S
) -> QueryPage:
    """Answer a query. Texts longer than `letters` are cut around what was looked for; None: not cut.

    Raises `BadQuery` for an unknown column, for a comparison of different types, for an invalid regular expression and
    after `seconds`.
    """
    compiler = _Compiler(table, query)
    with limited(connection, seconds) as run:
        page = compiler.grouped(run) if query.group_by else compiler.plain(run)
    needles = needles_of(query)
    return QueryPage(page.columns, [_shortened(row, needles, letters) for row in page.rows], page.num_rows)


def unknown(what: str, name: str, known: Sequence[str]) -> NoReturn:
    """Raise `BadQuery` with the nearest known name. `what`: the unknown thing with its name."""
    near = get_close_matches(name, known, 1, 0.5) or [k for k in known if name.lower() in k.lower()][:1]
    hint = f"did you mean `{near[0]}`? " if near else ""
    listed = ", ".join(known[:60]) + (f" and {len(known) - 60} more" if len(known) > 60 else "")
    raise BadQuery(f"unknown {what:.200}: {hint}There are {listed}")


@dataclass(frozen=True, slots=True)
class _Compiler:
    table: QueryTable
    query: TableQuery

    def plain(self, run: Callable[..., list[tuple]]) -> QueryPage:
        """Find the keys of the page first: sorting would otherwise move the texts of all rows."""
        table, query = self.table, self.query
        where, values = self._where()
        source = f"FROM {table.source} WHERE {where}"
        orders, order_values = self._order()
        found = run(
            f"SELECT {table.key}, count(*) OVER () {source} ORDER BY {orders} LIMIT ? OFFSET ?",
            (*values, *order_values, query.limit, query.offset),
        )
        (_, num_rows), *_ = found or [(None, run(f"SELECT count(*) {source}", values)[0][0])]
        names = self._shown()
        asked = {name: self._column(name) for name in dict.fromkeys((*names, *table.identity))}
        parts = ", ".join(column.sql for column in asked.values())
        marks = ", ".join("?" * len(found))
        rows = run(
            f"SELECT {table.key}, {parts} FROM {table.source} WHERE {table.key} IN ({marks})",
            (*(p for c in asked.values() for p in c.parameters), *(key for key, _ in found)),
        )
        by_key = {key: dict(zip(asked, _converted(asked, row), strict=True)) for key, *row in rows}
        return QueryPage({n: asked[n] for n in names}, [by_key[key] for key, _ in found if key in by_key], num_rows)

    def grouped(self, run: Callable[..., list[tuple]]) -> QueryPage:
        """Count the rows of each group, with mean, spread, least and greatest value of the columns to show."""
        table, query = self.table, self.query
        columns = {name: self._column(name) for name in query.group_by}
        columns["num"] = QueryColumn("int", "Rows of the group.", "count(*)")
        for name in query.show or (["reward"] if "reward" in table.columns else []):
            columns |= _statistics(name, self._column(name))
        names = list(columns)
        where, values = self._where()
        keys = ", ".join(str(place + 1) for place in range(len(query.group_by)))
        grouped = (
            f"SELECT {', '.join(c.sql for c in columns.values())} FROM {table.source} WHERE {where} GROUP BY {keys}"
        )
        parameters = (*(p for c in columns.values() for p in c.parameters), *values)
        orders = []
        for ordering in query.order_by or (Ordering("num", is_descending=True),):
            if ordering.column not in columns:
                unknown(f"column `{ordering.column}` of these groups", ordering.column, names)
            orders.append(f"{names.index(ordering.column) + 1} {_direction(ordering)}")
        paged = f"{grouped} ORDER BY {', '.join(orders)}, {keys} LIMIT ? OFFSET ?"
        rows = run(paged, (*parameters, query.limit, query.offset))
        ((num_rows,),) = run(f"SELECT count(*) FROM ({grouped})", parameters)
        return QueryPage(columns, [dict(zip(columns, _converted(columns, row), strict=True)) for row in rows], num_rows)

    def _shown(self) -> Sequence[str]:
        """Columns to show: those that the query asks for, or the table's own and then the others that it names."""
        if self.query.show:
            return list(dict.fromkeys(self.query.show))
        return list(dict.fromkeys((*self.table.shown, *columns_in(self.query))))

    def _order(self) -> _Sql:
        orders = self.query.order_by or self.table.order_by
        columns = [self._column(ordering.column) for ordering in orders]
        parts = [f"{c.sql} {_direction(ordering)}" for c, ordering in zip(columns, orders, strict=True)]
        is_newest_first = bool(orders) and orders[-1].is_descending
        parts.append(f"{self.table.key} {'DESC' if is_newest_first else 'ASC'}")
        return ", ".join(parts), tuple(p for column in columns for p in column.parameters)

    def _where(self) -> _Sql:
        parts: list[_Sql] = []
        if self.query.condition:
            parts.append(self._condition(self.query.condition))
        if self.query.between:
            if self.table.step is None:
                raise BadQuery(f"`{self.table.name}` has no steps for `between`")
            parts.append((f"{self._column(self.table.step).sql} BETWEEN ? AND ?", self.query.between))
        if self.query.search:
            found = [self._contains(self._column(name), self.query.search) for name in self.table.searched]
            parts.append(_joined("OR", found) if found else ("0", ()))
        return _joined("AND", parts) if parts else ("1", ())

    def _condition(self, condition: Condition) -> _Sql:
        match condition:
            case Not(part=part):
                sql, values = self._condition(part)
                return f"NOT coalesce({sql}, 0)", values
            case Combination(operator=operator, parts=parts):
                return _joined(operator.upper(), [self._condition(part) for part in parts])
            case ColumnCondition():
                return self._comparison(condition)

    def _comparison(self, comparison: ColumnCondition) -> _Sql:
        name, column = comparison.column, self._column(comparison.column)
        sql, values = column.sql, column.parameters
        match comparison.operator:
            case "is empty":
                return f"coalesce({sql}, '') = ''", values
            case "is true":
                if column.kind != "bool":
                    raise BadQuery(
                        f"`{name}` is {_KINDS[column.kind]}: compare it, as in `{name} = {_EXAMPLE[column.kind]}`"
                    )
                return sql, values
            case "contains" | "matches":
                (value,) = comparison.values
                if column.kind != "text":
                    raise BadQuery(f"`{name}` is {_KINDS[column.kind]}: {comparison.operator} is for texts")
                if comparison.operator == "contains":
                    return self._contains(column, str(value))
                return f"matches(?, {sql})", (_checked(str(value)), *values)
            case "in":
                given = [_typed(name, column, value) for value in comparison.values]
                return f"{sql} IN ({', '.join('?' * len(given))})", (*values, *given)
            case operator:
                return f"{sql} {operator} ?", (*values, _typed(name, column, comparison.values[0]))

    def _contains(self, column: QueryColumn, text: str) -> _Sql:
        """Select texts that contain this one, in upper or lower case; only those with its trigrams are scanned."""
        escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        scan = f"{column.sql} LIKE ? ESCAPE '\\'"
        values = (*column.parameters, f"%{escaped}%")
        trigrams = sorted({text[at : at + 3] for at in range(len(text) - 2)})[:_MOST_TRIGRAMS]
        if column.words is None or not trigrams:
            return scan, values
        words, key = column.words
        quoted = ('"' + trigram.replace('"', '""') + '"' for trigram in trigrams)
        return f"({key} IN (SELECT rowid FROM {words} WHERE {words} MATCH ?) AND {scan})", (
            " AND ".join(quoted),
            *values,
        )

    def _column(self, name: str) -> QueryColumn:
        return self.table.columns.get(name) or unknown(
            f"column `{name}` of `{self.table.name}`", name, list(self.table.columns)
        )


_KINDS: Mapping[Kind, str] = {
    "int": "a number",
    "float": "a number",
    "text": "a text",
    "bool": "true or false",
    "time": "a time in Unix seconds",
}
_EXAMPLE: Mapping[Kind, str] = {"int": "1", "float": "1", "text": "word", "bool": "true", "time": "1767225600"}


def _typed(name: str, column: QueryColumn, value: Value) -> Value:
    """Value of the column's type. Raises `BadQuery` if it has another."""
    if column.kind == "text":
        return str(value)
    if column.kind == "bool":
        if isinstance(value, bool) or value in (0, 1):
            return int(value)
    elif not isinstance(value, str | bool):
        return value
    raise BadQuery(f"`{name}` is {_KINDS[column.kind]}, and is compared with `{value!s:.50}`")


def _direction(ordering: Ordering) -> str:
    return f"{'DESC' if ordering.is_descending else 'ASC'} NULLS LAST"


def _joined(word: str, parts: Sequence[_Sql]) -> _Sql:
    return f"({f' {word} '.join(sql for sql, _ in parts)})", tuple(value for _, values in parts for value in values)


def _statistics(name: str, column: QueryColumn) -> Mapping[str, QueryColumn]:
    if column.kind == "text":
        raise BadQuery(f"`{name}` is a text, which has no mean: with group by, show numbers")

    def of(suffix: str, function: str, what: str) -> tuple[str, QueryColumn]:
        return f"{name}_{suffix}", QueryColumn(
            "float", f"{what}: {column.help}", f"{function}({column.sql})", column.parameters
        )

    return dict(
        (
            of("mean", "avg", "Mean"),
            of("std", "spread", "Sample standard deviation"),
            of("min", "min", "Least"),
            of("max", "max", "Greatest"),
        )
    )


def _converted(columns: Mapping[str, QueryColumn], row: Sequence[Any]) -> Iterator[Json]:
    for column, value in zip(columns.values(), row, strict=True):
        is_infinite = isinstance(value, float) and isinf(value)
        yield None if is_infinite or value is None else bool(value) if column.kind == "bool" else value


def _shortened(
    row: Mapping[str, Json], needles: Mapping[str, Sequence[str]], letters: int | None
) -> Mapping[str, Json]:
    if letters is None:
        return row
    return {
        name: _preview(value, [*needles.get(name, ()), *needles.get("", ())], letters)
        if isinstance(value, str)
        else value
        for name, value in row.items()
    }


def _preview(text: str, needles: Sequence[str], letters: int) -> str:
    """Part of a text with the first of what was looked for; `…` where it is cut."""
    if len(text) <= letters:
        return text
    folded = text.lower()
    at = next((place for needle in needles if (place := folded.find(needle.lower())) >= 0), 0)
    start = max(0, min(at - _BEFORE, len(text) - letters))
    end = start + letters
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


class _Spread:
    """Sample standard deviation by Welford's method, as an aggregate of SQLite."""

    def __init__(self) -> None:
        self._num, self._mean, self._squares = 0, 0.0, 0.0

    def step(self, value: float | None) -> None:
        if value is not None:
            self._num += 1
            before = value - self._mean
            self._mean += before / self._num
            self._squares += before * (value - self._mean)

    def finalize(self) -> float | None:
        return sqrt(self._squares / (self._num - 1)) if self._num > 1 else None


@lru_cache(maxsize=32)
def _compiled(pattern: str):  # noqa: ANN202  (a pattern of `regex`)
    return regex.compile(pattern, regex.IGNORECASE)


def _checked(pattern: str) -> str:
    try:
        _compiled(pattern)
    except regex.error as error:
        raise BadQuery(f"the regular expression {pattern!r:.100} is invalid: {error}") from error
    return pattern


@contextmanager
def limited(connection: sqlite3.Connection, seconds: float = MOST_S) -> Iterator[Callable[..., list[tuple]]]:
    """Function that runs a statement, within `seconds` for all of the block. Raises `BadQuery` after that."""
    end_s, is_late = time.monotonic() + seconds, False

    def matches(pattern: str, text: str | None) -> bool:
        """Match with a deadline, and without the GIL, so that others are served meanwhile."""
        nonlocal is_late
        left_s = max(0.001, end_s - time.monotonic())
        try:
            return text is not None and _compiled(pattern).search(text, timeout=left_s, concurrent=True) is not None
        except TimeoutError:  # in seconds of the processor, which may be sooner
            is_late = True
            raise

    connection.create_function("matches", 2, matches, deterministic=True)
    connection.create_aggregate("spread", 1, _Spread)  # pyrefly: ignore[bad-argument-type]
    connection.set_progress_handler(lambda: time.monotonic() > end_s, 10_000)
    try:
        yield lambda sql, values=(): connection.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if time.monotonic() < end_s and not is_late:
            raise
        raise BadQuery(f"the query took more than {seconds:.2g} s: narrow it by steps, or by a longer text") from error
    finally:
        connection.set_progress_handler(None, 0)
