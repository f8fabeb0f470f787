"""Tables of the documentation name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(tests/[^)]+)\)")


def rows_of(page: str) -> list[list[str]]:
    """Cells of the rows of a page's table of features or mechanisms."""
    text = (DOCS / page).read_text().partition("## Features")[2] or (DOCS / page).read_text()
    found = re.findall(r"^\| (.+) \|$", text.split("## Keys")[0], re.MULTILINE)[2:]
    return [row.split(" | ") for row in found]


@pytest.mark.parametrize("page", ["coming-from.md", "systems.md"])
def test_every_row_has_all_five_cells(page: str) -> None:
    rows = rows_of(page)
    assert rows and {len(row) for row in rows} == {5}


@pytest.mark.parametrize("page", ["coming-from.md", "systems.md", "security.md"])
def test_every_linked_test_exists(page: str) -> None:
    for name, path in LINK.findall((DOCS / page).read_text()):
        assert f"def test_{name.replace(' ', '_')}(" in (DOCS.parent / path).read_text(), f"{path} has no {name}"


def test_what_is_there_is_linked_to_a_test_and_what_is_not_says_so() -> None:
    for row in rows_of("coming-from.md"):
        assert LINK.search(row[-1]) or row[-1] == "no", row
    for row in rows_of("systems.md"):
        assert LINK.search(row[3]) or row[4].startswith("not there"), row
