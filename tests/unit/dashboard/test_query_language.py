"""Queries: what they are parsed to, what they answer over a handmade table, and what is wrong with bad ones."""

from __future__ import annotations

import sqlite3
import tracemalloc
from collections.abc import Iterator

import pytest

from rlsys.dashboard.http_problems import BadQuery
from rlsys.dashboard.query_language import (
    ColumnCondition,
    Combination,
    Not,
    Ordering,
    TableQuery,
    parse_columns,
    parse_condition,
    parse_order,
    parse_query,
)
from rlsys.dashboard.query_sql import QueryColumn, QueryTable, answer, limited

ROWS = [
    ("ann", 1, 0.5, "short", 1),
    ("bob", 2, None, "a longer text, 100 % of it", 0),
    ("cleo", 3, 2.5, "it's a_b", 0),
    ("dan", 4, 2.5, None, 1),
]
TABLE = QueryTable(
    name="people",
    help="",
    source="people",
    key="people.rowid",
    columns={
        "name": QueryColumn("text", "", "name"),
        "step": QueryColumn("int", "", "step"),
        "reward": QueryColumn("float", "", "reward"),
        "told": QueryColumn("text", "", "told"),
        "new": QueryColumn("bool", "", "new"),
        "pass@1/mean-x": QueryColumn("float", "", "reward * 2"),
    },
    shown=("name",),
    order_by=(Ordering("step"),),
    searched=("name", "told"),
)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE people (name, step, reward, told, new)")
    connection.executemany("INSERT INTO people VALUES (?, ?, ?, ?, ?)", ROWS)
    yield connection
    connection.close()


def names(connection: sqlite3.Connection, query: str | TableQuery) -> str:
    """First letters of the names that a query answers with."""
    page = answer(connection, TABLE, parse_query(query) if isinstance(query, str) else query, None)
    return "".join(str(row["name"])[0] for row in page.rows)


def test_a_query_has_a_table_and_clauses_in_any_order() -> None:
    query = parse_query(
        "episodes limit 5 ORDER BY length desc, reward where reward < 0.1 and (task = t-1 or not truncated) "
        "offset 3 show step, pass@1 between 2 and 9"
    )
    assert query == TableQuery(
        table="episodes",
        condition=Combination(
            "and",
            (
                ColumnCondition("reward", "<", (0.1,)),
                Combination(
                    "or", (ColumnCondition("task", "=", ("t-1",)), Not(ColumnCondition("truncated", "is true")))
                ),
            ),
        ),
        between=(2, 9),
        order_by=(Ordering("length", is_descending=True), Ordering("reward")),
        show=("step", "pass@1"),
        limit=5,
        offset=3,
    )


def test_the_parts_of_a_page_are_those_of_a_query() -> None:
    query = parse_query("episodes where a in (1, 'x') order by b desc show c, d")
    assert parse_condition("a in (1, 'x')") == query.condition
    assert (parse_order("b desc"), parse_columns("c, d")) == (query.order_by, query.show)
    assert (parse_condition(" "), parse_order(""), parse_columns("")) == (None, (), ())


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("reward = 2.5", "cd"),
        ("reward != 2.5", "a"),
        ("reward >= 0.5 and reward <= 2", "a"),
        ("reward between 0.5 and 2", "a"),
        ("step > 1e0 and step < 4", "bc"),
        ("name = bob or name == 'dan'", "bd"),
        ("name in (ann, bob)", "ab"),
        ("not name in (ann, bob)", "cd"),
        ("name not contains n", "bc"),
        ("reward is empty", "b"),
        ("reward is not empty", "acd"),
        ("not reward > 1", "ab"),
        ("new", "ad"),
        ("not new", "bc"),
        ("new = false", "bc"),
        ('told contains "LONG"', "b"),
        ('told contains "100 %"', "b"),
        ("told contains '%'", "b"),
        ("told contains _", "c"),
        ('told contains "it\'s"', "c"),
        ("told contains ''", "abc"),
        ("told matches '^a .* [0-9]+ %'", "b"),
        ("told matches '.'", "abc"),
        ("pass@1/mean-x > 4", "cd"),
        ('name = "x\' or 1=1 --"', ""),
    ],
)
def test_a_condition_selects_rows(connection: sqlite3.Connection, condition: str, found: str) -> None:
    assert names(connection, f"people where {condition}") == found


def test_rows_are_ordered_and_paged_with_empty_values_last(connection: sqlite3.Connection) -> None:
    assert names(connection, "people") == "abcd"
    assert names(connection, "people order by reward") == "acdb"
    assert names(connection, "people order by reward desc, name desc") == "dcab"
    assert names(connection, "people order by step limit 2 offset 1") == "bc"
    page = answer(connection, TABLE, parse_query("people order by step limit 2 offset 1"), None)
    assert page.num_rows == 4
    assert answer(connection, TABLE, parse_query("people where step > 9"), None).num_rows == 0
    assert answer(connection, TABLE, parse_query("people offset 9"), None).num_rows == 4


def test_steps_and_search_narrow_what_the_condition_selects(connection: sqlite3.Connection) -> None:
    assert names(connection, "people between 2 and 3") == "bc"
    assert names(connection, TableQuery(table="people", search="AN")) == "ad"
    assert names(connection, TableQuery(table="people", search="a", condition=parse_condition("new"))) == "ad"


def test_shown_columns_are_those_asked_for_or_named(connection: sqlite3.Connection) -> None:
    assert list(answer(connection, TABLE, parse_query("people where step > 1 order by reward"), None).columns) == [
        "name",
        "step",
        "reward",
    ]
    (row, *_) = answer(connection, TABLE, parse_query("people show step, new"), None).rows
    assert row == {"step": 1, "new": True}


def test_groups_have_a_count_a_mean_and_a_spread(connection: sqlite3.Connection) -> None:
    page = answer(connection, TABLE, parse_query("people group by new show reward order by reward_mean"), None)
    assert page.num_rows == 2
    assert page.rows[0] == {
        "new": True, "num": 2, "reward_mean": 1.5, "reward_std": pytest.approx(2**0.5), "reward_min": 0.5,
        "reward_max": 2.5,
    }  # fmt: skip
    assert page.rows[1]["reward_std"] is None  # of one value
    (row,) = answer(connection, TABLE, parse_query("people where new group by name limit 1 offset 1"), None).rows
    assert row["name"] == "dan"


def test_the_spread_of_many_values_takes_no_memory_of_each(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE many AS SELECT 1e9 + value AS reward FROM json_each(?)", (str([*range(100_000)]),))
    columns = {"reward": QueryColumn("float", "A number.", "reward"), "one": QueryColumn("int", "One.", "1")}
    table = QueryTable(name="many", help="", source="many", key="rowid", columns=columns, shown=("reward",))
    query = TableQuery(table="many", group_by=("one",))
    tracemalloc.start()
    try:
        (row,) = answer(connection, table, query, None).rows
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert row["reward_std"] == pytest.approx((100_000 * 100_001 / 12) ** 0.5)


def test_a_long_text_is_cut_around_what_was_looked_for(connection: sqlite3.Connection) -> None:
    text = "x" * 300 + "needle" + "y" * 300
    connection.execute("UPDATE people SET told = ?", (text,))

    def told(query: TableQuery, letters: int | None) -> str:
        return str(answer(connection, TABLE, query, letters).rows[0]["told"])

    query = parse_query("people where told contains Needle show told limit 1")
    assert told(query, None) == text
    assert told(query, 100) == "…" + "x" * 40 + "needle" + "y" * 54 + "…"
    assert told(TableQuery(table="people", search="needle", show=("told",)), 100) == told(query, 100)
    assert told(parse_query("people show told"), 10) == "x" * 10 + "…"


def test_a_query_ends_when_its_time_is_over(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE people SET told = ?", ("a" * 60 + "b",))
    with pytest.raises(BadQuery, match=r"took more than 0\.05 s: narrow it"):
        answer(connection, TABLE, parse_query("people where told matches '(a|aa)+$'"), None, seconds=0.05)
    without_end = (
        "WITH RECURSIVE numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers) SELECT max(n) FROM numbers"
    )
    with pytest.raises(BadQuery, match=r"took more than 0\.05 s"), limited(connection, 0.05):
        connection.execute(without_end)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("", "at character 1 of the query: expected a table, such as episodes, found the end"),
        ("people where", "at character 13 of the query: expected a column, found the end"),
        ("people where rewrd < 1", "unknown column `rewrd` of `people`: did you mean `reward`?"),
        ("people where step <", "expected a value, found the end"),
        ("people where step < = 1", "expected a value, found `=`"),
        ("people where (step < 1", "expected `)`, found the end"),
        ("people where step < 1 where step > 2", "`where` stands twice"),
        ("people where step", "`step` is a number: compare it, as in `step = 1`"),
        ("people where step < many", "`step` is a number, and is compared with `many`"),
        ("people where new = 3", "`new` is true or false, and is compared with `3`"),
        ("people where step contains 1", "`step` is a number: contains is for texts"),
        ("people where told matches '('", "the regular expression '(' is invalid"),
        ('people where told = "x', "ends within a text"),
        ("people order step", "expected `by`, found `step`"),
        ("people limit -1", "expected a whole number, found `-1`"),
        ("people limit 1.5", "expected a whole number, found `1.5`"),
        ("people; drop table people", "expected where, between"),
        ("people group by name show told", "`told` is a text, which has no mean"),
        ("people group by name order by step", "unknown column `step` of these groups"),
        ("people where step = 1e999", "too large a number"),
        ("people where name = 'a\0'", "no null characters"),
        ("people where " + "(" * 51 + "new" + ")" * 51, "nested more than 50 deep"),
        ("people where " + "new or " * 2000 + "new", "at most 10000 are read"),
    ],
)
def test_a_bad_query_is_refused_with_its_problem(connection: sqlite3.Connection, query: str, problem: str) -> None:
    with pytest.raises(BadQuery) as refused:
        names(connection, query)
    assert problem in str(refused.value)
    assert refused.value.exit_code == 2
