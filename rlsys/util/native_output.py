"""Output of native code, which writes to descriptor 2 and knows nothing of `sys.stderr`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlsys.errors import Interrupted

STDERR = 2


@contextmanager
def native_output_in(log: Path) -> Iterator[None]:
    """Append what native code writes to stderr in this block to `log`, while `sys.stderr` stays where it is.

    The log also gets the traceback of an exception that ends the block, unless a user has stopped it. A log that cannot
    be opened is passed over: then native code writes where it did.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    before, terminal = sys.stderr, os.dup(STDERR)
    with suppress(OSError):  # stderr has no reader
        before.flush()
    is_same = _descriptor_of(before) == STDERR
    kept = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace")
    if is_same:
        sys.stderr = kept
    os.dup2(descriptor, STDERR)
    os.close(descriptor)
    try:
        yield
    except Interrupted:
        raise
    except Exception:
        with suppress(OSError), os.fdopen(os.dup(STDERR), "w", errors="backslashreplace") as written:
            traceback.print_exc(file=written)
        raise
    finally:
        os.dup2(terminal, STDERR)
        if sys.stderr is kept:
            sys.stderr = before
        with suppress(OSError):  # the rest of its buffer has no reader
            kept.close()


def _descriptor_of(stream: object) -> int | None:
    try:
        return stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return None
