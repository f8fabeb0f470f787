"""Foreign text in terminals and files: text of data, models, tools and file names, and errors that quote it."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from unicodedata import category

from rlsys.errors import RlsysError

_HALVES = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace each character that a terminal would obey or hide by `\N{REPLACEMENT CHARACTER}`.

    Everything that rlsys prints passes through here, except JSON, which escapes such characters.
    """
    return "".join(c if _is_shown(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def encodable(text: str) -> str:
    """Replace each half of a surrogate pair by `\N{REPLACEMENT CHARACTER}`: UTF-8, and so JSON, has no form for it."""
    return text if text.isascii() else _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)


def print_note(text: str) -> None:
    """Print a line on stderr. If stderr is closed or its disk is full, the line is lost, and the run goes on."""
    _print("stderr", text)


def print_result(text: str) -> None:
    """Print lines on stdout. A reader that has ended loses them, and the exit code stays.

    Raises `RlsysError` if they cannot be written for another reason, such as a full disk.
    """
    problem = _print("stdout", text)
    if problem is not None and problem.errno != errno.EPIPE:
        raise RlsysError(f"cannot write the result to stdout: {problem.strerror or problem}")


def _print(name: str, text: str) -> OSError | None:
    """Print text on a stream; return why it is lost."""
    stream = getattr(sys, name)
    if stream is None:  # it was closed before the start
        return None
    try:
        stream.write(printable(text) + "\n")
        stream.flush()
    except (OSError, ValueError) as error:
        setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  (what it buffers would fail again at the end)
        return error if isinstance(error, OSError) else None
    return None


def _is_shown(c: str) -> bool:
    return c.isprintable() or c in "\n\t" or category(c) == "Zs"
