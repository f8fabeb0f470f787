"""Listener of a dashboard: a bound socket, its access rules, and the URL to open."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from rlsys.dashboard.security import TOKEN_VARIABLE, Access, is_loopback
from rlsys.errors import ConfigError


@dataclass(frozen=True)
class Listener:
    """Socket that accepts connections; they wait until a server handles them."""

    socket: socket.socket
    access: Access

    @classmethod
    def bind(cls, host: str, port: int, environ: Mapping[str, str] = os.environ) -> Listener:
        """Bind `port` of `host`, any free port if it is 0; see `Access.of`.

        A host name is looked up first, which may take long. Raises `ConfigError` if the port is in use or not
        permitted, or the host is not an address of this machine.
        """
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = socket.create_server(address[:2], family=family)
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a body would wait 40 ms for its header's ack
        except (OSError, ValueError) as error:  # ValueError: an invalid name such as `my..host`
            raise ConfigError(f"cannot listen on port {port} of {host}: {remedy_of(error)}") from None
        return cls(bound, _access(bound, environ))

    @classmethod
    def from_descriptor(cls, fd: int, environ: Mapping[str, str] = os.environ) -> Listener:
        """Socket bound and passed on by the parent process, with the token in the environment."""
        bound = socket.socket(fileno=fd)
        return cls(bound, _access(bound, environ))

    @property
    def url(self) -> str:
        """URL to open in a browser, with the token if there is one."""
        host, port = self.socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        return address if self.access.token is None else f"{address}?token={quote(self.access.token, safe='')}"

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment variables with which a child can be `from_descriptor` with the same token."""
        return {} if self.access.token is None else {TOKEN_VARIABLE: self.access.token}


def remedy_of(error: OSError | ValueError) -> str:
    """Reason why no socket could be bound, and the key to set."""
    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"{error.strerror}; set the port of `dashboard`, or --port: one above 1023, or 0 for any that is free"
    what = error.strerror if isinstance(error, OSError) else error
    return f"{what}; set the host of `dashboard`, or --host: an address of this machine, 127.0.0.1 for instance"


def _access(bound: socket.socket, environ: Mapping[str, str]) -> Access:
    host, port = bound.getsockname()[:2]
    return Access.of(is_loopback(host), port, environ)
