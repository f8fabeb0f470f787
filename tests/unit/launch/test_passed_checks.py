"""Checks of texts and models that passed are not made again, until something that they read changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.launch.passed_checks import MOST, PassedChecks
from rlsys.types import Task

TASKS = [("data.path", [Task(id="a", prompt="1 2")])]


def keys_of(model: Path, data: Path, *overrides: str) -> list[str]:
    return ["run.steps=1", f"model.path={model}", f"data.path={data}", "reward.fn=exact", *overrides]


@pytest.fixture
def model(model_path: Path, tmp_path: Path) -> Path:
    (folder := tmp_path / "model").mkdir()
    for file in model_path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_what_passed_is_known_until_something_that_was_read_changes(model: Path, tmp_path: Path) -> None:
    def checks(*overrides: str, tasks: list[tuple[str, list[Task]]] = TASKS, is_trained: bool = True) -> PassedChecks:
        config = Config.load([], keys_of(model, tmp_path / "tasks.jsonl", *overrides))
        return PassedChecks(config, tasks, tmp_path / "checks", is_trained=is_trained)

    assert not checks().is_known
    checks().remember()
    assert checks("run.steps=9", "limits.silence_s=7").is_known
    assert not checks("data.max_prompt_tokens=9").is_known
    assert not checks(tasks=[("data.path", [Task(id="a", prompt="1 2 3")])]).is_known
    assert not checks(tasks=[("data.path", [Task(id="a", prompt="1 2", tools=({"name": "ask"},))])]).is_known
    assert not checks(is_trained=False).is_known
    os.utime(model / "config.json", ns=(1, 1))
    assert not checks().is_known
    (model / "dangling").symlink_to(model / "nowhere")
    checks().remember()
    assert not checks().is_known, "what cannot be read is checked again"


def test_a_model_of_the_hub_is_never_known(tmp_path: Path) -> None:
    config = Config.load([], keys_of(Path("org/name"), tmp_path / "tasks.jsonl"))
    checks = PassedChecks(config, TASKS, tmp_path / "checks")
    checks.remember()
    assert not checks.is_known
    assert not (tmp_path / "checks").exists()


def test_only_the_newest_checks_are_remembered(model: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "checks").mkdir()
    for number in range(MOST + 5):
        (folder / f"old{number}").touch()
        os.utime(folder / f"old{number}", ns=(number, number))
    checks = PassedChecks(Config.load([], keys_of(model, tmp_path / "tasks.jsonl")), TASKS, folder)
    checks.remember()
    assert checks.is_known
    assert len(list(folder.iterdir())) == MOST
    assert not (folder / "old0").exists()


@pytest.mark.slow
def test_a_second_start_imports_no_model_library(model: Path, tmp_path: Path) -> None:
    (data := tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "1 2", "answer": "3"}) + "\n")
    program = (
        "import sys; from rlsys.config import Config; from rlsys.launch import preflight\n"
        f"preflight.look_up(Config.load([], {keys_of(model, data)!r}))\n"
        "print('transformers' in sys.modules, 'torch' in sys.modules)"
    )

    def start() -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert [start(), start()] == ["True True", "False False"]
