"""The network that collectives of this process use: the interface with the address that Ray knows its node by.

Gloo looks up the host's own name, which Debian gives the address 127.0.1.1: no other host reaches it there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil
import ray

from rlsys.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables with the name of the interface; NCCL takes the beginning of a name, or `=NAME`."""
_LIBRARIES = ("GLOO_", "NCCL_")
_LISTENERS: dict[tuple[str, int], socket.socket] = {}
"""Sockets that listen, by address and port: between the choice of a port and its use, no other process takes it."""


def environment_of(interface: str) -> Mapping[str, str]:
    """Return the variables of Gloo and NCCL for a worker: those of this process, and an interface if one is named."""
    own = {name: value for name, value in os.environ.items() if name.startswith(_LIBRARIES)}
    return own | ({GLOO: interface, NCCL: f"={interface}"} if interface else {})


def use_interface() -> None:
    """Let Gloo and NCCL in this process use the interface of the node's address, where the environment names none."""
    if interface := _interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault(GLOO, interface)
        os.environ.setdefault(NCCL, f"={interface}")


def own_address() -> str:
    """Return the address of this host on the interface that Gloo uses; without such a one, that of the node."""
    found = psutil.net_if_addrs().get(os.environ.get(GLOO, ""), [])
    addresses = [each.address for each in found if each.family == socket.AF_INET]
    node = ray.util.get_node_ip_address()
    return node if node in addresses or not addresses else addresses[0]


def listen(address: str, ports: tuple[int, int] | None) -> int:
    """Listen on a free TCP port, in a range if there is one, until `take_listener`; return the port. Raises
    `ConfigError` if none is free."""
    for port in range(ports[0], ports[1] + 1) if ports else (0,):
        try:
            listener = socket.create_server((address, port))
        except OSError:
            continue
        taken = listener.getsockname()[1]
        _LISTENERS[address, taken] = listener
        return taken
    raise ConfigError(f"train.network.ports: none of {ports} is free on {socket.gethostname()} ({address})")


def take_listener(address: str, port: int) -> socket.socket:
    """Return the socket that listens there: the one of `listen` in this process, or a new one."""
    return _LISTENERS.pop((address, port), None) or socket.create_server((address, port))


def _interface_of(address: str) -> str | None:
    return next(
        (name for name, found in psutil.net_if_addrs().items() if any(each.address == address for each in found)), None
    )
