"""Client of the fork server. The raylet runs it instead of Python to start a worker, and it lasts as long as that.

    python -I -S workers/ray/fork_client.py SCRIPT ARGUMENTS...

It imports nothing of ours, so that it starts at once. Without a server, it becomes the worker itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SERVER = "RLSYS_FORK_SERVER"
"""Environment variable with the path of the server's socket."""
BEGUN = b"1"
"""Answer of a worker that has begun."""


def main() -> None:
    """Hand over arguments, environment, folder, niceness and streams; then wait for the worker, and end as it does."""
    arguments = sys.argv[1:]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "niceness": os.nice(0),
    }
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(os.environ[SERVER])
            message = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(server, [message], [0, 1, 2])
            server.sendall(message[sent:])
            is_begun = server.recv(1) == BEGUN
        except (OSError, KeyError):
            is_begun = False
        if not is_begun:
            os.execv(sys.executable, [sys.executable, *arguments])
        sys.exit(int.from_bytes(server.recv(1) or b"\1", "big"))


if __name__ == "__main__":
    main()
