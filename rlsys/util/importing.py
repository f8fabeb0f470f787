"""What `module:name` names: one road to code of the user's, for every key that takes it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def import_from_here() -> None:
    """Let `module:name` mean the folder one is in, as `python -m` would."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def imported(kind: str, spec: str) -> object:
    """What `module:name` names, which is to be a `kind`, e.g. `tool`.

    Raises `ValueError` saying why there is none, whatever the module raised as it was imported.
    """
    module, _, name = spec.partition(":")
    if not (module and name):
        raise ValueError(f"{kind} {spec!r} is not of the form `module:name`")
    import_from_here()
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:  # what a module does when it is imported is its author's
        raise ValueError(f"cannot import {kind} {spec!r}: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        raise ValueError(f"module {module!r} has no {name!r}")
    return getattr(found, name)
