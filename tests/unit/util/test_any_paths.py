"""Paths at a URL: an error of the store is neither an absent file nor blamed for errors of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from rlsys.errors import CheckpointError, ConfigError
from rlsys.util.any_paths import RemotePath, any_path


class Busy(MemoryFileSystem):
    """A store that times out."""

    protocol = "busy"

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        raise TimeoutError("the store is busy")


class Barred(MemoryFileSystem):
    """A store of which some folders cannot be listed."""

    protocol = "barred"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        if path.endswith("barred"):
            raise PermissionError("not for you")
        return super().ls(path, detail, **kwargs)


register_implementation("busy", Busy, clobber=True)
register_implementation("barred", Barred, clobber=True)


@pytest.mark.parametrize("ask", [RemotePath.exists, RemotePath.names, RemotePath.sizes, RemotePath.remove])
def test_a_busy_store_is_not_an_empty_one(ask: Callable[[RemotePath], object]):
    with pytest.raises(CheckpointError, match="busy://bucket/folder: TimeoutError: the store is busy"):
        ask(RemotePath("busy://bucket/folder"))


def test_what_does_not_exist_is_empty():
    nowhere = RemotePath(f"memory://{uuid4().hex}/nowhere")
    nowhere.remove()
    assert (nowhere.exists(), nowhere.names(), nowhere.sizes()) == (False, [], {})


def test_sizes_are_of_all_files_below():
    folder = RemotePath(f"memory://{uuid4().hex}")
    (folder / "a").write_bytes(b"1")
    (folder / "b/c/d").write_bytes(b"123")
    assert folder.sizes() == {"a": 1, "b/c/d": 3}


def test_a_folder_that_cannot_be_listed_is_named():
    folder = RemotePath(f"barred://{uuid4().hex}")
    (folder / "barred" / "a").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"cannot read barred:.*PermissionError: not for you"):
        folder.sizes()


def test_an_error_beside_the_store_passes_unchanged():
    path = RemotePath(f"memory://{uuid4().hex}/file")
    with pytest.raises(ZeroDivisionError), path.writing() as stream:
        stream.write(b"%d" % (1 // 0))


def test_a_write_that_fails_names_the_url():
    path = RemotePath(f"memory://{uuid4().hex}/file")
    with pytest.raises(CheckpointError, match=r"cannot write memory://.*/file: TypeError"), path.writing() as stream:
        stream.write("text")  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("url", ["s3://", "s3:////", "file:///", "memory://"])
def test_a_url_of_nothing_is_refused(url):
    with pytest.raises(ConfigError, match=f"{url} names no bucket or folder"):
        any_path(url)
