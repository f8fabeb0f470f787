"""Every cell of ours in the table of features names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"
ROWS = re.findall(r"^\| (.+) \|$", PAGE.read_text().split("## Features")[1].split("## Keys")[0], re.MULTILINE)[2:]
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(tests/[^)]+)\)")


def test_the_table_has_a_column_for_each_system() -> None:
    assert ROWS and all(len(row.split(" | ")) == 5 for row in ROWS)


def test_what_we_have_is_linked_to_a_test_that_exists() -> None:
    for ours in (row.split(" | ")[-1] for row in ROWS):
        link = LINK.search(ours)
        assert link or ours == "no", ours
        if link:
            name = f"def test_{link[1].replace(' ', '_')}("
            assert name in (PAGE.parents[1] / link[2]).read_text(), f"{link[2]} has no {name}"
