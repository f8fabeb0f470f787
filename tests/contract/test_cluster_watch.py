"""What the watch over the cluster writes when it cannot run itself."""

from __future__ import annotations

import subprocess
import sys

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
