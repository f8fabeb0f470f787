"""The documentation agrees with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.monitoring.alert_rules import RULES
from tests.faults import FAULTS

ROOT = Path(__file__).parents[3]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "rlsys" / "monitoring" / "metrics.md",
    *sorted(ROOT.glob("examples/*/README.md")),
]


def test_the_schema_in_docs_is_the_one_the_code_gives():
    written = json.loads((ROOT / "docs" / "config.schema.json").read_text())
    assert written == Config.model_json_schema(), "run: rlsys config schema > docs/config.schema.json"


@pytest.mark.parametrize("name", RULES)
def test_the_dashboard_page_documents_every_alert_with_its_threshold(name):
    rule = RULES[name]
    row = f"| `{name}` | {rule.when} | {rule.threshold:g}{' ' + rule.unit if rule.unit else ''} |"
    assert row in (ROOT / "docs" / "dashboard.md").read_text().splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_a_page_points_to_exists(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith(("http", "mailto")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


@pytest.mark.parametrize("name", FAULTS)
def test_the_dashboard_page_has_every_planted_fault_with_its_delay(name):
    fault = FAULTS[name]
    assert f"| {name} | `{fault.alert}` | {fault.delay} |" in (ROOT / "docs" / "dashboard.md").read_text().splitlines()
