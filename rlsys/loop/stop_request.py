"""The request to end a run in order, which cuts every wait of the learner short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StopRequest:
    """Request to end after the current step. Used only in the driver's event loop."""

    def __init__(self) -> None:
        self.is_made = False
        self._waits: dict[asyncio.Timeout, float] = {}
        """What is waited for, and the seconds that each wait may last after the request."""

    def make(self) -> None:
        """Make the request; later ones change nothing."""
        if self.is_made:
            return
        self.is_made = True
        for wait, grace_s in self._waits.items():
            wait.reschedule(asyncio.get_running_loop().time() + grace_s)

    @asynccontextmanager
    async def cuts(self, grace_s: float = 0.0) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the block `grace_s` seconds after the request, and go on behind it; the yielded timeout has expired
        then.

        Every wait of the learner is in such a block.
        """
        wait = asyncio.timeout(grace_s if self.is_made else None)
        try:
            async with wait:
                self._waits[wait] = grace_s
                try:
                    yield wait
                finally:
                    del self._waits[wait]
        except TimeoutError:
            if not wait.expired():
                raise
