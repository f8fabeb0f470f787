"""A dashboard that is served by a thread of this process, for tests that ask it as a browser would."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlsys.dashboard.connections import DEFAULT_LIMITS
from rlsys.dashboard.listener import Listener
from rlsys.dashboard.serve import Dashboard
from rlsys.util.connection_limits import ConnectionLimits


@contextmanager
def served(
    folder: Path,
    host: str = "127.0.0.1",
    environ: Mapping[str, str] | None = None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
) -> Iterator[str]:
    """Its address, at a free port; it ends with the block."""
    listener = Listener.bind(host, 0, environ or {})
    dashboard = Dashboard(folder, listener, limits)
    thread = threading.Thread(target=dashboard.serve)
    thread.start()
    try:
        yield listener.url
    finally:
        dashboard.stop()
        thread.join()
