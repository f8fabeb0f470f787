"""Paths on a disk, or at a URL of fsspec such as `s3://bucket/path`.

    folder = any_path("s3://bucket/runs/sums/checkpoints")
    with writing(folder / "step_000050" / "groups.jsonl") as file:
        file.write(b"...")
    file.report  # size and hash

Each file system has errors of its own. Methods of a `RemotePath` raise `FileNotFoundError` for what is missing,
`ConfigError` if no package can open the URL, and a `CheckpointError` that names URL and cause for all others. Their
retries are those of the file system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from rlsys.errors import CheckpointError, ConfigError, RlsysError
from rlsys.util.hashed_files import HashedWriter
from rlsys.util.regular_files import MOST_BYTES, open_regular, read_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CHUNK_BYTES = 2**24
"""Most bytes of one range of a file that is read whole."""
CHUNKS_AT_ONCE = 8
"""Number of such ranges that a file system may read at the same time."""


@dataclass(frozen=True)
class RemotePath:
    """File or folder at a URL. It has no cached state, because other machines write there too."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that contains this."""
        return RemotePath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Return True for a file, or a folder with files."""
        with self._open("read") as (files, path):
            return _info_of(files, path) is not None

    def names(self) -> list[str]:
        """Names in this folder; none if it does not exist."""
        with self._open("read") as (files, path):
            found = files.ls(path, detail=False) if _info_of(files, path) else []
            return sorted({each.rstrip("/").rpartition("/")[2] for each in found})

    def sizes(self) -> dict[str, int]:
        """Sizes of all files below this folder, by their relative paths; none if it does not exist."""
        with self._open("read") as (files, path):
            found = _files_in(files, path) if _info_of(files, path) else ()
            return {info["name"].removeprefix(path).lstrip("/"): info["size"] for info in found}

    def read_bytes(self) -> bytes:
        """Read a file whole."""
        with self._open("read") as (files, path):
            return files.cat_file(path)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Read byte ranges of files in this folder, each given as name, start and end."""
        with self._open("read") as (files, path):
            names, starts, ends = ([each[i] for each in ranges if each[1] < each[2]] for i in range(3))
            found = iter(files.cat_ranges([f"{path}/{name}" for name in names], starts, ends, on_error="raise"))
            return [next(found) if start < end else b"" for _, start, end in ranges]

    def chunks(self, num_bytes: int) -> Iterator[bytes]:
        """Yield the first `num_bytes` of a file in parts."""
        ends = range(CHUNK_BYTES, num_bytes + CHUNK_BYTES, CHUNK_BYTES)
        ranges = [(self.name, end - CHUNK_BYTES, min(end, num_bytes)) for end in ends]
        for first in range(0, len(ranges), CHUNKS_AT_ONCE):
            yield from self.parent.read_ranges(ranges[first : first + CHUNKS_AT_ONCE])

    def write_bytes(self, content: bytes) -> None:
        """Write a file whole."""
        with self.writing() as stream:
            stream.write(content)

    def remove(self) -> None:
        """Remove a file, or a folder with all below it, if it is there."""
        with self._open("remove") as (files, path):
            if info := _info_of(files, path):
                files.rm(path, recursive=info["type"] == "directory")

    @contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Open a file to read it from its beginning."""
        with self._open("read") as (files, path), files.open(path, "rb") as stream:
            yield stream

    @contextmanager
    def writing(self) -> Iterator[BufferedIOBase]:
        """Open a file to write it. Depending on the file system, others see it grow, or only when the block ends.

        Errors of the block pass unchanged: only those of the file system name the URL.
        """
        with self._open("write") as (files, path):
            _make_folder(files, path.rpartition("/")[0])
            stream = files.open(path, "wb")
        try:
            yield _Stream(self, stream)
        finally:
            with self.naming("write"):
                stream.close()

    @contextmanager
    def _open(self, action: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system, and the path in it. `action` is a verb for errors: `read`."""
        from fsspec.core import url_to_fs  # .2 s

        with self.naming(action):
            try:
                files, path = url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise ConfigError(f"{self.url} cannot be opened: {error}") from error
            files.invalidate_cache()
            yield files, path

    @contextmanager
    def naming(self, action: str) -> Iterator[None]:
        """Raise the errors of the file system as `CheckpointError` with URL and cause."""
        try:
            yield
        except (RlsysError, FileNotFoundError):
            raise
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(f"cannot {action} {self.url}: {type(error).__name__}: {error}") from error


class _Stream(BufferedIOBase):
    """Stream to a file at a URL, which names the URL if a write fails."""

    def __init__(self, path: RemotePath, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream

    def write(self, data: ReadableBuffer) -> int:
        with self._path.naming("write"):
            return self._stream.write(data)


def _info_of(files: Any, path: str) -> Mapping[str, Any] | None:  # noqa: ANN401  (a file system of fsspec)
    """Return the facts about a file or folder; None if it does not exist.

    `exists` and `isdir` of fsspec answer False after any error, such as a time-out.
    """
    try:
        return files.info(path)
    except FileNotFoundError:
        return None


def _files_in(files: Any, path: str) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401  (a file system of fsspec)
    """Yield the facts about every file below a folder.

    `find` and `walk` of fsspec leave a subfolder out if it cannot be listed.
    """
    for info in files.ls(path, detail=True):
        name = info["name"].rstrip("/")
        if info["type"] != "directory":
            yield info
        elif name != path:
            yield from _files_in(files, name)


def _make_folder(files: Any, path: str) -> None:  # noqa: ANN401  (a file system of fsspec)
    """Make a folder and those that contain it. Each may be made by another process meanwhile."""
    for is_last in (*[False] * path.count("/"), True):
        try:
            return files.makedirs(path, exist_ok=True)
        except Exception:  # each file system has errors of its own
            if is_last:
                raise
            files.invalidate_cache()
    return None


AnyPath: TypeAlias = Path | RemotePath


def any_path(text: str) -> AnyPath:
    """Return the path that `text` means: a URL if it contains `://`. Raises `ConfigError` if nothing comes after it."""
    if "://" not in text:
        return Path(text)
    if "://" not in (url := text.rstrip("/")):
        raise ConfigError(f"{text} names no bucket or folder: give one, such as s3://bucket/path or file:///folder")
    return RemotePath(url)


def read_any(path: AnyPath, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a file whole. On a disk it must be a regular one, of `most_bytes`. Raises `OSError`."""
    return path.read_bytes() if isinstance(path, RemotePath) else read_regular(path, most_bytes)


@contextmanager
def reading(path: AnyPath) -> Iterator[IO[bytes]]:
    """Open a file to read it; on a disk, a regular one. Raises `OSError`."""
    if isinstance(path, RemotePath):
        with path.reading() as stream:
            yield stream
    else:
        with open_regular(path) as file, BufferedReader(file) as stream:
            yield stream


@contextmanager
def writing(path: AnyPath) -> Iterator[HashedWriter]:
    """Open a file to write and hash it; folders that are missing are made. Raises `OSError`."""
    if not isinstance(path, RemotePath):
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.writing() if isinstance(path, RemotePath) else path.open("wb") as stream:
        yield HashedWriter(stream)


def sizes_in(folder: AnyPath, names: Sequence[str]) -> Mapping[str, int | str]:
    """Return the size of each of these files, or why it cannot be read."""
    if isinstance(folder, RemotePath):
        sizes = folder.sizes()
        return {name: sizes.get(name, "there is no such file") for name in names}
    return {name: _size_of(folder / name) for name in names}


def _size_of(path: Path) -> int | str:
    try:
        with open_regular(path) as file:
            return file.seek(0, 2)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "no file can have this name"
