"""A server with the interface of S3, whose objects are in its memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.processes import free_port, is_open
from tests.ray.commands import wait_until


def words_of_server(host: str, port: int) -> tuple[str, ...]:
    """Return the command that starts the server."""
    return (sys.executable, "-m", "moto.server", "-H", host, "-p", str(port))


def environment_of(host: str, port: int) -> Mapping[str, str]:
    """Return the variables with which clients reach it."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def object_store() -> Iterator[Mapping[str, str]]:
    """Start a server on this machine; yields the variables for its clients."""
    port = free_port()
    words, quiet = words_of_server("127.0.0.1", port), subprocess.DEVNULL
    with subprocess.Popen(words, stdout=quiet, stderr=quiet) as process:
        try:
            wait_until(lambda: is_open(port) or process.poll() is not None)
            yield environment_of("127.0.0.1", port)
        finally:
            process.kill()
