"""Queries in SQL over a handmade view: what they answer, what a page asks, and what is refused."""

from __future__ import annotations

import resource
import sqlite3
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.dashboard.http_problems import BadQuery
from rlsys.dashboard.index.sql_query import MOST_S, QueryColumn, QueryPage, QueryTable, TableQuery, page_of, run_sql

ROWS = [
    ["ann", 1, 0.5, "short", 1],
    ["bob", 2, None, "a longer text, 100 % of it", 0],
    ["cleo", 3, 2.5, "it's a_b", 0],
    ["dan", 4, 2.5, None, 1],
]
TABLE = QueryTable(
    name="people",
    help="",
    source="main.people AS people",
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
    order_by="step",
    searched=("name", "told"),
    setup=[("CREATE TABLE main.people (name, step, reward, told, new)", ())],
    rows={"main.people": ROWS},
)


def page(letters: int | None = None, **asked: Any) -> QueryPage:
    return page_of(None, TABLE, TableQuery(table="people", **asked), letters)


def names(**asked: Any) -> str:
    """First letters of the names that a page has."""
    return "".join(str(row["name"])[0] for row in page(**asked).rows)


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("reward = 2.5", "cd"),
        ("reward between 0.5 and 2", "a"),
        ("name in ('ann', 'bob')", "ab"),
        ("not name in ('ann', 'bob')", "cd"),
        ("reward is null", "b"),
        ("new", "ad"),
        ("not new", "bc"),
        ("told like '%LONG%'", "b"),
        ("told like '%it''s%'", "c"),
        ("told regexp '^a .* [0-9]+ %'", "b"),
        ("told regexp '.'", "abc"),
        ('"pass@1/mean-x" > 4', "cd"),
        ("name = 'x'' or 1=1 --'", ""),
        ("step > 1 -- and all that follows", "bcd"),
    ],
)
def test_a_filter_selects_rows(condition: str, found: str) -> None:
    assert names(filter=condition) == found


def test_rows_are_ordered_and_paged_with_empty_values_last() -> None:
    assert names() == "abcd"
    assert names(order_by="reward") == "acdb"
    assert names(order_by="reward desc, name desc") == "dcab"
    found = page(order_by="step", limit=2, offset=1)
    assert ([row["name"] for row in found.rows], found.num_rows) == (["bob", "cleo"], 4)
    assert page(offset=9).num_rows == 4


def test_steps_and_search_narrow_what_the_filter_selects() -> None:
    assert names(between=(2, 3)) == "bc"
    assert names(search="AN") == "ad"
    assert names(search="a", filter="new or 1 = 0") == "ad"
    assert names(search="%") == "b"


def test_groups_have_their_number_and_the_spread_of_what_is_shown() -> None:
    (old, new) = page(group_by="new", order_by="new").rows
    assert (old["new"], old["num"], old["reward_mean"], old["reward_std"]) == (False, 2, 2.5, None)
    assert new["reward_std"] == pytest.approx(2**0.5)
    with pytest.raises(BadQuery, match="`told` is a text, which has no mean"):
        page(group_by="new", show="told")


def test_long_texts_are_cut_around_what_was_looked_for() -> None:
    (row,) = page(letters=9, filter="told like '%100%'", show="told").rows
    assert row["told"] == "a longer …"
    (row,) = page(letters=50, search="100", show="told").rows
    assert row["told"] == "a longer text, 100 % of it"


def test_a_query_in_sql_has_the_columns_that_it_names() -> None:
    found = run_sql(None, [TABLE], "select new, count(*) as num, stddev(reward) from people group by new")
    assert list(found.columns) == ["new", "num", "stddev(reward)"]
    assert [column.kind for column in found.columns.values()] == ["bool", "int", "float"]
    assert [row["new"] for row in found.rows] == [False, True]
    assert list(run_sql(None, [TABLE], "select * from people").columns) == list(TABLE.columns)


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("select rewrd from people", "did you mean `reward`"),
        ('select name from people where "rewrd" < 1', "unknown column `rewrd` .*did you mean `reward`"),
        ("select name from peple", "unknown table `peple`: did you mean `people`"),
        ("selec 1", 'near "selec": syntax error'),
        ("select 1; select 2", "one statement at a time"),
        ("select told regexp '(' from people", "unterminated subpattern|user-defined function"),
        ("select zeroblob(3000000000)", "too big|memory"),
        ("select " + "1," * 6000 + "1", "characters, and at most"),
    ],
)
def test_a_query_that_cannot_be_answered_is_explained(sql: str, problem: str) -> None:
    with pytest.raises(BadQuery, match=problem):
        run_sql(None, [TABLE], sql)


@pytest.mark.parametrize(
    "sql",
    [
        "pragma user_version = 9",
        "attach 'FOLDER/other.sqlite' as other",
        "delete from main.people",
        "create table t (a)",
        "insert into main.people values (1, 2, 3, 4, 5)",
        "select * from sqlite_master",
        "select load_extension('x')",
        "with w as (select 1) delete from main.people",
        "vacuum into 'FOLDER/stolen.sqlite'",
    ],
)
def test_nothing_but_reading_is_allowed(sql: str, tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE people (name, step, reward, told, new)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(BadQuery, match=r"not authorized|denied|prohibited|readonly"):
        run_sql(path, [replace(TABLE, setup=(), rows={})], sql.replace("FOLDER", str(tmp_path)))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["index.sqlite"]


@pytest.mark.parametrize(
    "sql",
    [
        "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c",
        "select 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!' regexp '(a+)+$'",
    ],
    ids=["without an end", "an expression that takes for ever"],
)
def test_a_query_without_an_end_is_ended(sql: str) -> None:
    with pytest.raises(BadQuery, match="took more than 1 s"):
        run_sql(None, [TABLE], sql, seconds=1.0)


@pytest.mark.parametrize(
    "pattern",
    [
        "a{2147483648}", "a{65536}{65536}", "(?R)", "(" * 1000 + "a" + ")" * 1000, "(" * 4000, "[" * 5000, "(a" * 2000,
        "(?<=a+)b", "a" * 9000, "(a|" * 1500, "((a{0,60000}){0,60000}){0,60000}", "\\" + "9" * 5000,
    ],
    ids=lambda text: f"{text[:12]}-{len(text)}",
)  # fmt: skip
def test_no_regular_expression_takes_this_process_along(pattern: str) -> None:
    before_kb, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with suppress(BadQuery):
        run_sql(None, [TABLE], f"select name from people where told regexp '{pattern}'")
    assert time.monotonic() - begin_s < 2 * MOST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


@pytest.mark.parametrize(
    "text",
    [
        "9" * 9900, f"-{'9' * 9900}", f"0x{'f' * 9900}", f"1e{'9' * 9900}", "1" + "+1" * 4000, "(" * 4000,
        '"a" ' * 2400, "'" * 9901, '"' * 9901, "as " * 3000 + '"x"', "%'" * 4900, "not " * 2000 + "1", "x" * 9900,
        " as" * 1500 + " " * 4000 + '"b" "b"',
    ],
    ids=lambda text: f"{text[:12]}-{len(text)}",
)  # fmt: skip
@pytest.mark.parametrize("statement", ["select", "select name from people where step ="])
def test_no_text_of_a_query_freezes_its_parser(statement: str, text: str) -> None:
    begin_s = time.monotonic()
    with suppress(BadQuery):
        run_sql(None, [TABLE], f"{statement} {text}")
    with suppress(BadQuery):
        page_of(None, TABLE, TableQuery(table="people", filter=f"step = {text}"), 100)
    assert time.monotonic() - begin_s < MOST_S


def test_of_very_many_columns_those_that_a_query_names_are_there() -> None:
    many = {f"key.{number}": QueryColumn("int", "", str(number)) for number in range(5000)}
    table = replace(TABLE, columns={**TABLE.columns, **many, "odd\0key": QueryColumn("int", "", "1")})
    found = run_sql(None, [table], 'select name, "key.4321" from people where "key.17" = 17 limit 1')
    assert found.rows == [{"name": "ann", "key.4321": 4321}]
    (row,) = page_of(None, table, TableQuery(table="people", show="key.4999", limit=1), None).rows
    assert row == {"key.4999": 4999}
