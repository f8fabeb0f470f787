"""Import of user code named by `module:name`, for every configuration key that accepts it."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

from rlsys.util.files import CONFIG


def import_from_here() -> None:
    """Look modules up in the current folder too from now on, after all others, for code that a user names.

    Not in a run's folder, nor below it: what lies there is data.
    """
    here = Path.cwd()
    if str(here) not in sys.path and not any((folder / CONFIG).exists() for folder in (here, *here.parents)):
        sys.path.append(str(here))


def search_path() -> str:
    """Folders that this process looks modules up in, as other processes take them in PYTHONPATH."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)


def import_object(kind: str, spec: str, *, is_installed: bool = False) -> object:
    """Return the object named by `module:name`, which should be a `kind`, e.g. `tool`.

    The current folder is searched last, and not for what is installed. Raises `ValueError` with the reason if it cannot
    be imported, for any exception in the module.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise ValueError(f"{kind} {spec!r} is not of the form `module:name`")
    if not is_installed:
        import_from_here()
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:  # an imported module of a user may raise anything
        raise ValueError(f"cannot import {kind} {spec!r}: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        raise ValueError(f"module {module!r} has no {name!r}")
    return getattr(found, name)
