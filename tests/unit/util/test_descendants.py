"""The end of all that a process started, where one such process starts another."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rlsys.util.descendants import launcher_command
from tests.processes import Holders, stray

pytestmark = pytest.mark.slow

INNER = {
    "a launcher": "subprocess.run(descendants.launcher_command(COMMAND), start_new_session=True)",
    "a process that marks its own": """
if os.fork():
    signal.pause()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent, as reward processes do
descendants.end_descendants_with_this()
subprocess.run(COMMAND)
""",
}


@pytest.mark.parametrize("inner", INNER)
def test_what_an_inner_process_started_ends_with_the_outer_one(tmp_path: Path, inner: str):
    imports = "import ctypes, os, signal, subprocess; from rlsys.util import descendants\n"
    with closing(Holders(tmp_path)) as holders:
        code = imports + INNER[inner].replace("COMMAND", repr([*stray("a daemon", holders.pipe, "hang")]))
        with subprocess.Popen(launcher_command([sys.executable, "-c", code]), start_new_session=True) as launcher:
            assert holders.have_started()
            launcher.terminate()
        assert holders.are_gone()


def test_the_launcher_ends_with_the_exit_code_of_its_program():
    codes = [
        subprocess.run(launcher_command(["sh", "-c", program]), start_new_session=True, check=False).returncode
        for program in ("exit 0", "exit 3", "kill -9 $$")
    ]
    assert codes == [0, 3, 137]


def test_too_low_a_limit_of_file_locks_says_why():
    command = ["bash", "-c", 'ulimit -x 1000; exec "$@"', "bash", *launcher_command(["true"])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, "1000 is too low" in ran.stderr) == (1, True)


def test_a_launcher_leaves_its_caller_nobody_to_reap():
    code = """
import ctypes, psutil, subprocess
PR_SET_CHILD_SUBREAPER = 36  # what ends without a parent comes to this process, as to the first one of a container
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
from rlsys.util.descendants import launcher_command
subprocess.run(launcher_command(["true"]), check=True)
print(psutil.Process().children())
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
