"""A command that reads somebody else's folder runs no code in it, even if it is started there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.by_day import first_by_day
from tests.histories import small_run
from tests.planted_modules import plant, planted_that_ran

pytestmark = pytest.mark.slow

COMMANDS = [
    ("report", "."),
    ("data", "inspect", "rows.jsonl"),
    ("train", "job.yaml", "--dry-run"),
    ("query", ".", "select count(*) from steps"),
    ("profile", "."),
    ("tail", ".", "--once"),
    ("config", "check", "job.yaml"),
    ("algorithms",),
    ("doctor",),
]
JOB = """\
data: {path: rows.jsonl}
run: {steps: 1}
reward: {fn: exact}
"""


@pytest.fixture(scope="module")
def folder(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "run"
    small_run(folder)
    (folder / "job.yaml").write_text(f"{JOB}model: {{path: {model_path}}}\n")
    (folder / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    plant(folder)
    return folder


@pytest.mark.parametrize("command", first_by_day([(command,) for command in COMMANDS], 3))
def test_a_command_imports_nothing_from_the_folder_it_is_started_in(folder, command, tmp_path) -> None:
    assert planted_that_ran(folder, command, tmp_path / "rlsys") == ""


def test_an_environment_of_ones_own_is_found_in_the_folder_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(
        "from rlsys.agents.environment import Environment\n\nclass Game(Environment):\n    def __init__(self): pass\n"
    )
    make = "from rlsys.agents.environment import make\nprint(make('my_env:Game', {}).__class__.__name__)\n"
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    words = [sys.executable, "-P", "-c", make]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "Game\n", done.stderr
