"""The first page stays short, and what it tells to type exists."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.readme import BLOCKS, README, commands

ROOT = Path(__file__).parents[3]


def test_the_first_page_is_one_page() -> None:
    assert len(README.splitlines()) <= 150


def test_every_block_is_of_a_kind_that_a_test_executes() -> None:
    assert [name for name, _ in BLOCKS] == ["sh", "json", "python", "yaml", "sh", "text"]


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_every_target_shown_is_one_of_the_makefile(command: str) -> None:
    done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
