"""Workers forked from a process that has the large libraries: program, surroundings and end are as given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from workers.ray import fork_client
from workers.ray.forking import FORKED, PLAIN, ForkServer, fork_environment

pytestmark = pytest.mark.slow

TOLD = """
import os, sys
import torch
print(sys.argv[1:], os.environ["MINE"], os.getcwd(), os.nice(0), torch.get_num_threads(), "ray" in sys.modules)
assert os.getpgid(0) == os.getpid()
print(open(f"/proc/{os.getppid()}/status").read().partition("Threads:")[2].split()[0])
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""


def run(folder: Path, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(program)
    command = ["nice", "-n", "3", sys.executable, "-I", "-S", fork_client.__file__, str(path), *arguments]
    names = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=names, input="given")


def test_a_forked_program_has_all_that_it_was_started_with(forks: None, tmp_path: Path) -> None:
    done = run(tmp_path, TOLD, "a", "b c", MINE="x\ny")
    niceness = os.nice(0) + 3
    own, num_threads = done.stdout.rsplit("\n", 2)[:2]
    assert own == f"['a', 'b c'] x\ny {tmp_path} {niceness} 1 False"
    assert num_threads == "1", "a process with several threads cannot be forked safely"
    assert (done.returncode, done.stderr) == (7, "given\n")


def test_forks_share_no_random_numbers(forks: None, tmp_path: Path) -> None:
    program = "import numpy, random; print(random.random(), numpy.random.random())"
    one, other = (run(tmp_path, program).stdout.split() for _ in range(2))
    assert not {*one} & {*other}


def test_an_error_of_a_forked_program_is_printed(forks: None, tmp_path: Path) -> None:
    done = run(tmp_path, "1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("path", ["/nowhere/socket", ""])
def test_without_a_server_the_client_becomes_the_program(tmp_path: Path, path: str) -> None:
    done = run(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(5)", "a", RLSYS_FORK_SERVER=path)
    assert (done.returncode, done.stdout, done.stderr) == (5, "['a']\n", "")


def test_a_forked_program_ends_with_its_client(forks: None, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
    command = [sys.executable, "-I", "-S", fork_client.__file__, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout
        pid = int(client.stdout.readline())
        client.kill()
    until_s = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until_s


def test_only_workers_without_a_gpu_are_forked(forks: None) -> None:
    for has_gpu, script in ((False, FORKED), (True, PLAIN)):
        found = fork_environment({"A": "b"}, has_gpu=has_gpu)
        assert str(found["py_executable"]).endswith(f"/{script}")
        assert (fork_client.SERVER in cast("dict[str, str]", found["env_vars"])) == (not has_gpu)


def test_a_worker_on_a_machine_without_a_server_runs_the_python_of_the_driver(forks: None, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.executable, sys.argv[1:])")
    for has_gpu in (False, True):
        python = str(fork_environment({}, has_gpu=has_gpu)["py_executable"])
        elsewhere = python.replace("/rlsys-forks-", "/nowhere-")
        for words in (python, elsewhere):
            command = f"exec {words} {program} 'a b'"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
            assert done.stdout.split(maxsplit=1)[1] == "['a b']\n"


def test_a_server_removes_its_folder_when_its_starter_is_gone() -> None:
    server = ForkServer.start()
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert (server.process.wait(300), server.folder.exists()) == (0, False)
    server.close()
