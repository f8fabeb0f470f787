"""Clusters that cannot be joined or started: an error of ours says so, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        ("head", {}, "ConfigError ray.address: cannot join 'head': "),
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
