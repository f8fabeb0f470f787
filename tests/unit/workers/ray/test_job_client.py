"""Jobs of a job server: the command of a new one, and logs whose connection stays open though the server is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from rlsys.errors import ClusterError
from workers.ray.job_client import JobClient


class OpenLogs:
    """Client of a job server that sends these lines, and never closes the connection."""

    def __init__(self, statuses: Iterator[JobStatus | None], *lines: str) -> None:
        """`statuses`: answers about the job; with None there is no answer."""
        self._statuses, self._lines = statuses, lines

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for line in self._lines:
            yield line
        await asyncio.Event().wait()

    def get_job_info(self, job_id: str) -> SimpleNamespace:
        status = next(self._statuses)
        if status is None:
            threading.Event().wait()
        return SimpleNamespace(status=status, driver_exit_code=None)


def follow(statuses: list[JobStatus | None], *, answer_s: float = 60.0) -> tuple[int, list[str]]:
    """Return the exit code of a job with two lines of logs, and what was written of them."""
    client = OpenLogs(iter(statuses), "one\n", "two\n")
    jobs = JobClient("http://head:8265", cast("JobSubmissionClient", client), silence_s=0.02, answer_s=answer_s)
    written: list[str] = []
    return asyncio.run(jobs.follow("sums-1", written.append)), written


def test_following_ends_with_the_job_though_its_logs_stay_open() -> None:
    ended = JobStatus.FAILED
    assert follow([JobStatus.RUNNING, JobStatus.RUNNING, ended, ended]) == (1, ["one\n", "two\n"])


def test_a_job_server_that_does_not_answer_ends_the_following() -> None:
    with pytest.raises(ClusterError, match=r"^http://head:8265 has not answered for 0\.1 s; .*: follow it again$"):
        follow([JobStatus.RUNNING, None], answer_s=0.1)


class Shell:
    """Client of a job server that runs a job at once, in its working directory, with the path that Ray sets."""

    def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict, metadata: dict) -> str:
        folder = runtime_env["working_dir"]
        path = os.pathsep.join([*(str(Path(module).parent) for module in runtime_env["py_modules"]), folder])
        python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {**os.environ, "PYTHONPATH": path, "PATH": python}
        return subprocess.run(
            ["sh", "-c", entrypoint], cwd=folder, env=env, check=True, capture_output=True, text=True
        ).stdout


def test_a_package_of_the_working_directory_does_not_hide_ours(tmp_path: Path) -> None:
    (tmp_path / "rlsys").mkdir()
    (tmp_path / "rlsys" / "__init__.py").write_text("raise ImportError('the package of the user')\n")
    jobs = JobClient("http://head:8265", cast("JobSubmissionClient", Shell()))
    assert "Train a model" in jobs.submit("sums-1", ["--help"], tmp_path)
