"""`rlsys submit`: a configuration becomes a job of a running cluster, after everything that can be checked here."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.errors import NOT_SAVED, ConfigError
from rlsys.launch.preflight import with_absolute_paths

_FILE = "FILE"
"""Key of a configuration's own file in the problems of `check_is_copied`."""


def submit(files: Sequence[str], overrides: Sequence[str], *, address: str | None = None) -> str:
    """Submit a run with this configuration, from the current folder, which is copied; return the id of the job.

    `address` is that of the job server, `http://HEAD:8265`; None: that of RAY_API_SERVER_ADDRESS or RAY_ADDRESS. Raises
    `ConfigError` for a configuration that is wrong, or names a file which the copy has not, and `ClusterError` if the
    cluster does not take the job.
    """
    from workers.ray.job_client import JobClient

    config = Config.load(files, overrides)
    config.data.check_has_rows()
    if not config.run.folder.is_absolute():
        raise ConfigError(
            f"run.folder: {config.run.folder} is relative, and Ray deletes the folder of a job: give an absolute path "
            "that every node sees"
        )
    check_is_copied(config, files, Path.cwd())
    name = f"{config.run.name}-{secrets.token_hex(3)}"
    return JobClient.at(address).submit(name, [*map(os.path.relpath, files), *overrides], Path.cwd())


def resume(job: str, overrides: Sequence[str] = (), *, address: str | None = None) -> str:
    """Submit the run of an earlier job again, to go on from its newest checkpoint; see `submit`."""
    from workers.ray.job_client import JobClient

    arguments = [*JobClient.at(address).arguments_of(job), *overrides, "run.resume=must"]
    files = [argument for argument in arguments if "=" not in argument]
    return submit(files, [argument for argument in arguments if "=" in argument], address=address)


def follow(job: str, write: Callable[[str], object], *, address: str | None = None) -> int:
    """Pass on what a job has printed and prints, until it ends; return its exit code. Raises `ClusterError`."""
    from workers.ray.job_client import JobClient

    return asyncio.run(JobClient.at(address).follow(job, write))


def stop(job: str, *, address: str | None = None) -> bool:
    """Ask a job to finish its step, save and end; return False if it has ended already. Raises `ClusterError`."""
    from workers.ray.job_client import JobClient

    return JobClient.at(address).stop(job)


def has_trained(printed: str) -> bool:
    """Return True if a job has printed the progress of a step, such as `step 3/10`, after a policy's name if there are
    several."""
    return re.search(r"^(\S+: )?step +\d+/\d+ ", printed, re.MULTILINE) is not None


def tells_saved(printed: str) -> bool:
    """True if a job that was stopped has printed where, and nothing of steps that are not saved."""
    ends = [line for line in printed.splitlines() if line.startswith("rlsys: interrupted ")]
    return bool(ends) and NOT_SAVED not in ends[-1]


def check_is_copied(config: Config, files: Sequence[str], folder: Path) -> None:
    """Raise `ConfigError` for every FILE that is not in the copy of `folder`, and for every other file that is named
    by a relative path and is not in it.

    An absolute path in the configuration is one of the cluster.
    """
    from workers.ray.job_client import ignored_by

    problems: list[str] = []
    for key, path in [*((_FILE, Path(file)) for file in files), *_named_files(config)]:
        place = Path(os.path.abspath(path))  # noqa: PTH100  (a link is copied as what it names)
        if not place.is_relative_to(folder):
            problems.append(f"{key}: {path} is not in {folder}, which the cluster gets: move it there")
        elif (ignore := ignored_by(place, folder)) is not None:
            otherwise = "" if key == _FILE else ", or give an absolute path"
            problems.append(f"{key}: {path} is left out by {ignore}: take it out of there{otherwise}")
    if problems:
        raise ConfigError("\n".join(problems))


def _named_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield key and path of what the configuration names by relative paths."""
    given, absolute = config.model_dump(mode="json"), with_absolute_paths(config).model_dump(mode="json")
    for key, text in _changed_texts(given, absolute):
        head, is_code, _ = text.partition(".py:")
        path = Path(head + ".py" if is_code else text.partition("#")[0])
        if not path.is_absolute() and path.exists():
            yield key, path


def _changed_texts(given: Any, absolute: Any, key: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401  (JSON)
    """Yield key and value of each text in one tree that is another in the other one."""
    if isinstance(given, dict) and isinstance(absolute, dict):
        for name in given.keys() & absolute.keys():
            yield from _changed_texts(given[name], absolute[name], f"{key}.{name}" if key else name)
    elif isinstance(given, list) and isinstance(absolute, list):
        for index, pair in enumerate(zip(given, absolute, strict=False)):
            yield from _changed_texts(*pair, f"{key}[{index}]")
    elif isinstance(given, str) and given != absolute:
        yield key, given
