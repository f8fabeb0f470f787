"""Dashboard server: `rlsys dashboard`, standalone or as the child of a run.

    listener = Listener.bind("127.0.0.1", 0)
    print(listener.url)
    Dashboard(Path("runs"), listener).serve()

It listens from the first line on; earlier requests wait until `serve`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from typing import BinaryIO, NoReturn

import uvicorn
from sse_starlette.sse import AppStatus

from rlsys.dashboard.connections import DEFAULT_LIMITS, protocol_of
from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.http_server import app_of
from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.index_followers import IndexFollowers
from rlsys.dashboard.listener import Listener
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.query.table_queries import Tables
from rlsys.dashboard.security import Guard
from rlsys.dashboard.stream import Changes
from rlsys.util.connection_limits import ConnectionLimits
from rlsys.util.logs import BoundedLog

_GOODBYE_S = 2
"""Time for open requests to end when the dashboard ends."""
_NICE = 10
"""Priority, lower than that of a run on the same machine."""


class Dashboard:
    """Server of a folder of runs, or of one run, at a listener."""

    def __init__(self, folder: Path, listener: Listener, limits: ConnectionLimits = DEFAULT_LIMITS) -> None:
        """Raises `NoSuch` if the folder does not exist."""
        if not folder.is_dir():
            raise NoSuch(f"{folder} is no folder: give the directory of a run, or a folder of them")
        readings = Readings(folder)
        changes = Changes(readings)
        self._folder, self._indexes = RunFolder(folder.resolve(), "."), IndexFollowers()
        config = uvicorn.Config(
            Guard(app_of(readings, Tables(readings, self._indexes), changes), listener.access),
            loop="asyncio",
            http=protocol_of(limits),
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,  # it would contain the token
            server_header=False,
            limit_concurrency=limits.num_open,
            timeout_keep_alive=ceil(limits.request_s),
            timeout_graceful_shutdown=_GOODBYE_S,
        )
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(BoundedLog())
        self._server, self._socket = _Server(config, changes), listener.socket

    def serve(self) -> None:
        """Serve until `stop`, Ctrl-C or SIGTERM."""
        self._indexes.start()
        with suppress(KeyboardInterrupt):  # uvicorn has already shut down properly
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `serve`, from any thread."""
        self._server.should_exit = True

    def serve_beside(self, pipe: BinaryIO) -> NoReturn:
        """Serve as the child of a run, at low priority, until the run ends in any way, which closes `pipe`.

        Then this process ends at once: its interpreter might wait for ever for a thread that is in an index.
        """

        def wait() -> None:
            pipe.read()
            self.stop()

        os.nice(_NICE)
        self._indexes.want(self._folder, inf)
        threading.Thread(target=wait, daemon=True).start()
        self.serve()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Server(uvicorn.Server):
    """Server that ends the event streams before it waits for open connections, because streams never end otherwise."""

    def __init__(self, config: uvicorn.Config, changes: Changes) -> None:
        super().__init__(config)
        AppStatus.disable_automatic_graceful_drain()  # which would cut the streams before their last event
        self._changes = changes

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._changes.close()
        await super().shutdown(sockets)
