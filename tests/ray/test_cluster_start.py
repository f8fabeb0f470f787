"""Clusters that cannot be joined or started: an error of ours says so, with the remedy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.ray.commands import wait_until
from workers.ray.cluster import ANSWER_S

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


@pytest.fixture
def silent_address() -> Iterator[str]:
    """The address of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("source", ["ray", "RAY_ADDRESS"])
def test_a_cluster_whose_head_does_not_answer_is_named_in_time(source: str, silent_address: str):
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    if source == "RAY_ADDRESS":
        env["RAY_ADDRESS"] = silent_address
    words = [sys.executable, "-c", CONNECT, silent_address if source == "ray" else ""]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=ANSWER_S + 30, check=False)
    assert done.stdout.startswith(f"ConfigError {source}: cannot join '{silent_address}': no head of a cluster answers")


@pytest.mark.usefixtures("cluster")
def test_a_start_that_failed_joins_no_other_cluster(silent_address: str):
    script = CONNECT + "\nimport ray\nray.put(1)\n"
    env = {**os.environ, "PYTHONPATH": str(Path.cwd()), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    words = [sys.executable, "-c", script, silent_address]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=ANSWER_S + 60, check=False)
    assert done.stdout.startswith("ConfigError ray: cannot join")
    assert "Ray has not been started yet" in done.stderr.splitlines()[-1]


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
