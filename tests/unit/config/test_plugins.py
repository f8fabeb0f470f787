"""Plug-ins of several packages: clashing names, and packages that fail to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER = '''
from dataclasses import dataclass
from rlsys.algorithm import Algorithm
from rlsys.stabilizer import StabilizerPlugin

@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm):
    """An algorithm of another package."""

@dataclass(frozen=True, kw_only=True)
class Still(StabilizerPlugin):
    """A stabilizer of another package."""
'''
Points = Mapping[str, str]


def package(folder: Path, name: str, algorithms: Points, stabilizers: Points | None = None) -> None:
    """What pip leaves of an installed package that has these entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = {"algorithms": algorithms, "stabilizers": stabilizers or {}}
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[rlsys.{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where two packages both have a `mine`, one takes the name of ours, and one does not even parse."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "other.py").write_text(OTHER)
    (folder / "another.py").write_text(OTHER)
    (folder / "torn.py").write_text("undefined_name()\n")
    package(folder, "first", {"mine": "other:Mine", "alone": "other:Mine"}, {"still": "other:Still"})
    package(folder, "second", {"mine": "another:Mine", "dapo": "another:Mine"})
    package(folder, "broken", {"torn": "torn:Torn"})
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsys.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_one_package_that_does_not_load_hides_no_other(environment):
    listed = run(environment, "algorithms")
    assert listed.returncode == 0, listed.stderr
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "does not load: cannot import algorithm 'torn:Torn': NameError" in lines["torn"]
    assert lines["alone"].endswith("An algorithm of another package.")
    assert lines["still"].split()[1:3] == ["stabilizer", "other:Still"]
    assert lines["grpo"].split()[1:3] == ["algorithm", "algorithms.grpo:GRPO"]
    schema = run(environment, "config", "schema")
    assert schema.returncode == 0, schema.stderr
    choices = json.loads(schema.stdout)["properties"]["algorithm"]["anyOf"]
    names = {choice["properties"]["type"].get("const") for choice in choices if "properties" in choice}
    assert {"grpo", "alone"} <= names
    assert names.isdisjoint({"torn", "mine", "dapo"})


@pytest.mark.slow
def test_a_plugin_name_of_two_packages_is_refused_naming_both(environment):
    keys = ["run.steps=1", "model.path=m", "data.path=d"]
    clash = run(environment, "config", "check", *keys, "algorithm.type=mine")
    assert clash.returncode == 2
    assert "algorithm 'mine' is another:Mine of second and other:Mine of first: uninstall one" in clash.stderr
    ours = run(environment, "config", "check", *keys, "algorithm.type=dapo").stderr
    assert "algorithm 'dapo' is algorithms.dapo:DAPO of rlsys and another:Mine of second: uninstall one" in ours
    for works in ("alone", "grpo", "other:Mine"):
        done = run(environment, "config", "check", *keys, f"algorithm.type={works}")
        assert done.returncode == 0, done.stderr
