"""A cable with latency, for kernels without netem.

python delay_line.py offloads IFACE...      switch off what the frames below cannot have
python delay_line.py forward A B SECONDS    send each frame that arrives at A out of B after so long, and vice versa
"""

from __future__ import annotations

import array
import fcntl
import selectors
import socket
import struct
import sys
import time
from collections import deque

SIOCETHTOOL = 0x8946
OFFLOADS = {"tx": 0x17, "rx": 0x15, "sg": 0x19, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
"""Commands of ethtool that set them."""
EVERY_PROTOCOL, OUTGOING = 0x0003, 23
LONGEST_FRAME, BUFFER_BYTES = 65600, 2**25
SO_FORCE = (32, 33)
"""SO_SNDBUFFORCE, SO_RCVBUFFORCE."""


def switch_off(interface: str) -> None:
    """Switch off checksums by the card, and frames longer than the MTU: a forwarder would send them as they are."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for command in OFFLOADS.values():
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(probe, SIOCETHTOOL, request)


def forward(first: str, second: str, delay_s: float) -> None:
    """Pass frames on between two interfaces, each after `delay_s`; never returns."""
    ends = [_open(first), _open(second)]
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    with selectors.DefaultSelector() as selector:
        for place, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, place)
        while True:
            due = [queue[0][0] for queue in waiting if queue]
            for key, _ in selector.select(max(0.0, min(due) - time.monotonic()) if due else None):
                _take_all(ends[key.data], waiting[key.data], delay_s)
            now = time.monotonic()
            for place, queue in enumerate(waiting):
                while queue and queue[0][0] <= now:
                    _send(ends[1 - place], queue.popleft()[1])


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    end.bind((interface, EVERY_PROTOCOL))
    end.setsockopt(263, OUTGOING, 1)  # SOL_PACKET, PACKET_IGNORE_OUTGOING: not what this process sends
    for option in SO_FORCE:
        end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    end.setblocking(False)
    return end


def _take_all(end: socket.socket, queue: deque[tuple[float, bytes]], delay_s: float) -> None:
    while True:
        try:
            frame = end.recv(LONGEST_FRAME)
        except BlockingIOError:
            return
        queue.append((time.monotonic() + delay_s, frame))


def _send(end: socket.socket, frame: bytes) -> None:
    try:
        end.send(frame)
    except OSError:  # a full buffer, or a cable that is pulled: lost, as on any other
        return


if __name__ == "__main__":
    if sys.argv[1] == "offloads":
        for name in sys.argv[2:]:
            switch_off(name)
    else:
        forward(sys.argv[2], sys.argv[3], float(sys.argv[4]))
