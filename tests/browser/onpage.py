"""Finding things on a page of the dashboard, for the tests of this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Scheme: TypeAlias = Literal["light", "dark"]
VIEWS: Mapping[str, tuple[str, str | None, Mapping[str, object]]] = {
    "runs": ("runs", None, {}),
    "compare": ("compare", None, {"run": ["small", "planted"]}),
    "overview": ("overview", "planted", {}),
    "groups": ("groups", "small", {"step": 12}),
    "group": ("group", "small", {"step": 12, "group_id": 69}),
    "episode": ("episode", "small", {"step": 12, "group_id": 69, "episode": 0}),
    "closer overview": ("overview", "asked", {"from": 50, "to": 100}),
    "tasks": ("tasks", "small", {}),
    "task": ("task", "small", {"task": "task-3"}),
    "cluster": ("cluster", "planted", {}),
    "replicas": ("cluster", "asked", {}),
    "ledger": ("ledger", "planted", {}),
    "drops": ("ledger", "asked", {}),
    "alerts": ("alerts", "planted", {}),
    "log": ("log", "asked", {}),
    "config": ("config", "small", {}),
    "evaluations": ("evaluations", "asked", {}),
    "grouped episodes": ("tables", "asked", {"table": "episodes", "group": "outcome, reason"}),
    "tables": ("tables", "small", {"table": "episodes", "filter": "reward < 0.5", "order": "length desc"}),
    "samples": ("evaluations", "asked", {"dataset": "held_out", "step": 100}),
    "grouped runs": ("runs", None, {"group": "algorithm"}),
    "components": ("components", None, {}),
}
"""Every view as `conftest.visit` takes it, by a name: of the run that has the most to show in it."""
VARIANTS = {"closer overview", "replicas", "drops", "grouped episodes", "samples", "grouped runs"}
"""Names of views that show more of a view that is listed by another name, too."""
each_view = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in VARIANTS else []) for name in VIEWS]
)


def see(page: Page, testid: str) -> Locator:
    """What bears this `data-testid`."""
    return page.get_by_test_id(testid)


def rows_of(page: Page, table: str) -> Sequence[str]:
    """Every row of a table as one line of text."""
    texts = see(page, table).locator("tbody tr").all_inner_texts()
    return [re.sub(r"\s+", " ", text).strip() for text in texts]
