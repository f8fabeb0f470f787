"""Who can reach a cluster that rlsys starts: programs of this user on this machine, and nobody else."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.by_day import first_by_day
from tests.ray.commands import DEADLINE_S, ROOT, SCRIPTS

STARTED = """
import asyncio, json, os, sys
import ray
from workers.ray.cluster import Resources, connect
from workers.ray.worker_process import start

class Idle:
    def token(self):
        return os.environ.get("RAY_AUTH_TOKEN")

    def join(self, rank, address):
        import torch
        from workers.train.rank_group import RankGroup

        self._ranks = RankGroup(rank, 2, address=address, timeout_s=60)
        return float(self._ranks.sum(torch.ones(1)))

async def begin():
    idle = start(Idle, "idle", Idle, Resources(), 90)
    ranks, address = [idle], ""
    if "ranks" in sys.argv:
        ranks += [start(Idle, "other", Idle, Resources(), 90)]
        address = await idle.address()
        sums = await asyncio.gather(*(each.call(Idle.join, rank, address) for rank, each in enumerate(ranks)))
        assert sums == [2.0, 2.0]
    return ranks, address, await idle.call(Idle.token)

for _ in range(int(sys.argv[1])):
    cluster = connect(None, 2)
    ranks, meeting, token = asyncio.run(begin())  # they end if nobody has them
    context = ray.get_runtime_context()
    session = os.path.join(context.get_temp_dir(), context.get_session_name())
    print(json.dumps([context.gcs_address, session, meeting, token]), flush=True)
    sys.stdin.readline()
    cluster.close()
"""
"""Starts clusters one after another, each with a worker, or with two `ranks`; a line on stdin ends one."""

DRIVE = """
import sys
import ray
from ray._private import ray_constants

ray_constants.ENABLE_RAY_CLUSTER = False  # else Ray looks for 127.0.0.1 at this machine's other address
ray.init(address=sys.argv[1], log_to_driver=False)
print("nodes:", len(ray.nodes()))
"""

ADD_NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

Node(RayParams(gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=1), head=False, shutdown_at_exit=True)
print("joined")
"""


NOBODY = 65534


@dataclass(frozen=True)
class Local:
    """A cluster that rlsys started."""

    pid: int
    address: str
    session: Path
    meeting: str
    """Where its two ranks met."""
    token: str | None


def environment(**changes: str) -> dict[str, str]:
    """That of the tests, without what says how Ray authenticates."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**ours, "RAY_raylet_start_wait_time_s": "90", "PYTHONPATH": str(ROOT), **changes}


def clusters(home: Path, *keys: str, count: int = 1, umask: int = -1, **changes: str) -> Iterator[Local]:
    words, pipe = [sys.executable, "-c", STARTED, str(count), *keys], subprocess.PIPE
    env = environment(HOME=str(home), **changes)
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True, umask=umask) as started:
        assert started.stdin
        assert started.stdout
        try:
            for _ in range(count):
                address, session, meeting, token = json.loads(started.stdout.readline())
                yield Local(started.pid, address, Path(session), meeting, token)
                started.stdin.write("\n")
                started.stdin.flush()
            assert started.wait(DEADLINE_S) == 0
        finally:
            started.kill()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a user who has no token."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def local(home: Path) -> Iterator[Local]:
    yield from clusters(home, "ranks")


def strangers(home: Path, program: str, address: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """What another program says, started with nothing in its environment but the way to Python."""
    env = {"PATH": f"{SCRIPTS}:/usr/bin:/bin", "HOME": str(home), "RAY_NUM_REDIS_GET_RETRIES": "1", **changes}
    words = [sys.executable, "-c", program, address]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def listening(pid: int) -> dict[str, set[str]]:
    """The addresses on which a process and its children wait for connections, by the name of the process."""
    found: dict[str, set[str]] = {}
    for process in (ours := psutil.Process(pid), *ours.children(recursive=True)):
        waiting = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        found.setdefault(process.name(), set()).update(ip.removeprefix("::ffff:") for ip in waiting)
    return found


def test_no_process_of_a_local_cluster_listens_beyond_this_machine(local: Local):
    found = listening(local.pid)
    assert {"gcs_server", "raylet", "ray::Idle"} <= found.keys()
    assert {
        name: ips for name, ips in found.items() if not all(ipaddress.ip_address(ip).is_loopback for ip in ips)
    } == {}
    assert local.address.startswith("127.0.0.1:")


@pytest.mark.parametrize("program", [DRIVE, ADD_NODE], ids=["driver", "node"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="none", marks=pytest.mark.nightly),
        pytest.param({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, id="wrong"),
    ],
)
def test_a_local_cluster_refuses_drivers_and_nodes_without_its_token(
    local: Local, tmp_path: Path, program: str, changes: dict[str, str]
):
    refused = strangers(tmp_path, program, local.address, **changes)
    assert (refused.returncode != 0, refused.stdout) == (True, "")
    assert "InvalidAuthToken" in refused.stderr


@pytest.mark.parametrize(("program", "said"), [(DRIVE, "nodes: 1\n"), (ADD_NODE, "joined\n")], ids=["driver", "node"])
def test_who_has_the_token_is_let_in(local: Local, tmp_path: Path, program: str, said: str):
    assert local.token
    owner = strangers(tmp_path, program, local.address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=local.token)
    assert (owner.returncode, owner.stdout) == (0, said), owner.stderr


def test_the_token_is_written_nowhere(local: Local, home: Path):
    assert local.token
    assert len(local.token) == 64
    assert [
        path for path in local.session.rglob("*") if path.is_file() and local.token.encode() in path.read_bytes()
    ] == []
    words = [word for process in psutil.Process(local.pid).children(recursive=True) for word in process.cmdline()]
    assert not any(local.token in word for word in words)
    assert not (home / ".ray").exists()


@pytest.mark.nightly
def test_one_process_may_start_one_cluster_after_another(home: Path):
    tokens = [cluster.token for cluster in clusters(home, count=2)]
    assert tokens[0]
    assert tokens[0] == tokens[1]


@pytest.mark.nightly
def test_a_token_of_the_user_is_used(home: Path, tmp_path: Path):
    given = "of-the-user-0123456789"
    assert [cluster.token for cluster in clusters(home, RAY_AUTH_TOKEN=given)] == [given]
    path = tmp_path / "token"
    path.write_text(given)
    for cluster in clusters(home, RAY_AUTH_TOKEN_PATH=str(path)):
        assert cluster.token is None
        joined = strangers(tmp_path, DRIVE, cluster.address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=given)
        assert joined.stdout == "nodes: 1\n", joined.stderr


NEIGHBOUR = """
import os, socket, sys
session, meeting, user = sys.argv[1:]
os.setgroups([])
os.setgid(int(user))
os.setuid(int(user))
done = []

def attempt(name, act):
    try:
        act()
    except OSError:
        return
    done.append(name)

def connect(name):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{session}/sockets/{name}")

attempt("list the session", lambda: os.listdir(session))
attempt("connect to the raylet", lambda: connect("raylet"))
attempt("connect to the store", lambda: connect("plasma_store"))
attempt("replace the raylet", lambda: os.rename(f"{session}/sockets/raylet", f"{session}/sockets/raylet.old"))
attempt("read a log", lambda: open(f"{session}/logs/raylet.out").read())
attempt("write into the session", lambda: open(f"{session}/new", "w"))
attempt("meet the ranks", lambda: open(meeting, "r+b").read())
attempt("meet other ranks", lambda: os.mkdir(os.path.dirname(meeting) + "-new"))
attempt("rename the session", lambda: os.rename(session, session + "-old"))
print(done)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user as well")
@pytest.mark.parametrize("umask", first_by_day([0o000, 0o022, 0o077]))
def test_another_user_of_the_machine_reaches_nothing_of_a_cluster(home: Path, umask: int):
    for cluster in clusters(home, "ranks", umask=umask):
        meeting = cluster.meeting.removeprefix("file://")
        assert Path(meeting).is_file()
        assert (cluster.session / "sockets/raylet").is_socket()
        words = [sys.executable, "-c", NEIGHBOUR, str(cluster.session), meeting, str(NOBODY)]
        tried = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (tried.stdout, tried.stderr) == ("[]\n", "")


def test_the_sessions_of_clusters_have_a_folder_that_nobody_else_made(tmp_path: Path):
    places = "from workers.ray.cluster import private_folder\nfor _ in range(2): print(private_folder())\n"

    def folders(parent: Path) -> list[Path]:
        env = environment(RAY_TMPDIR=str(parent))
        done = subprocess.run([sys.executable, "-c", places], env=env, capture_output=True, text=True, check=True)
        return [Path(line) for line in done.stdout.split()]

    assert folders(tmp_path) == [tmp_path, tmp_path], "which nobody else can enter"
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    mine, again = folders(shared)
    assert (mine, mine.stat().st_mode & 0o777) == (again, 0o700)
    mine.chmod(0o777)
    other, another = folders(shared)
    assert len({mine, other, another}) == 3
    assert other.stat().st_mode & 0o777 == 0o700
