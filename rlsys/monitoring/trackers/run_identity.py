"""Id of a run in an external service, stored in the run directory, so that a resumed run keeps the id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def kept_id(path: Path, make: Callable[[], str]) -> str:
    """Read the id from the file; if there is no file, make an id and write it."""
    if path.exists():
        return json.loads(path.read_text())["id"]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({"id": made}) + "\n")
    partial.replace(path)  # atomic: the file is always complete
    return made
