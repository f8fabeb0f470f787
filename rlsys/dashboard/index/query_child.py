"""Process that answers one SQL query and ends: it may be killed at any time, and knows nothing of rlsys.

    python -I -S query_child.py < request.json > answer.json

A request has `database`, the path of an SQLite file to read, or null; `setup`, statements of ours with their
parameters; `rows`, tables that are filled, `{"runs": [[...], ...]}`; `queries`, those of a user, with parameters;
`most_rows` of each; `memory_mb`. An answer has the `results`, each with `columns` and `rows`, and `is_cut` if there
were more; or an `error` in words.

After the setup nothing but reading is allowed: no pragma, no attached file, no table of SQLite's own.
"""

from __future__ import annotations

import json
import re
import resource
import sqlite3
import sys
from collections.abc import Sequence
from functools import lru_cache
from math import isinf, sqrt
from pathlib import Path
from typing import Any

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE}
LIMITS = {
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
}


def main() -> None:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    size = request["memory_mb"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        answer = answer_request(request)
    except (sqlite3.Error, re.error, OverflowError) as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": "out of memory"}
    json.dump(answer, sys.stdout)


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Set up, then run the query of a user, who may only read."""
    path = request["database"]
    place = f"{Path(path).as_uri()}?mode=ro" if path else ":memory:"
    connection = sqlite3.connect(place, uri=bool(path), isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.create_function("regexp", 2, regexp, deterministic=True)
    connection.create_aggregate("stddev", 1, Deviation)  # pyrefly: ignore[bad-argument-type]
    for statement, parameters in request["setup"]:
        connection.execute(statement, parameters)
    for table, rows in request["rows"].items():
        if rows:
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(authorize)
    return {"results": [result(connection, q, values, request["most_rows"]) for q, values in request["queries"]]}


def result(connection: sqlite3.Connection, sql: str, parameters: Sequence[object], most_rows: int) -> dict[str, Any]:
    """Return what one query gives."""
    cursor = connection.execute(sql, parameters)
    columns = [column[0] for column in cursor.description or ()]
    rows = cursor.fetchmany(most_rows + 1)
    plain = [[None if isinstance(v, float) and isinf(v) else v for v in row] for row in rows[:most_rows]]
    return {"columns": columns, "rows": plain, "is_cut": len(rows) > most_rows}


def authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    """Allow selects, reads of our tables, and functions that compute."""
    if action == sqlite3.SQLITE_READ:
        return sqlite3.SQLITE_DENY if (first or "").startswith("sqlite_") else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if second == "load_extension" else sqlite3.SQLITE_OK
    return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY


@lru_cache(maxsize=32)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression that ignores the case of letters."""
    return re.compile(pattern, re.IGNORECASE)


def regexp(pattern: str, text: object) -> bool:
    """`text REGEXP pattern`."""
    return text is not None and compile_pattern(pattern).search(str(text)) is not None


class Deviation:
    """Sample standard deviation by Welford's method."""

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


if __name__ == "__main__":
    main()
