"""Bounded logs of servers: who asks for errors all day must not fill a disk."""

from __future__ import annotations

import logging
import time

LINES_PER_MINUTE = 20


class BoundedLog(logging.Filter):
    """Filter that passes `LINES_PER_MINUTE` records a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._minute, self._num_passed = 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is one of the first of its minute."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._num_passed = minute, 0
        self._num_passed += 1
        return self._num_passed <= LINES_PER_MINUTE
