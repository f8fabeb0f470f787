"""The map of the code in docs/architecture.md and the guide in CONTRIBUTING.md name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"]
PAGE = PAGES[0].read_text()
FOLDERS = "rlsys|workers|algorithms|tests|benchmarks|examples|docs|deploy|requirements"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]")
NAMED = re.compile(r"^\|[^|]*\| (`[^|]*\.py`(?:, `[^|]*`)*) \| ([^|]*) \|$", re.MULTILINE)
HOP = re.compile(r"^(\d+)\. (· )?`([\w/.]+)`: ", re.MULTILINE)
HOPS = HOP.findall(PAGE)


def paths_in(text: str) -> list[str]:
    """Every path of the repository that a page names, `NAME` and `module` in it being placeholders."""
    return [path for path in PATH.findall(text) if "NAME" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    paths = paths_in(page.read_text())
    assert len(paths) > 20
    assert [path for path in paths if not any(ROOT.glob(path))] == []


@pytest.mark.parametrize("package", ["rlsys", "workers"])
def test_every_room_has_a_row(package: str) -> None:
    rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert set(re.findall(rf"^\| `{package}/(\w+)` \|", PAGE, re.MULTILINE)) == rooms


def test_every_module_outside_a_room_has_a_row() -> None:
    rows = set(re.findall(r"`([\w.]+\.py)`", "".join(re.findall(r"^\| (`[^|]*\.py`) \|", PAGE, re.MULTILINE))))
    outside = {path.name for package in ("rlsys", "workers") for path in (ROOT / package).glob("*.py")}
    assert rows >= outside - {"__init__.py", "__main__.py", "cli.py"}


def test_the_hops_are_numbered_and_counted() -> None:
    assert [int(number) for number, _, _ in HOPS] == [*range(1, len(HOPS) + 1)]
    assert len({path for _, _, path in HOPS}) == len(HOPS)
    said = re.search(r"(\d+) files, (\d+) of which hand the group on", PAGE)
    more = re.search(r"(\d+) more files", PAGE)
    assert said and more
    to_gradient = HOPS[: int(said[1])]
    assert int(said[1]) + int(more[1]) == len(HOPS)
    assert int(said[2]) == sum(not question for _, question, _ in to_gradient)


def test_names_to_look_for_are_in_their_files() -> None:
    rows = NAMED.findall(PAGE)
    assert len(rows) > 25
    missing = []
    for files, words in rows:
        texts = "".join((ROOT / path).read_text() for path in paths_in(files + words))
        names = [name for name in re.findall(r"`([\w.]+)`", words) if not name.startswith("--")]
        missing += [name for name in names if any(part not in texts for part in name.split("."))]
    assert missing == []


def test_every_loop_of_the_driver_has_its_row() -> None:
    docstring = (ROOT / "rlsys" / "loop" / "driver.py").read_text().split('"""')[1]
    loops = [line.split()[0] for line in docstring.splitlines() if re.match(r"    [a-z]+ {2,}\S", line)]
    table = PAGE.partition("## The loops")[2].partition("## The rooms")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == loops
