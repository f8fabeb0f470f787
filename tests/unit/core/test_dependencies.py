"""Every imported package is a declared dependency; no module of ours shadows the standard library."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlsys.launch.doctor import normalise_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"rlsys", "workers", "algorithms", "examples", "benchmarks", "tests", "_typeshed"}
"""And the types of the standard library."""
IN_OWN_ENVIRONMENT = {
    "benchmarks/peer_trl.py": {"trl"},
    "benchmarks/group_queue.py": {"transfer_queue", "omegaconf", "tensordict"},
}
"""Packages of the peers of benchmarks, which install them."""


def imported(path: Path) -> set[str]:
    """The first names of what a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def declared(*extras: str) -> set[str]:
    """Normalised names of packages, of the core and of these extras."""
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {normalise_name(Requirement(line).name) for line in lines}


def undeclared(folder: str, packages: set[str]) -> Iterator[str]:
    """What the files of a folder import from packages that are not among these."""
    provides = metadata.packages_distributions()
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        known = OURS | sys.stdlib_module_names | IN_OWN_ENVIRONMENT.get(name, set())
        for module in sorted(imported(path) - known):
            if not packages & {normalise_name(package) for package in (module, *provides.get(module, ()))}:
                yield f"{name} imports {module}"


@pytest.mark.parametrize("folder", ["rlsys", "workers", "algorithms", "examples", "benchmarks"])
def test_what_is_imported_is_declared(folder: str) -> None:
    assert list(undeclared(folder, declared(*PROJECT["optional-dependencies"]))) == []


def test_no_module_hides_one_of_the_standard_library() -> None:
    """A script's folder is the first place where Python looks for modules."""
    found = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in found if path.stem in sys.stdlib_module_names] == []
