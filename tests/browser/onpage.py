"""Finding things on a page of the dashboard, for the tests of this folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def see(page: Page, testid: str) -> Locator:
    """What bears this `data-testid`."""
    return page.get_by_test_id(testid)


def rows_of(page: Page, table: str) -> Sequence[str]:
    """Every row of a table as one line of text."""
    texts = see(page, table).locator("tbody tr").all_inner_texts()
    return [re.sub(r"\s+", " ", text).strip() for text in texts]
