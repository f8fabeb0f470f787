"""What a run is called elsewhere, kept in its directory, so that a resumed run goes on under the same name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def kept_id(path: Path, make: Callable[[], str]) -> str:
    """The id that the file holds; if there is none yet, a new one, which it holds from then on."""
    if path.exists():
        return json.loads(path.read_text())["id"]
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({"id": made}) + "\n")
    partial.replace(path)  # it is whole whenever it is there
    return made
