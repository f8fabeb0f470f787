"""Files whose functions are called in a run, in all of its processes.

A copy of this file, as `sitecustomize.py` in a folder of PYTHONPATH, is imported by every process at its start. It
follows all forks, and threads that C++ started from their first garbage collection. While there is a file `on` in that
folder, it appends each file to `PID.txt` there at the first call of one of its functions.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(__file__).parent
POLL_S = 0.02
"""Seconds between two looks for the file `on`, which cannot notify all processes."""
_seen: set[str] = set()
_is_on = False


def follow() -> None:
    """Note calls in all Python threads of this process from now."""
    threading.Thread(target=_watch, daemon=True).start()
    threading.settrace(_note)
    sys.settrace(_note)
    gc.callbacks.append(lambda phase, info: sys.settrace(_note))


def _watch() -> None:
    global _is_on
    while True:
        _is_on = (FOLDER / "on").exists()
        time.sleep(POLL_S)


def _note(frame: FrameType, event: str, argument: object) -> None:
    name = frame.f_code.co_filename
    if _is_on and name not in _seen:
        _seen.add(name)
        with (FOLDER / f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{name}\n")


if __name__ == "sitecustomize":
    os.register_at_fork(after_in_child=follow)
    follow()
