"""Processes that tests look at."""

from __future__ import annotations

import os
import select


def is_gone(pid: int) -> bool:
    """Does the process end within ten seconds?"""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)
