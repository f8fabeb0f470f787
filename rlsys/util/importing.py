"""Import of user code named by `module:name`, for every configuration key that accepts it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def import_from_here() -> None:
    """Make `module:name` resolve in the current folder, as `python -m` does."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def import_object(kind: str, spec: str) -> object:
    """Return the object named by `module:name`, which should be a `kind`, e.g. `tool`.

    Raises `ValueError` with the reason if it cannot be imported, for any exception in the module.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise ValueError(f"{kind} {spec!r} is not of the form `module:name`")
    import_from_here()
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:  # an imported module of a user may raise anything
        raise ValueError(f"cannot import {kind} {spec!r}: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        raise ValueError(f"module {module!r} has no {name!r}")
    return getattr(found, name)
