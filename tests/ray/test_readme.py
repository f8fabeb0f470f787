"""The run that README.md shows, as it is shown: its files, its commands, and what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import blocks, commands

MODEL = ".cache/sort/seed0/model"


@pytest.mark.timeout(600)  # three commands, each of which imports torch and transformers
def test_the_run_that_the_readme_shows_prints_what_it_shows(model_path, tmp_path):
    (rows,), (reward,), (config,), (printed,) = map(blocks, ("json", "python", "yaml", "text"))
    for name, text in (("tasks.jsonl", rows), ("my_reward.py", reward), ("run.yaml", config)):
        (tmp_path / name).write_text(text)
    (tmp_path / MODEL).parent.mkdir(parents=True)
    (tmp_path / MODEL).symlink_to(model_path)
    dry, train, export = [command for command in commands() if "rlsys" in command]
    assert "found what 20 steps in runs/mine need" in called(dry, tmp_path)
    shown = called(train, tmp_path)
    for line in printed.splitlines():
        assert re.search(pattern_of(line), shown), f"{line!r} is not in\n{shown}"
    called(export, tmp_path)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def pattern_of(line: str) -> str:
    """Matches the line with any numbers and spaces, and the folder of the run anywhere."""
    parts = re.split(r"(\d[\d,.]*|\s+|runs/)", line)
    kinds = ((r"\d", r"\d[\d,.]*"), (r"\s", r"\s+"), ("runs/", r"\S*runs/"))
    return "".join(next((p for k, p in kinds if re.match(k, part)), re.escape(part)) for part in parts)


def called(command: str, folder: Path) -> str:
    """All output of a command in this folder."""
    arguments = command.split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "rlsys.cli", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
