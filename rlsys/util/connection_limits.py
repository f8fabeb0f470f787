"""Limits of a server's connections: their number, and the time that requests and answers may take."""

from __future__ import annotations

import resource
from dataclasses import dataclass

SPARE = 64
"""Connections over the limit that stay open until they are answered 503. Each further one is closed at once."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits that leave room for clients, and none for a client that only holds connections open."""

    most: int = 2048
    """Open connections. A request over a later one is answered 503, and that connection closed."""
    request_s: float = 30.0
    """Seconds from the connection, or from the last response, to the end of the next request's headers. Then the
    connection is closed. `httpx` reuses none after 5 s and `aiohttp` none after 15 s: none of theirs is closed during a
    request."""
    body_s: float = 30.0
    """Seconds from the headers of a request to the end of its body."""
    answer_s: float = 30.0
    """Seconds until the client has read an answer, but for what fits into buffers. Then the connection is closed."""

    @property
    def num_open(self) -> int:
        """`most`, or half of the files that this process may open if these are fewer. The other half is for its work:
        a server without free files can accept no connection, and logs that without end."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.most if files == resource.RLIM_INFINITY else min(self.most, files // 2)
