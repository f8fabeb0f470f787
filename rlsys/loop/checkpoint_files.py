"""Files of checkpoints, on a disk or at a URL: listed, compared with their manifests, fetched, removed.

A checkpoint at a URL is there once it has its manifest: it is written last and removed first, since object stores
cannot rename.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import TypeVar, cast

from pydantic import TypeAdapter
from xxhash import xxh3_128

from rlsys.config.loader import tree_in
from rlsys.contracts import Files
from rlsys.errors import CheckpointError
from rlsys.types import PolicyVersion
from rlsys.util.any_paths import AnyPath, RemotePath, any_path, read_any, sizes_in
from rlsys.util.files import CONFIG, flush, write_atomically
from rlsys.util.hashed_files import SavedFile
from rlsys.util.regular_files import open_regular

A = TypeVar("A", bound=AnyPath)
GROUPS, STATE, ACTOR, CRITIC = "groups.jsonl", "driver.json", "actor", "critic"
MANIFEST, LATEST = "manifest.json", "latest"
"""File names in the folders."""
STEP = "step_{:06d}"
MOST_STATE_BYTES = 2**28
"""Most bytes of a driver's part: the success rates of a million tasks have 60 MB."""

FETCHED = "fetched"
"""Folder in a run directory, with copies of checkpoints at a URL for commands that need them on this machine."""
_WHERE = (("checkpoint", "to"), ("run", "name"))
"""Keys that say where the checkpoints of a run are."""
_MANIFEST = TypeAdapter(dict[str, SavedFile])
_HASHED_AT_ONCE = 8
_MOST_NAME_BYTES = 1000


class _Damaged(CheckpointError):
    """A manifest that is missing or damaged. A store that does not answer raises `CheckpointError` alone."""


def step_of(checkpoint: AnyPath) -> PolicyVersion:
    """Return the step that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("step_"))


def _is_step(name: str) -> bool:
    return name.startswith("step_") and name[5:].isdecimal()


def newest_first(folder: A) -> Iterator[A]:
    """Yield the checkpoint that `latest` names, then all others, newest first. Any of them may be damaged."""
    if isinstance(folder, RemotePath):
        named_so = [folder / name for name in folder.names() if _is_step(name)]
        found = [each for each in named_so if (each / MANIFEST).exists()]
    else:
        found = [each for each in folder.glob("step_*") if _is_step(each.name)]
    try:
        named = read_any(folder / LATEST, _MOST_NAME_BYTES).decode().strip()
    except (OSError, ValueError):
        named = ""
    order = sorted(found, key=lambda checkpoint: (checkpoint.name != named, -step_of(checkpoint)))
    yield from cast("list[A]", order)


def unfinished_before(folder: AnyPath, step: PolicyVersion) -> list[RemotePath]:
    """Return what saves that were cut off left at a URL: the folders without a manifest of steps before `step`."""
    names = folder.names() if isinstance(folder, RemotePath) else []
    earlier = [folder / name for name in names if _is_step(name) and step_of(folder / name) < step]
    return [each for each in earlier if isinstance(each, RemotePath) and not (each / MANIFEST).exists()]


def from_on(checkpoint: AnyPath) -> Iterator[AnyPath]:
    """Yield a checkpoint, then those that `newest_first` yields after it."""
    yield checkpoint
    beside = list(newest_first(checkpoint.parent))
    yield from beside[beside.index(checkpoint) + 1 :] if checkpoint in beside else ()


def find_latest(folder: A) -> A | None:
    """Return the checkpoint that `latest` names if it is complete, else the newest complete one under `folder`.

    Names and sizes are compared, not contents: see `newest_whole`.
    """
    return newest_complete(folder)[0]


def newest_complete(folder: A) -> tuple[A | None, list[str]]:
    """Return the checkpoint to go on from, and what is wrong with those that were passed over for it.

    That is the one which `latest` names, or else the newest whose files have the names and sizes that they were saved
    with. The ranks compare contents, see `first_whole`. Raises `CheckpointError` if there are checkpoints and all are
    damaged.
    """
    return _first_of(folder, lambda checkpoint: problem_of(checkpoint, sizes_only=True))


def newest_whole(folder: A) -> tuple[A | None, list[str]]:
    """Do the same as `newest_complete`, but read all files here, and compare their contents too."""
    return _first_of(folder, problem_of)


def newest_local(run: Path) -> tuple[Path | None, list[str]]:
    """Do the same for the run in a folder; a checkpoint at a URL is fetched, see `local_checkpoint`."""
    checkpoints = checkpoints_of(run)
    if not isinstance(checkpoints, RemotePath):
        return newest_whole(checkpoints)
    found, problems = newest_complete(checkpoints)
    return None if found is None else local_checkpoint(found, run), problems


def _first_of(folder: A, problem_in: Callable[[A], str | None]) -> tuple[A | None, list[str]]:
    problems: list[str] = []
    for checkpoint in newest_first(folder):
        if (problem := problem_in(checkpoint)) is None:
            return checkpoint, problems
        problems.append(problem)
    refuse_damaged(folder, problems)
    return None, problems


async def first_whole(
    candidates: Iterable[AnyPath], find_damage: Callable[[AnyPath, Files], Awaitable[str | None]]
) -> tuple[AnyPath | None, list[str]]:
    """Return the first of these checkpoints without damage, and what is wrong with those before it.

    `find_damage(checkpoint, files)` reads the files. Raises `CheckpointError` if there are some, and all are damaged.
    """
    problems: list[str] = []
    checkpoint = None
    for checkpoint in candidates:
        problem = await asyncio.to_thread(problem_of, checkpoint, sizes_only=True)
        if problem is None:
            files = await asyncio.to_thread(read_manifest, checkpoint)
            problem = await find_damage(checkpoint, files) or await asyncio.to_thread(_step_problem, checkpoint)
        if problem is None:
            return checkpoint, problems
        problems.append(problem)
    if checkpoint is not None:
        refuse_damaged(checkpoint.parent, problems)
    return None, problems


def refuse_damaged(folder: AnyPath, problems: Iterable[str]) -> None:
    """Raise `CheckpointError` with the problem of every checkpoint, if there are any."""
    if listed := "\n".join(f"  {problem}" for problem in problems):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged:\n{listed}\n"
            "restore these files from a copy, or start a new run with another run.name"
        )


def is_complete(checkpoint: AnyPath) -> bool:
    """Return True if every file exists and has the size in the manifest, and no others lie beside them."""
    return problem_of(checkpoint, sizes_only=True) is None


def problem_of(checkpoint: AnyPath, *, sizes_only: bool = False) -> str | None:
    """Return what differs between a checkpoint's files and its manifest, naming the first such file; None if nothing.

    `sizes_only`: do not read their contents. Raises `CheckpointError` if a store does not answer, which is no damage.
    """
    try:
        manifest = read_manifest(checkpoint)
    except _Damaged as error:
        return str(error)
    if missing := {GROUPS, STATE} - manifest.keys():
        return f"{checkpoint / MANIFEST} does not list {min(missing)}"
    if problem := _size_problem(checkpoint, manifest):
        return problem
    return None if sizes_only else content_problem(checkpoint, manifest) or _step_problem(checkpoint)


def model_problem_of(folder: Path) -> str | None:
    """Do the same for a model folder that `write_manifest` completed."""
    try:
        manifest = read_manifest(folder)
    except _Damaged as error:
        return str(error)
    return _size_problem(folder, manifest) or content_problem(folder, manifest)


def parse_manifest(content: bytes) -> dict[str, SavedFile]:
    """Return the files of a manifest by their relative paths. Raises `ValueError`."""
    return _MANIFEST.validate_json(content)


def read_manifest(folder: AnyPath) -> dict[str, SavedFile]:
    """Return the files of a manifest. Raises `CheckpointError` if it is missing or damaged, or cannot be read now."""
    path = folder / MANIFEST
    try:
        manifest = parse_manifest(read_any(path))
    except (OSError, ValueError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is damaged"
        raise _Damaged(f"{path} cannot be read: {reason}") from error
    for name in manifest:
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise _Damaged(f"{path} is damaged: it lists {name!r}, which is not in its folder")
    return manifest


def write_manifest(folder: AnyPath, files: Files) -> None:
    """Write sizes and hashes of the files in `folder`, which completes it. Raises `OSError`."""
    (folder / MANIFEST).write_bytes(_MANIFEST.dump_json(dict(sorted(files.items())), indent=1))


def _size_problem(folder: AnyPath, manifest: Files) -> str | None:
    """Return the first difference in names and sizes between the files in `folder` and their manifest.

    A further entry beside those of a subfolder, or in a model's folder, is one too: readers of weights open all there.
    """
    for name, size in sizes_in(folder, [*manifest]).items():
        if isinstance(size, str):
            return f"{folder / name} cannot be read: {size}"
        if size != manifest[name].num_bytes:
            return f"{folder / name} has {size} bytes, and was saved with {manifest[name].num_bytes}"
    subfolders = {parent for name in manifest if (parent := name.rpartition("/")[0])} | {ACTOR, CRITIC}
    further = (f"{parent}/{name}" for parent in sorted(subfolders) for name in _file_names(folder / parent))
    return next(
        (f"{folder / name} was not saved with this checkpoint" for name in further if name not in manifest), None
    )


def _file_names(folder: AnyPath) -> list[str]:
    """Return the names of the files in a folder; none if it does not exist."""
    if isinstance(folder, RemotePath):
        return [name for name in folder.sizes() if "/" not in name]
    return sorted(path.name for path in folder.iterdir() if not path.is_dir()) if folder.is_dir() else []


def content_problem(folder: AnyPath, files: Files) -> str | None:
    """Read these files, and return the first with other contents than were saved."""

    def differs(name: str) -> str | None:
        path, saved = folder / name, files[name]
        try:
            is_same = _file_hash(path, saved.num_bytes) == saved.xxh3_128
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        return None if is_same else f"{path} has other contents than were saved"

    if isinstance(folder, RemotePath):  # which reads ranges at the same time, if it can
        return next(filter(None, map(differs, files)), None)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        return next(filter(None, threads.map(differs, files)), None)


def _step_problem(checkpoint: AnyPath) -> str | None:
    is_named_so = saved_step(checkpoint) in (step_of(checkpoint), None)
    return None if is_named_so else f"{checkpoint / STATE} is of another step"


def saved_step(checkpoint: AnyPath) -> PolicyVersion | None:
    """Return the step that a checkpoint is of, whatever its folder is called; None if its driver's part does not say,
    which `read_state` refuses in words."""
    try:
        row = json.loads(read_any(checkpoint / STATE, MOST_STATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    version = row.get("version") if isinstance(row, dict) else None
    return version if isinstance(version, int) else None


def _file_hash(path: AnyPath, num_bytes: int) -> str:
    if isinstance(path, RemotePath):
        found = xxh3_128()
        for chunk in path.chunks(num_bytes):
            found.update(chunk)
        return found.hexdigest()
    with open_regular(path) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()  # pyrefly: ignore[bad-argument-type]


def hash_files(folder: Path) -> Files:
    """Read all files in `folder`; return their sizes and hashes. Raises `OSError`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        saved = threads.map(lambda path: SavedFile(size := path.stat().st_size, _file_hash(path, size)), paths)
        return {path.relative_to(folder).as_posix(): each for path, each in zip(paths, saved, strict=True)}


def make_empty(partial: AnyPath) -> None:
    """Remove what an earlier save left in the folder, and make it."""
    remove_checkpoint(partial)
    if not isinstance(partial, RemotePath):
        partial.mkdir(parents=True)


def put_in_place(partial: AnyPath) -> AnyPath:
    """Name a checkpoint that has its manifest in `latest`; on a disk, flush it and give it its name before. Return its
    final folder."""
    if isinstance(partial, RemotePath):
        (partial.parent / LATEST).write_bytes(partial.name.encode())
        return partial
    final = partial.with_suffix("")
    flush(partial, partial.iterdir())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    write_atomically(final.parent / LATEST, final.name)
    return final


def remove_checkpoint(checkpoint: AnyPath) -> None:
    """Delete a checkpoint, complete or not, if it is there."""
    if isinstance(checkpoint, RemotePath):
        (checkpoint / MANIFEST).remove()
        checkpoint.remove()
    else:
        shutil.rmtree(checkpoint, ignore_errors=True)


def checkpoints_of(run: Path) -> AnyPath:
    """Return the folder or URL of the checkpoints of the run in a folder, as its configuration names it."""
    tree = tree_in(run / CONFIG) if (run / CONFIG).is_file() else {}
    to, name = (section.get(key) if isinstance(section := tree.get(part), Mapping) else None for part, key in _WHERE)
    is_url = isinstance(to, str) and "://" in to
    return any_path(f"{to}/{name}/checkpoints") if is_url else run / "checkpoints"


def local_checkpoint(checkpoint: AnyPath, run: Path) -> Path:
    """Return a checkpoint of a run in a folder of this machine: one at a URL is copied to `RUN/fetched`, unless a whole
    copy is there. Several commands may do that at the same time.

    Raises `CheckpointError` if it is damaged, cannot be read, or cannot be written.
    """
    if not isinstance(checkpoint, RemotePath):
        return checkpoint
    into = run / FETCHED
    if problem := problem_of(checkpoint, sizes_only=True):
        raise CheckpointError(problem)
    manifest, final = read_manifest(checkpoint), into / checkpoint.name
    if _is_copy(final, manifest):
        return final
    try:
        into.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="fetching-", dir=into, ignore_cleanup_errors=True) as beside:
            partial = Path(beside) / checkpoint.name
            _fetch(checkpoint, manifest, partial)
            if not _is_copy(final, manifest):  # another command may have fetched it meanwhile
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
    except OSError as error:
        if not _is_copy(final, manifest):
            raise CheckpointError(f"cannot fetch {checkpoint} to {into}: {error.strerror or error}") from error
    return final


def _is_copy(folder: Path, manifest: Files) -> bool:
    return problem_of(folder) is None and read_manifest(folder) == manifest


def _fetch(checkpoint: RemotePath, manifest: Files, partial: Path) -> None:
    """Copy a checkpoint to the folder `partial`, and compare contents. Raises `CheckpointError` and `OSError`."""
    for name, saved in manifest.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        with (partial / name).open("wb") as file:
            file.writelines((checkpoint / name).chunks(saved.num_bytes))
    write_manifest(partial, manifest)
    if problem := problem_of(partial):
        raise CheckpointError(f"{checkpoint} is damaged: its copy {problem}")
