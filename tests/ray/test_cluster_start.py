"""Clusters that cannot be joined or started: an error of ours says so, with the remedy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ray.commands import wait_until

CONNECT = """
import sys
from rlsys.errors import RlsysError
from workers.ray.cluster import connect

try:
    connect(sys.argv[1] or None, 2)
except RlsysError as error:
    print(type(error).__name__, str(error))
"""


@pytest.mark.parametrize(
    ("address", "changes", "says"),
    [
        ("", {}, "ClusterError a local Ray cluster did not start: "),
        ("head", {}, "ConfigError ray: cannot join 'head': "),
        (
            "",
            {"RAY_ADDRESS": "ray://127.0.0.1:1"},
            "ConfigError RAY_ADDRESS=ray://127.0.0.1:1: a driver must run inside",
        ),
    ],
)
def test_a_cluster_that_cannot_start_or_be_joined_is_named(
    address: str, changes: dict[str, str], says: str, tmp_path: Path
):
    long = {"RAY_TMPDIR": str(tmp_path / (99 * "x"))}  # too long for Ray's sockets
    env = {**os.environ, "PYTHONPATH": str(Path.cwd()), **long, **changes}
    words = [sys.executable, "-c", CONNECT, address]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.startswith(says), done.stdout + done.stderr


def raylets_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if child.name() == "raylet"]


@pytest.mark.nightly
def test_a_cluster_that_starts_too_slowly_is_started_once_more():
    script = CONNECT + "\nimport ray\nprint(ray.cluster_resources()['CPU'])\n"
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    starting = subprocess.Popen([sys.executable, "-c", script, ""], env=env, stdout=subprocess.PIPE, text=True)
    process = psutil.Process(starting.pid)
    wait_until(lambda: bool(raylets_of(process)))
    slow = raylets_of(process)[0]
    slow.send_signal(signal.SIGSTOP)
    said, _ = starting.communicate(timeout=120)
    assert said == "2.0\n"
    assert not slow.is_running()
