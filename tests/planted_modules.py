"""A folder with a module of every name that a command might import: what runs of them leaves its name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

MODULE = """\
import sys, os
with open({marks!r}, "a") as file:
    file.write({name!r} + " ")
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != {folder!r}]
del sys.modules[{name!r}]
import {name}
"""
MARKS = "ran"
COMMAND = "import sys\nfrom rlsys.__main__ import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"


@cache
def names() -> frozenset[str]:
    """Names of all modules of Python and of installed packages, but our own, and some that nobody has."""
    installed = {name for name in packages_distributions() if name.isidentifier()}
    own = {"rlsys", "workers", "algorithms", "tests", "this", "antigravity"}
    return frozenset((installed | set(sys.stdlib_module_names) | {"flash_attn", "sitecustomize"}) - own)


def plant(folder: Path) -> None:
    """Write the modules. Each notes that it ran, and is then what it hides."""
    for name in names():
        text = MODULE.format(marks=str(folder / MARKS), name=name, folder=str(folder))
        (folder / f"{name}.py").write_text(text)


def planted_that_ran(folder: Path, arguments: Sequence[str], script: Path) -> str:
    """Run `rlsys ARGUMENTS` in a planted folder, with a command as pip installs it at `script`. Returns the modules
    that ran. Raises `AssertionError` with what the command printed if it fails."""
    script.write_text(COMMAND)
    (folder / MARKS).write_text("")
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    ended = subprocess.run(
        [sys.executable, script, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return (folder / MARKS).read_text()
