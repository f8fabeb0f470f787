"""Jobs on a running cluster, over Ray's job server: submitted, followed, stopped.

    jobs = JobClient.at("http://HEAD:8265")
    job_id = jobs.submit("sums-1a2b3c", ["run.yaml", "train.lr=1e-5"], Path("."))
    exit_code = asyncio.run(jobs.follow(job_id, print))

A job runs `rlsys train` of this process's own version: its packages are shipped with the working directory, so that the
image of the cluster needs only what they import. It goes on when the process that submitted it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import aiohttp
from ray._private.runtime_env.packaging import get_excludes_from_ignore_files
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from rlsys.errors import ClusterError, ConfigError

PACKAGES = ("rlsys", "workers", "algorithms")
IGNORED = ".rayignore"
STOP_S = 900
"""Seconds that a job has to save itself after `stop`; Ray's own are 3."""
READY_S = 120.0
"""Seconds that a cluster which has just started has until it takes jobs."""
_NOT_READY = "No available agent"
"""In Ray's error if no node has told its head yet that it can start a job."""
_SERVER = "RAY_API_SERVER_ADDRESS"
_ARGUMENTS = "rlsys.arguments"
"""Key in a job's metadata with the arguments of `rlsys train`, as JSON."""
_SHIPPED = "rlsys_shipped"
_WHERE = f"python -c 'import {_SHIPPED}; print(*{_SHIPPED}.__path__)'"
"""Command that prints the folder to which the packages were unpacked: Ray puts its parent on the path."""
_ENDED = {JobStatus.SUCCEEDED: 0, JobStatus.FAILED: 1, JobStatus.STOPPED: 143}
"""Exit code by the state of a job that has ended."""


@dataclass(frozen=True)
class JobClient:
    """Jobs of the cluster whose job server is at `address`. Methods raise `ClusterError` if that fails."""

    address: str
    _client: JobSubmissionClient
    silence_s: float = 30.0
    """Seconds without a line of a job after which its status is asked for."""
    answer_s: float = 20.0
    """Seconds that the job server has to answer that."""

    @classmethod
    def at(cls, address: str | None) -> JobClient:
        """Connect to `address`, or else to RAY_API_SERVER_ADDRESS or RAY_ADDRESS. Raises `ConfigError` without any, and
        `ClusterError` if no job server answers there, or it asks for a token that this process has not."""
        source, found = _first_address(address)
        if not found.startswith(("http://", "https://")):
            raise ConfigError(f"{source}={found}: not the address of a job server, which begins with http://")
        _quiet()
        os.environ[_SERVER] = found  # Ray prefers the environment to its argument
        with _reaching(found):
            return cls(found, JobSubmissionClient(found))

    def submit(self, job_id: str, arguments: Sequence[str], working_dir: Path) -> str:
        """Submit `rlsys train` with these arguments, to run in a copy of `working_dir`; return the job's id.

        A cluster that has just started is asked again, for `READY_S`, until one of its nodes takes the job.
        """
        os.environ["RAY_RUNTIME_ENV_IGNORE_GITIGNORE"] = "1"  # `.rayignore` alone decides
        # -P: a package of the working directory may have the name of one of ours
        command = f'exec env PYTHONPATH="$({_WHERE}):$PYTHONPATH" python -P -m rlsys.cli train {shlex.join(arguments)}'
        with _own_packages() as folder, _reaching(self.address):
            environment = {
                "working_dir": str(working_dir),
                "py_modules": [str(folder)],
                "excludes": ["**/__pycache__/"],
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S), "OMP_NUM_THREADS": "1"},
            }
            until = time.monotonic() + READY_S
            while True:
                try:
                    return self._client.submit_job(
                        entrypoint=command,
                        submission_id=job_id,
                        runtime_env=environment,
                        metadata={_ARGUMENTS: json.dumps(list(arguments))},
                    )
                except RuntimeError as error:
                    if _NOT_READY not in str(error) or time.monotonic() > until:
                        raise
                    time.sleep(1.0)

    def arguments_of(self, job_id: str) -> list[str]:
        """Return the arguments of a job that `submit` began. Raises `ConfigError` for any other job."""
        with _reaching(self.address):
            info = self._client.get_job_info(job_id)
        found = (info.metadata if info else None) or {}
        if _ARGUMENTS not in found:
            raise ConfigError(f"job {job_id} was not submitted by `rlsys submit`: give its configuration instead")
        return [str(argument) for argument in json.loads(found[_ARGUMENTS])]

    async def follow(self, job_id: str, write: Callable[[str], object]) -> int:
        """Pass on what the job has printed and prints, until it ends; return its exit code.

        Waits for the job server to send lines, and to close the connection when the job has ended. Unblocked also by an
        end of the job, or of the job server, that the connection does not show: see `_next_lines`.
        """
        with _reaching(self.address):
            logs = self._client.tail_job_logs(job_id)
            while (lines := await self._next_lines(job_id, logs)) is not None:
                write(lines)
            status, exit_code = await self._status(job_id)
        if status not in _ENDED:
            raise ClusterError(f"{self.address} closed the logs of job {job_id}, which is {status}: follow it again")
        return exit_code or _ENDED[status]

    async def _next_lines(self, job_id: str, logs: AsyncIterator[str]) -> str | None:
        """Return the next lines of a job's logs; None if they have ended.

        Their connection has no heartbeat: after every `silence_s` without a line, the job server is asked for the
        status of the job. If the job has ended, its last lines may still come until the next silence is over.
        """
        following, has_ended = asyncio.ensure_future(anext(logs, None)), False
        try:
            while not (await asyncio.wait([following], timeout=self.silence_s))[0]:
                if has_ended:
                    return None
                has_ended = (await self._status(job_id))[0] in _ENDED
            return await following
        finally:
            following.cancel()

    async def _status(self, job_id: str) -> tuple[JobStatus, int | None]:
        """Return status and exit code of a job. Raises `ClusterError` without an answer within `answer_s`."""
        answer: Future[tuple[JobStatus, int | None]] = Future()
        answer.set_running_or_notify_cancel()  # a late answer is accepted, and not used

        def ask() -> None:
            try:
                info = self._client.get_job_info(job_id)
                assert info is not None, "Ray raises an error for a job that it does not know"
                answer.set_result((info.status, info.driver_exit_code))
            except Exception as error:  # noqa: BLE001  (raised by the caller)
                answer.set_exception(error)

        threading.Thread(target=ask, name="job-status", daemon=True).start()  # it may never end
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), self.answer_s)
        except TimeoutError as error:
            raise ClusterError(
                f"{self.address} has not answered for {self.answer_s:g} s; job {job_id} may go on: follow it again"
            ) from error

    def stop(self, job_id: str) -> bool:
        """Ask a job to finish its step, save and end; return False if it has ended already."""
        with _reaching(self.address):
            return self._client.stop_job(job_id)


def ignored_by(path: Path, working_dir: Path) -> Path | None:
    """Return the `.rayignore` that keeps a file or folder out of the copy of `working_dir`, None if it is copied.

    Both paths are absolute. A link is copied as what it names.
    """
    _quiet()
    folders = [working_dir]
    for part in path.relative_to(working_dir).parts:
        rules = [(folder, get_excludes_from_ignore_files(folder, include_gitignore=False)) for folder in folders]
        here = folders[-1] / part
        for folder, of_folder in rules:
            if any(is_excluded(here) for is_excluded in of_folder):
                return folder / IGNORED
        folders.append(here)
    return None


def _first_address(address: str | None) -> tuple[str, str]:
    """Return the address, and where it comes from."""
    if address:
        return "--address", address
    for name in (_SERVER, "RAY_ADDRESS"):
        if found := os.environ.get(name):
            return name, found
    raise ConfigError(f"no cluster is named: give --address http://HEAD:8265, or set {_SERVER}")


def _quiet() -> None:
    """Let Ray write only warnings: else it tells of every request, and of every folder with a `.rayignore`."""
    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.WARNING)


@contextmanager
def _own_packages() -> Iterator[Path]:
    """Copy this installation into a folder, beside each other: packages, and what says which plug-ins they have."""
    own = metadata.distribution("rlsys")
    with tempfile.TemporaryDirectory(prefix="rlsys-") as parent:
        folder = Path(parent, _SHIPPED)
        for name in PACKAGES:
            spec = util.find_spec(name)
            assert spec is not None and spec.submodule_search_locations is not None, "it is installed"
            shutil.copytree(
                spec.submodule_search_locations[0], folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        facts = f"rlsys-{own.version}.dist-info"
        shutil.copytree(str(own.locate_file(facts)), folder / facts)
        yield folder


@contextmanager
def _reaching(address: str) -> Iterator[None]:
    """Raise what Ray raises about its job server as a `ClusterError`."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, AuthenticationError, aiohttp.ClientError) as error:
        raise ClusterError(f"the job server at {address}: {error}") from error
