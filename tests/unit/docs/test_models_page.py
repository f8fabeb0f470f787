"""The page of models lists the families that the tests compare."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.families import AGREES, with_cells
from tests.contract.test_families import test_a_trained_model_is_published_sampled_and_exported as local_cells
from tests.contract.test_families import test_vllm_samples_a_family_as_it_is_trained as vllm_cells
from tests.families import FAMILIES

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
CELLS = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
ROWS = {family: (local, vllm) for family, local, vllm in CELLS}


def families_of(test: object) -> set[str]:
    """Return the families that a test is run with."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    return {*mark.args[1]}


def test_the_table_lists_the_families_of_the_tests() -> None:
    assert [*ROWS] == FAMILIES


def test_every_local_cell_is_a_test() -> None:
    assert f"`{local_cells.__name__}[FAMILY]`" in PAGE
    assert {family for family, (local, _) in ROWS.items() if local == AGREES} == families_of(local_cells)


def test_vllm_cells_that_are_tests_agree() -> None:
    assert {ROWS[family][1] for family in families_of(vllm_cells)} == {AGREES}


def test_only_cells_that_ran_are_written() -> None:
    page = "x\n| `phi` | not run | not run |\n| `phi3` | agrees | not run |"
    written = with_cells(page, {"local": {"phi": "agrees"}, "vllm": {"phi3": "a | b"}})
    assert written == "x\n| `phi` | agrees | not run |\n| `phi3` | agrees | a / b |"
