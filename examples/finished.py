"""Finished runs of a study, one line of a file each, so that an interrupted study can continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of every run in the file, in order; none if there is no file."""
    for line in path.read_text().splitlines() if path.exists() else []:
        yield json.loads(line)


def append(path: Path, result: DataclassInstance) -> None:
    """Append a finished run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")
