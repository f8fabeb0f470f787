"""Queries in SQL over documented views, answered in a process that can be killed.

    select task, reward from episodes where reward < 0.1 order by length

A query reads views, each of which is a `QueryTable`; `x REGEXP 'pattern'` and `stddev(x)` are there too. Pages ask by
parts, a `TableQuery`, whose `filter` is what stands behind `where`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import orjson

from rlsys.dashboard.http_problems import BadQuery
from rlsys.dashboard.index import query_child
from rlsys.types import Json

Kind: TypeAlias = Literal["int", "float", "text", "bool", "time"]
Sql: TypeAlias = tuple[str, Sequence[Any] | Mapping[str, Any]]
"""A statement, or a part of one, and its parameters."""
MOST_ROWS = 10_000
"""Most rows of one answer."""
MOST_LETTERS = 10_000
"""Most letters of a query."""
MOST_S = 5.0
"""Most seconds of a query."""
MEMORY_MB = 2048
"""Most memory of the process that answers."""
MOST_COLUMNS = 1900
"""Most columns of a view."""
KEY = "#key"
"""Column of a view that is unique for each row."""
_LONGEST_NAME = 200
"""Letters of the longest name that is compared with others."""
_BEFORE = 40
"""Letters of a preview before the text that was looked for."""
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"((?:[^\"]|\"\")*)\"")
_AS = re.compile(r"\bas\s*$", re.IGNORECASE)
_PART = re.compile(r"'%((?:[^'%]|'')+)%'")


@dataclass(frozen=True, slots=True)
class QueryColumn:
    """Column of a view."""

    kind: Kind
    """`time`: Unix seconds."""
    help: str
    sql: str
    """Expression over the table's `source`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTable:
    """View that queries can name."""

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
    """Columns that every row of a page has, because links need them."""
    order_by: str = ""
    """Order of a page, as in `TableQuery`."""
    searched: Sequence[str] = ()
    """Columns in which the search of a page looks."""
    step: str | None = "step"
    """Column that the steps of a page restrict; None if there are no steps."""
    setup: Sequence[Sql] = ()
    """Statements that make `source`."""
    rows: Mapping[str, Sequence[Sequence[Json]]] = field(default_factory=dict)
    """Rows of the tables that `setup` makes."""

    def view_for(self, text: str) -> Sql:
        """The statement that makes the view, with all columns that a query names: SQLite has no more than
        `MOST_COLUMNS`. A name with a null character is none that can be asked for."""
        possible = [name for name in self.columns if "\0" not in name]
        kept = {*sorted(possible, key=lambda name: quote_name(name) not in text and name not in text)[:MOST_COLUMNS]}
        columns = {KEY: self.key, **{name: self.columns[name].sql for name in possible if name in kept}}
        parts = ", ".join(f"{sql} AS {quote_name(name)}" for name, sql in columns.items())
        return f"CREATE TEMP VIEW {self.name} AS SELECT {parts} FROM {self.source}", ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableQuery:
    """What a page asks of one view."""

    table: str
    filter: str = ""
    """SQL condition; empty: all rows."""
    between: tuple[int, int] | None = None
    """First and last step."""
    group_by: str = ""
    """Columns, separated by commas."""
    order_by: str = ""
    """Columns, each with ` desc` if the largest is first."""
    show: str = ""
    """Columns; empty: those that the table shows by default."""
    limit: int = 50
    offset: int = 0
    search: str = ""
    """Text that a column of text contains."""


@dataclass(frozen=True, slots=True)
class QueryPage:
    """Rows of an answer."""

    columns: Mapping[str, QueryColumn]
    """Columns to show, in order."""
    rows: Sequence[Mapping[str, Json]]
    """Column -> value; of a page also the table's `identity`."""
    num_rows: int
    """Rows without limit and offset; of a query in SQL, those of the answer."""
    is_cut: bool = False
    """True if a query in SQL has more rows than `MOST_ROWS`."""


def run_sql(
    database: Path | None,
    tables: Sequence[QueryTable],
    sql: str,
    letters: int | None = None,
    seconds: float = MOST_S,
) -> QueryPage:
    """Answer a query of a user, who may read these views. `letters`: see `page_of`. Raises `BadQuery`, after
    `seconds` too."""
    check_quoted(sql, tables)
    (result,) = _run_child(database, tables, [(sql, ())], sql, seconds)
    known = {name: column for table in tables for name, column in table.columns.items()}
    columns = {name: known.get(name) or _guess_column(at, result["rows"]) for at, name in enumerate(result["columns"])}
    rows = [_shorten_row(_row(columns, row), _needles(sql), letters) for row in result["rows"]]
    columns.pop(KEY, None)
    return QueryPage(columns, rows, len(rows), is_cut=result["is_cut"])


def page_of(database: Path | None, table: QueryTable, query: TableQuery, letters: int | None) -> QueryPage:
    """Answer a page. Texts longer than `letters` are cut around what was looked for; None: not cut. Raises
    `BadQuery`."""
    check_quoted(query.filter, [table])
    where, values = _where(table, query)
    if query.group_by:
        columns, rows, count = _group_rows(table, query, where, values)
    else:
        columns, rows, count = _plain(table, query, where, values)
    found, counted = _run_child(database, [table], [rows, count], query.filter, MOST_S)
    needles = [query.search, *_needles(query.filter)]
    shown = [_shorten_row(_row(columns, row), needles, letters) for row in found["rows"]]
    hidden = set(table.identity) - set(_names(query.show) or [*table.shown])
    names = {name: column for name, column in columns.items() if query.group_by or name not in hidden}
    return QueryPage(names, shown, counted["rows"][0][0])


def unknown(what: str, name: str, known: Sequence[str]) -> NoReturn:
    """Raise `BadQuery` with the nearest known name. `what`: the unknown thing with its name."""
    known, name = [k for k in known if len(k) <= _LONGEST_NAME], name[:_LONGEST_NAME]
    near = get_close_matches(name, known, 1, 0.5) or [k for k in known if name.lower() in k.lower()][:1]
    hint = f"did you mean `{near[0]}`? " if near else ""
    listed = ", ".join(known[:60]) + (f" and {len(known) - 60} more" if len(known) > 60 else "")
    raise BadQuery(f"unknown {what:.200}: {hint}There are {listed}")


def quote_name(name: str) -> str:
    """A name in SQL."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def literal(text: str) -> str:
    """A text in SQL."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


def check_quoted(sql: str, tables: Iterable[QueryTable]) -> None:
    """Raise `BadQuery` for a name in double quotes that is no column: SQLite takes such a name for a text."""
    if len(sql) > MOST_LETTERS:
        raise BadQuery(f"the query has {len(sql)} characters, and at most {MOST_LETTERS} are read")
    known = {name for table in tables for name in (table.name, *table.columns)}
    quoted = [match for match in _QUOTED.finditer(sql) if match[1] is not None]
    counts = Counter(match[1] for match in quoted)
    for match in quoted:
        name = match[1].replace('""', '"')
        is_alias = _AS.search(sql[max(0, match.start() - _BEFORE) : match.start()])
        if name not in known and not is_alias and counts[match[1]] < 2:
            unknown(f"column `{name}` (a text stands in single quotes)", name, sorted(known))


def _plain(table: QueryTable, query: TableQuery, where: str, values: Sequence[Any]) -> tuple[Any, Sql, Sql]:
    """Find the keys of the page first: sorting would otherwise move the texts of all rows."""
    names = list(dict.fromkeys((*(_names(query.show) or table.shown), *table.identity)))
    columns = {name: _column(table, name) for name in names}
    order = _order(query.order_by or table.order_by, table.columns, f"of `{table.name}`")
    order += (
        f", {quote_name(KEY)} {'DESC' if order.endswith('DESC NULLS LAST') else 'ASC'}" if order else quote_name(KEY)
    )
    keys = f"SELECT {quote_name(KEY)} FROM {table.name} WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
    parts = ", ".join(map(quote_name, names))
    rows = f"SELECT {parts} FROM {table.name} WHERE {quote_name(KEY)} IN ({keys}) ORDER BY {order}"
    return columns, (rows, (*values, query.limit, query.offset)), _count(table.name, where, values)


def _group_rows(table: QueryTable, query: TableQuery, where: str, values: Sequence[Any]) -> tuple[Any, Sql, Sql]:
    """Count the rows of each group, with mean, spread, least and greatest value of the columns to show."""
    groups = {name: _column(table, name) for name in _names(query.group_by)}
    parts = {name: (column, quote_name(name)) for name, column in groups.items()}
    parts["num"] = (QueryColumn("int", "Rows of the group.", ""), "count(*)")
    for name in _names(query.show) or (["reward"] if "reward" in table.columns else []):
        column = _column(table, name)
        if column.kind == "text":
            raise BadQuery(f"`{name}` is a text, which has no mean: with groups, show numbers")
        for suffix, function, what in (
            ("mean", "avg", "Mean"), ("std", "stddev", "Sample standard deviation"),
            ("min", "min", "Least"), ("max", "max", "Greatest"),
        ):  # fmt: skip
            spec = QueryColumn("float", f"{what}: {column.help}", "")
            parts[f"{name}_{suffix}"] = (spec, f"{function}({quote_name(name)})")
    columns = {name: column for name, (column, _) in parts.items()}
    selected = ", ".join(f"{sql} AS {quote_name(name)}" for name, (_, sql) in parts.items())
    keys = ", ".join(map(quote_name, groups))
    grouped = f"SELECT {selected} FROM {table.name} WHERE {where} GROUP BY {keys}"
    order = _order(query.order_by or "num desc", columns, "of these groups")
    rows = f"{grouped} ORDER BY {order}, {keys} LIMIT ? OFFSET ?"
    return columns, (rows, (*values, query.limit, query.offset)), (f"SELECT count(*) FROM ({grouped})", values)


def _count(name: str, where: str, values: Sequence[Any]) -> Sql:
    return f"SELECT count(*) FROM {name} WHERE {where}", values


def _where(table: QueryTable, query: TableQuery) -> tuple[str, list[Any]]:
    parts, values = [f"({query.filter}\n)"] if query.filter.strip() else [], list[Any]()
    if query.between:
        if table.step is None:
            raise BadQuery(f"`{table.name}` has no steps")
        parts.append(f"{quote_name(table.step)} BETWEEN ? AND ?")
        values += query.between
    if query.search:
        escaped = query.search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        found = [f"{quote_name(name)} LIKE ? ESCAPE '\\'" for name in table.searched]
        parts.append(f"({' OR '.join(found)})" if found else "0")
        values += [f"%{escaped}%"] * len(found)
    return " AND ".join(parts) or "1", values


def _order(text: str, columns: Mapping[str, QueryColumn], where: str) -> str:
    parts = []
    for one in _names(text):
        name, _, direction = one.rpartition(" ")
        is_descending = direction.lower() == "desc"
        name = name.strip() if direction.lower() in ("asc", "desc") and name else one
        if name not in columns:
            unknown(f"column `{name}` {where}", name, list(columns))
        parts.append(f"{quote_name(name)} {'DESC' if is_descending else 'ASC'} NULLS LAST")
    return ", ".join(parts)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _column(table: QueryTable, name: str) -> QueryColumn:
    return table.columns.get(name) or unknown(f"column `{name}` of `{table.name}`", name, list(table.columns))


def _run_child(
    database: Path | None, tables: Sequence[QueryTable], queries: Sequence[Sql], text: str, seconds: float
) -> list[Any]:
    """Let a process answer. `text` is the query as the user wrote it. Raises `BadQuery`."""
    named = " ".join(sql for sql, _ in queries)
    setup = [
        *(statement for table in tables for statement in table.setup),
        *(table.view_for(named) for table in tables),
    ]
    rows = {name: rows for table in tables for name, rows in table.rows.items()}
    request = {
        "database": str(database) if database else None, "setup": setup, "rows": rows, "queries": queries,
        "most_rows": MOST_ROWS, "memory_mb": MEMORY_MB,
    }  # fmt: skip
    command = [sys.executable, "-I", "-S", query_child.__file__]
    try:
        done = subprocess.run(command, input=orjson.dumps(request), capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise BadQuery(f"the query took more than {seconds:g} s: narrow it by steps, or select less") from None
    answer = orjson.loads(done.stdout) if done.returncode == 0 else {"error": f"it ended with {done.returncode}"}
    if "error" in answer:
        _refuse(answer["error"], tables, text)
    return answer["results"]


def _refuse(error: str, tables: Sequence[QueryTable], text: str) -> NoReturn:
    if match := re.search(r"no such column: (?:\w+\.)?(.+)", error):
        known = sorted({name for table in tables for name in table.columns})
        unknown(f"column `{match[1]}` (a text stands in single quotes)", match[1], known)
    if match := re.search(r"no such table: (?:\w+\.)?(.+)", error):
        unknown(f"table `{match[1]}`", match[1], [table.name for table in tables])
    raise BadQuery(f"the query cannot be answered: {error}: {text:.200}")


def _guess_column(at: int, rows: Sequence[Sequence[Json]]) -> QueryColumn:
    kinds = {type(row[at]) for row in rows} - {type(None)}
    return QueryColumn("int" if kinds == {int} else "float" if kinds and kinds <= {int, float} else "text", "", "")


def _row(columns: Mapping[str, QueryColumn], row: Sequence[Json]) -> dict[str, Json]:
    """Values by column, truth values as such."""
    pairs = zip(columns.items(), row, strict=True)  # of columns that have one name, the last
    return {n: bool(v) if column.kind == "bool" and v in (0, 1) else v for (n, column), v in pairs}


def _needles(sql: str) -> list[str]:
    """Texts that a condition looks for, as in `answer LIKE '%text%'`."""
    return [part.replace("''", "'") for part in _PART.findall(sql)]


def _shorten_row(row: Mapping[str, Json], needles: Sequence[str], letters: int | None) -> Mapping[str, Json]:
    if letters is None:
        return row
    return {name: _preview(v, needles, letters) if isinstance(v, str) else v for name, v in row.items()}


def _preview(text: str, needles: Sequence[str], letters: int) -> str:
    """Part of a text with the first of what was looked for; `…` where it is cut."""
    if len(text) <= letters:
        return text
    folded = text.lower()
    at = next((place for n in needles if n and (place := folded.find(n.lower())) >= 0), 0)
    start = max(0, min(at - _BEFORE, len(text) - letters))
    end = start + letters
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
