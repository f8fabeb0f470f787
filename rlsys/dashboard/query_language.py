"""Language of filters, which the pages, `/api/query` and `rlsys query` share.

    episodes where reward < 0.1 and step > 100 and answer contains "foo" order by length desc limit 50
    tasks between 50 and 100 where change < 0 order by change
    steps where reward/mean < 0.2 show step, reward/mean, policy/entropy
    runs where status = finished group by train.lr

A query is a table and then, each at most once and in any order: `where CONDITION`, `between STEP and STEP`, `group by
COLUMN, ...`, `order by COLUMN [asc|desc], ...`, `show COLUMN, ...`, `limit N`, `offset N`. A condition compares a
column with a value: `= != < <= > >=`, `between A and B`, `in (A, B)`, `contains "text"`, `matches "regular
expression"`, `is empty`; a yes-or-no column stands alone, as in `truncated`. `not`, `and`, `or` and parentheses combine
conditions. Text of one word needs no quotes. Words of the language are in lower or upper case.

Parsing knows no tables: `rlsys.dashboard.query_sql` checks columns and types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn, TypeAlias, TypeVar

from rlsys.dashboard.http_problems import BadQuery

T = TypeVar("T")

Value: TypeAlias = str | int | float | bool

MOST_ROWS = 10_000
"""Most rows of one answer."""
MOST_LETTERS = 10_000
"""Most letters of a query."""
_MOST_DEPTH = 50
_WORDS = {
    *("where", "between", "and", "group", "by", "order", "show", "limit", "offset"),
    *("not", "or", "in", "contains", "matches", "is", "empty", "asc", "desc"),
}
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w./@-]))|(?P<text>"[^"]*"|'[^']*')"""
    r"""|(?P<sign><=|>=|!=|==|<>|[=<>(),])|(?P<word>[^\s"'=<>!(),]+)|(?P<end>$))"""
)


@dataclass(frozen=True, slots=True)
class ColumnCondition:
    """Condition on one column."""

    column: str
    operator: Literal["=", "!=", "<", "<=", ">", ">=", "in", "contains", "matches", "is empty", "is true"]
    values: tuple[Value, ...] = ()
    """None for `is empty` and `is true`, several for `in`, else one."""


@dataclass(frozen=True, slots=True)
class Not:
    """Negation."""

    part: Condition


@dataclass(frozen=True, slots=True)
class Combination:
    """Two or more conditions of which all, or any, must hold."""

    operator: Literal["and", "or"]
    parts: tuple[Condition, ...]


Condition: TypeAlias = ColumnCondition | Not | Combination


@dataclass(frozen=True, slots=True)
class Ordering:
    """Column to sort by."""

    column: str
    is_descending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableQuery:
    """Parsed query."""

    table: str
    condition: Condition | None = None
    between: tuple[int, int] | None = None
    """First and last step."""
    group_by: tuple[str, ...] = ()
    order_by: tuple[Ordering, ...] = ()
    show: tuple[str, ...] = ()
    """Columns; empty: those that the table shows by default."""
    limit: int = 50
    offset: int = 0
    search: str = ""
    """Text that a column of text contains. Only pages have it."""


def parse_query(text: str) -> TableQuery:
    """Parse a query. Raises `BadQuery` with the place of the first problem."""
    return _Parser(text).query()


def parse_condition(text: str) -> Condition | None:
    """Parse the condition of a filter; None for an empty text. Raises `BadQuery`."""
    return _Parser(text).only(_Parser.condition) if text.strip() else None


def parse_order(text: str) -> tuple[Ordering, ...]:
    """Parse `reward, length desc`. Raises `BadQuery`."""
    return _Parser(text).only(_Parser.orderings) if text.strip() else ()


def parse_columns(text: str) -> tuple[str, ...]:
    """Parse `reward, length`. Raises `BadQuery`."""
    return _Parser(text).only(_Parser.names) if text.strip() else ()


def columns_in(query: TableQuery) -> Sequence[str]:
    """Columns that a query names, in order."""
    return list(
        dict.fromkeys((*query.group_by, *_columns(query.condition), *(by.column for by in query.order_by), *query.show))
    )


def needles_of(query: TableQuery) -> dict[str, list[str]]:
    """Texts that are looked for, by column; those of the search under the empty name."""
    found: dict[str, list[str]] = {"": [query.search]} if query.search else {}
    parts = [query.condition] if query.condition else []
    while parts:
        match parts.pop():
            case ColumnCondition(column=column, operator="contains", values=(value,)):
                found.setdefault(column, []).append(str(value))
            case Combination(parts=more):
                parts.extend(more)
            case _:
                pass
    return found


def _columns(condition: Condition | None) -> Sequence[str]:
    match condition:
        case ColumnCondition(column=column):
            return [column]
        case Not(part=part):
            return _columns(part)
        case Combination(parts=parts):
            return [column for part in parts for column in _columns(part)]
        case None:
            return []


class _Token(str):
    """Part of a query."""

    kind: str
    at: int


def _tokens(text: str) -> list[_Token]:
    if len(text) > MOST_LETTERS:
        raise BadQuery(f"the query has {len(text)} characters, and at most {MOST_LETTERS} are read")
    if "\0" in text:
        raise BadQuery("a query has no null characters")
    found, at = [], 0
    while not found or found[-1].kind != "end":
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadQuery(f"the query ends within a text, or has a stray sign: {text[at : at + 50].strip()!r}")
        kind = match.lastgroup or "end"
        token = _Token(match[kind])
        token.kind, token.at, at = kind, match.start(kind), match.end()
        found.append(token)
    return found


class _Parser:
    """Recursive descent over the tokens of a query."""

    def __init__(self, text: str) -> None:
        self._tokens, self._at, self._depth = _tokens(text), 0, 0

    def only(self, part: Callable[[_Parser], T]) -> T:
        """Parse the whole text as one part."""
        found = part(self)
        if self._next.kind != "end":
            self._fail("the end")
        return found

    def query(self) -> TableQuery:
        found, given = TableQuery(table=self._name("a table, such as episodes")), set[str]()
        while self._next.kind != "end":
            clause = self._next.lower()
            if clause in given:
                raise BadQuery(f"`{clause}` stands twice in the query")
            given.add(clause)
            found = self._clause(found)
        return found

    def condition(self) -> Condition:
        return self._combined("or", lambda: self._combined("and", self._negated))

    def names(self) -> tuple[str, ...]:
        return tuple(self._listed(lambda: self._name("a column")))

    def orderings(self) -> tuple[Ordering, ...]:
        return tuple(self._listed(self._ordering))

    def _clause(self, query: TableQuery) -> TableQuery:
        if self._took("where"):
            return replace(query, condition=self.condition())
        if self._took("between"):
            first = self._whole()
            self._expect("and")
            return replace(query, between=(first, self._whole()))
        if self._took("group"):
            self._expect("by")
            return replace(query, group_by=self.names())
        if self._took("order"):
            self._expect("by")
            return replace(query, order_by=self.orderings())
        if self._took("show"):
            return replace(query, show=self.names())
        if self._took("limit"):
            return replace(query, limit=min(self._whole(), MOST_ROWS))
        if self._took("offset"):
            return replace(query, offset=self._whole())
        return self._fail("where, between, group by, order by, show, limit, offset or the end")

    def _ordering(self) -> Ordering:
        name = self._name("a column")
        if self._took("desc"):
            return Ordering(name, is_descending=True)
        self._took("asc")
        return Ordering(name)

    def _combined(self, word: Literal["and", "or"], part: Callable[[], Condition]) -> Condition:
        parts = [part()]
        while self._took(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Combination(word, tuple(parts))

    def _negated(self) -> Condition:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise BadQuery(f"the condition is nested more than {_MOST_DEPTH} deep")
        if self._took("not"):
            found: Condition = Not(self._negated())
        elif self._took("("):
            found = self.condition()
            self._expect(")")
        else:
            found = self._comparison()
        self._depth -= 1
        return found

    def _comparison(self) -> Condition:
        name = self._name("a column")
        if self._took("not"):
            return Not(self._compared(name))
        if self._took("is"):
            is_not = self._took("not")
            self._expect("empty")
            found = ColumnCondition(name, "is empty")
            return Not(found) if is_not else found
        return self._compared(name)

    def _compared(self, name: str) -> Condition:
        sign = {"==": "=", "<>": "!="}.get(self._next, self._next)
        if self._next.kind == "sign" and sign in ("=", "!=", "<", "<=", ">", ">="):
            self._at += 1
            return ColumnCondition(name, sign, (self._value(),))
        if self._took("contains"):
            return ColumnCondition(name, "contains", (self._value(),))
        if self._took("matches"):
            return ColumnCondition(name, "matches", (self._value(),))
        if self._took("between"):
            low = self._value()
            self._expect("and")
            return Combination(
                "and", (ColumnCondition(name, ">=", (low,)), ColumnCondition(name, "<=", (self._value(),)))
            )
        if self._took("in"):
            self._expect("(")
            values = tuple(self._listed(self._value))
            self._expect(")")
            return ColumnCondition(name, "in", values)
        return ColumnCondition(name, "is true")

    def _listed(self, part: Callable[[], T]) -> list[T]:
        found = [part()]
        while self._took(","):
            found.append(part())
        return found

    def _value(self) -> Value:
        token = self._next
        if token.kind == "number":
            self._at += 1
            return _number(token)
        if token.kind == "text":
            self._at += 1
            return token[1:-1]
        word = self._name("a value")
        return {"true": True, "false": False}.get(word.lower(), word)

    def _whole(self) -> int:
        token = self._next
        if token.kind != "number" or not isinstance(value := _number(token), int) or value < 0:
            self._fail("a whole number")
        self._at += 1
        return value

    def _name(self, what: str) -> str:
        token = self._next
        if token.kind != "word" or token.lower() in _WORDS:
            self._fail(what)
        self._at += 1
        return str(token)

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _took(self, word: str) -> bool:
        """Skip a word or sign if it is next."""
        token = self._next
        is_next = token.kind in ("word", "sign") and token.lower() == word
        self._at += is_next
        return is_next

    def _expect(self, word: str) -> None:
        if not self._took(word):
            self._fail(f"`{word}`")

    def _fail(self, expected: str) -> NoReturn:
        token = self._next
        found = f"`{token:.50}`" if token else "the end"
        raise BadQuery(f"at character {token.at + 1} of the query: expected {expected}, found {found}")


def _number(token: str) -> int | float:
    value = float(token)
    if value in (float("inf"), float("-inf")):
        raise BadQuery(f"{token:.50} is too large a number")
    is_whole = "." not in token and "e" not in token.lower() and abs(value) < 2**53
    return int(token) if is_whole else value
