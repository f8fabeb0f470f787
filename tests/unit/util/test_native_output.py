"""Native code writes to a log while Python goes on writing to its stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.errors import Interrupted
from rlsys.util.native_output import native_output_in

WRITES = """
import os, sys
from pathlib import Path
from rlsys.util.native_output import native_output_in

with native_output_in(Path(sys.argv[1])):
    os.write(2, b"native inside\\n")
    sys.stderr.write("python inside\\n")
os.write(2, b"native after\\n")
sys.stderr.write("python after\\n")
"""


def stderr_with(log: Path) -> str:
    words = [sys.executable, "-c", WRITES, str(log)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd=Path.cwd()).stderr


def test_native_output_goes_to_the_log(tmp_path: Path):
    log = tmp_path / "logs" / "driver.log"
    assert stderr_with(log) == "python inside\nnative after\npython after\n"
    assert log.read_text() == "native inside\n"


@pytest.mark.parametrize(
    ("error", "is_written"), [(RuntimeError("no more memory"), True), (Interrupted("stop", 2), False)]
)
def test_a_crash_leaves_its_traceback_in_the_log(tmp_path: Path, error: Exception, is_written: bool):
    log = tmp_path / "logs" / "driver.log"
    with pytest.raises(type(error)), native_output_in(log):
        raise error
    assert ("Traceback (most recent call last)" in log.read_text()) is is_written
    assert ("RuntimeError: no more memory" in log.read_text()) is is_written


LOST = """
import os, sys
from pathlib import Path
from rlsys.util.native_output import native_output_in

reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(reader)
try:
    with native_output_in(Path(sys.argv[1])):
        try:
            sys.stderr.write("a line that nobody reads\\n")
        except BrokenPipeError:
            pass
        raise KeyError("the reason")
except KeyError:
    sys.exit(77)
"""


def test_a_block_ends_with_its_own_error_though_nobody_reads_stderr(tmp_path: Path):
    words = [sys.executable, "-c", LOST, str(tmp_path / "driver.log")]
    assert subprocess.run(words, timeout=60, check=False, cwd=Path.cwd()).returncode == 77


def test_a_log_that_cannot_be_opened_is_passed_over(tmp_path: Path):
    (tmp_path / "logs").touch()
    lines = ["native inside", "python inside", "native after", "python after"]
    assert stderr_with(tmp_path / "logs" / "driver.log").splitlines() == lines
