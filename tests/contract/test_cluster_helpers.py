"""The watch over the cluster and the server of forks, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOLDER = """\
import asyncio, ctypes, os, socket
from workers.ray.cluster_watch import STUCK_S, ClusterWatch

head = socket.create_server(("127.0.0.1", 0))

async def hold_the_lock():
    async with ClusterWatch(head.getsockname(), os.getpid(), "", "").during():
        await asyncio.sleep(1.5)
        ctypes.PyDLL(None).sleep(int(STUCK_S) + 3)
        os._exit(0)

asyncio.run(hold_the_lock())
"""


@pytest.mark.nightly
def test_native_code_that_holds_pythons_lock_is_named_by_the_stacks_of_all_threads() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER], capture_output=True, text=True, timeout=60, check=True)
    assert "Timeout (0:00:20)!" in done.stderr
    assert "in hold_the_lock" in done.stderr and "cluster_watch.py" in done.stderr


def test_a_folder_for_temporary_files_that_is_too_long_for_sockets_holds_none(tmp_path: Path) -> None:
    folder = tmp_path / (110 * "x")
    folder.mkdir()
    start = (
        "from workers.ray.forking import ForkServer; server = ForkServer.start(); print(server.folder); server.close()"
    )
    env = {**os.environ, "TMPDIR": str(folder)}
    env.pop("RAY_TMPDIR", None)
    done = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    assert done.stdout.startswith("/tmp/") and not list(folder.iterdir())
