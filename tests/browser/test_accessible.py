"""Every view, unfolded, light and dark, wide and narrow, by the rules of axe-core: it is shut to nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from tests.browser.onpage import VIEWS, Scheme, each_view

axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Visit


@pytest.mark.parametrize(
    "screens",
    [
        pytest.param([(1440, "light"), (390, "dark")], id="two"),
        pytest.param([(1440, "dark"), (390, "light")], id="two others", marks=pytest.mark.nightly),
    ],
)
@each_view
def test_axe_finds_nothing_in_a_view(
    page: Page, visit: Visit, name: str, screens: Sequence[tuple[int, Scheme]]
) -> None:
    view, run, query = VIEWS[name]
    visit(view, run, **query)
    page.evaluate(_UNFOLD)
    page.evaluate(axe.AXE_SCRIPT)
    for width, scheme in screens:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate(_FINDINGS)
        assert not found, f"{width} pixels, {scheme}: {found}"


_UNFOLD = """() => {
  const alike = [...document.querySelectorAll(".chart details")].slice(1); // they take long, and one tells all
  for (const fold of document.querySelectorAll("details")) fold.open ||= !alike.includes(fold);
}"""
_FINDINGS = """async () => {
  const { violations } = await axe.run({ resultTypes: ["violations"] });
  const where = ({ target }) => target.join(" ");
  return violations.map(({ id, impact, nodes }) => `${impact} ${id}: ${nodes.slice(0, 3).map(where).join("; ")}`);
}"""
