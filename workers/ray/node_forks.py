"""Fork servers on the nodes of a cluster that runs already: its workers import the large libraries once per node."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from rlsys.errors import WorkerError
from rlsys.util.deadlines import timeout
from workers.ray import fork_client
from workers.ray.cluster import NO_MATHS, node_ids
from workers.ray.forking import ForkServer
from workers.ray.worker_process import Remote, start

START_S = 30.0
"""Seconds for the server of a node to listen; its imports go on then."""


class ForkHost:
    """Keeps the fork server of a node. It ends with this process, and this with the job."""

    def __init__(self, folder: Path) -> None:
        """Start the server in a folder of this node."""
        self._server = ForkServer.start(folder)

    def close(self) -> None:
        """End the server."""
        self._server.close()


@asynccontextmanager
async def forked_workers() -> AsyncIterator[None]:
    """Fork workers that start in the block, on every node that is alive when it begins; in a local cluster they are
    forked anyway.

    A worker on a later node, or on one whose server does not start, imports the libraries by itself.
    """
    if fork_client.SERVER in os.environ:
        yield
        return
    folder = Path("/tmp", f"rlsys-forks-{secrets.token_hex(6)}")  # the same path on every node
    hosts = [
        start(ForkHost, f"forks-{node[:8]}", partial(ForkHost, folder), NO_MATHS, START_S, place=node)
        for node in node_ids()
    ]

    try:
        await asyncio.gather(*map(_begin, hosts))
        os.environ[fork_client.SERVER] = str(folder / "socket")
        yield
    finally:
        os.environ.pop(fork_client.SERVER, None)
        await asyncio.gather(*(host.end() for host in hosts))


async def _begin(host: Remote[ForkHost]) -> None:
    """Return once the server listens, or cannot: workers there start without it."""
    with suppress(WorkerError, TimeoutError):
        async with timeout(START_S):
            await host.setup()
