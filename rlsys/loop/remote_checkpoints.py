"""Copies of finished checkpoints under a URL of fsspec, such as `s3://bucket/path`, and their way back.

    s3://bucket/path/RUN/checkpoints/step_000050/...    the files of the checkpoint; its manifest is copied last
    s3://bucket/path/RUN/checkpoints/latest             name of the newest complete copy

A copy is complete once its manifest is there. Copying never holds up or ends a run: a copy that fails is an event, and
is tried again after the next checkpoint.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

from rlsys.errors import CheckpointError, ConfigError
from rlsys.loop.checkpoint import Checkpoints
from rlsys.loop.checkpoint_files import MANIFEST, newest_first, parse_manifest, problem_of, step_of
from rlsys.monitoring.events import CheckpointCopied, CheckpointCopyFailed, Events

P = ParamSpec("P")
R = TypeVar("R")
LATEST = "latest"


@dataclass(frozen=True)
class RemoteCheckpoints:
    """Copies of the checkpoints of one run. Each method blocks, and raises what the file system of the URL raises."""

    url: str
    """URL of the folder that contains the copies."""

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """File system, and path in it. Raises `ConfigError` if no package can open the URL."""
        from fsspec.core import url_to_fs

        try:
            return url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.url} cannot be opened: {error}") from error

    def names(self) -> list[str]:
        """Names of the complete copies: the one that `latest` names, then all others, newest first."""
        files, root = self._place
        found = [name for name in self._folders() if files.exists(f"{root}/{name}/{MANIFEST}")]
        latest = f"{root}/{LATEST}"
        named = files.cat_file(latest).decode(errors="replace") if files.exists(latest) else ""
        return sorted(sorted(found, key=_step, reverse=True), key=lambda name: name != named)

    def _folders(self) -> list[str]:
        """Names of all copies, complete or not."""
        files, root = self._place
        files.invalidate_cache()
        found = [PurePosixPath(path).name for path in files.ls(root, detail=False)] if files.exists(root) else []
        return [name for name in found if name.startswith("step_") and name[5:].isdecimal()]

    def copy(self, checkpoint: Path) -> bool:
        """Copy a checkpoint of this machine, its manifest last.

        Returns False if its copy is complete already, or the checkpoint is deleted meanwhile.
        """
        files, root = self._place
        target = f"{root}/{checkpoint.name}"
        try:
            manifest = (checkpoint / MANIFEST).read_bytes()
            if files.exists(f"{target}/{MANIFEST}") and files.cat_file(f"{target}/{MANIFEST}") == manifest:
                return False
            self._remove(checkpoint.name)
            for name in parse_manifest(manifest):
                files.makedirs(str(PurePosixPath(target, name).parent), exist_ok=True)
                files.put_file(str(checkpoint / name), f"{target}/{name}")
            files.pipe_file(f"{target}/{MANIFEST}", manifest)
        except FileNotFoundError:
            if checkpoint.exists():
                raise
            return False
        return True

    def steps(self) -> list[int]:
        """Steps of `names`."""
        return [_step(name) for name in self.names()]

    def retire(self, newest: str, kept: Collection[int]) -> None:
        """Name `newest` in `latest`, and delete the copies of all steps that are not `kept`."""
        files, root = self._place
        files.pipe_file(f"{root}/{LATEST}", newest.encode())
        for name in self._folders():
            if _step(name) not in kept:
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Delete a copy, its manifest first."""
        files, root = self._place
        for path in (f"{root}/{name}/{MANIFEST}", f"{root}/{name}"):
            if files.exists(path):
                files.rm(path, recursive=True)

    def fetch_newest(self, into: Path) -> tuple[Path | None, list[str]]:
        """Copy the newest whole copy to the folder `into`; return it, and what is wrong with those passed over for it.

        Raises `CheckpointError` if it cannot be read or written, or if there are copies and all are damaged.
        """
        problems: list[str] = []
        partial = into / "fetched.tmp"
        try:
            for name in self.names():
                shutil.rmtree(partial, ignore_errors=True)
                if (problem := self._fetch(name, partial / name)) is None:
                    final = into / name
                    shutil.rmtree(final, ignore_errors=True)
                    (partial / name).rename(final)
                    return final, problems
                problems.append(f"{self.url}/{name}: {problem}")
        except ConfigError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"cannot fetch a checkpoint from {self.url}: {error!r}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"every copy in {self.url} is damaged:\n{listed}\nstart a new run with another run.name"
            )
        return None, problems

    def _fetch(self, name: str, to: Path) -> str | None:
        """Copy all files of a manifest, and check them; return what is wrong with them."""
        files, root = self._place
        manifest = files.cat_file(f"{root}/{name}/{MANIFEST}")
        try:
            saved = parse_manifest(manifest)
        except ValueError:
            return f"{MANIFEST} is damaged"
        if outside := [
            path for path in saved if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts
        ]:
            return f"{MANIFEST} lists {outside[0]}, which is outside"
        for path in saved:
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                files.get_file(f"{root}/{name}/{path}", str(to / path))
            except FileNotFoundError:
                return f"{path} is missing"
        (to / MANIFEST).write_bytes(manifest)
        return problem_of(to)


class _DaemonThreads(Executor):
    """One thread for each call. The interpreter ends without waiting for calls that hang."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  (raised where the result is awaited)
                future.set_exception(error)

        threading.Thread(target=run, name="checkpoint-copy", daemon=True).start()
        return future


@dataclass
class CheckpointCopies:
    """Copies the finished checkpoints of a run in the background.

    Consumes finished checkpoints, produces copies and events. Waits for the remote file system; unblocked by its
    answer alone, so that `end` has a limit.
    """

    checkpoints: Checkpoints
    remote: RemoteCheckpoints
    events: Events
    _threads: Executor = field(default_factory=_DaemonThreads)
    _copying: asyncio.Task[None] | None = None
    _is_new: bool = False
    """True if a checkpoint was finished after the running copy began."""

    def begin(self) -> None:
        """Copy what is not copied yet, or do so after the copying that is under way."""
        self._is_new = True
        if self._copying is None or self._copying.done():
            self._copying = asyncio.create_task(self._copy())

    async def end(self, limit_s: float) -> None:
        """Return once the last copy has ended, or failed; give up after `limit_s`."""
        if self._copying is None:
            return
        await asyncio.wait([self._copying], timeout=limit_s)
        if not self._copying.done():
            self._copying.cancel()
            step = self.checkpoints.last_saved or 0
            self.events.emit(CheckpointCopyFailed(step, self.remote.url, f"it took more than {limit_s:g} s"))

    async def _copy(self) -> None:
        while self._is_new:
            self._is_new = False
            checkpoints = [c for c in newest_first(self.checkpoints.folder) if isinstance(c, Path)]
            try:
                for checkpoint in checkpoints:
                    await self._copy_one(checkpoint)
                kept = self.checkpoints.steps_to_keep(await self._in_thread(self.remote.steps))
                await self._in_thread(self.remote.retire, checkpoints[0].name, kept)
            except Exception as error:  # noqa: BLE001  (the boundary between training and a remote file system)
                problem = f"{type(error).__name__}: {error}"
                self.events.emit(CheckpointCopyFailed(step_of(checkpoints[0]), self.remote.url, problem))

    async def _copy_one(self, checkpoint: Path) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if await self._in_thread(self.remote.copy, checkpoint):
            url = f"{self.remote.url}/{checkpoint.name}"
            self.events.emit(CheckpointCopied(step_of(checkpoint), url, loop.time() - began))

    async def _in_thread(self, call: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _step(name: str) -> int:
    return int(name.removeprefix("step_"))
