"""The example of a custom algorithm: a package that installs from its folder, is listed, and trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--quiet"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the package is installed beside rlsys, from a copy of its folder."""
    folder = tmp_path_factory.mktemp("own")
    source, target = folder / "source", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "best_of_group.py", "README.md"):
        (source / name).write_bytes((ROOT / "examples" / "own_algorithm" / name).read_bytes())
    install = [sys.executable, "-m", "pip", "install", *OFFLINE, "--target", str(target), str(source)]
    subprocess.run(install, check=True, cwd=folder)
    return {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def output_of(program: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_package_is_listed_under_its_name(installed: dict[str, str]) -> None:
    lines = output_of(["-m", "rlsys.cli", "algorithms"], installed).splitlines()
    (line,) = [line for line in lines if line.startswith("best_of_group ")]
    assert "best_of_group:BestOfGroup" in line and "Imitate the best members of each group" in line


@pytest.mark.slow
def test_a_configuration_names_it_and_it_trains(installed: dict[str, str], tmp_path: Path) -> None:
    first, second, third = map(float, output_of(["-m", "tests.own_algorithm", str(tmp_path)], installed).split())
    assert first > second > third
