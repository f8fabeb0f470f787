"""Files: written whole, forced onto the disk, and told from names on the hub."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def flush(folder: Path, files: Iterable[Path]) -> None:
    """Force some files of a folder, and its list of names, onto the disk. Ranks flush what they write themselves."""
    for path in [*(f for f in files if f.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole whenever it is there."""
    partial = path.with_suffix(".tmp")
    partial.write_text(text)
    partial.replace(path)


def can_be_hub_name(path: str) -> bool:
    """Whether a model's path can be `name` or `org/name` on the hub; it is one if no folder is called so."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))
