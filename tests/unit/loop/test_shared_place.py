"""Machines that do not share the place of the checkpoints are refused before anything is trained."""

from __future__ import annotations

import asyncio
import platform
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from rlsys.contracts import MarkerReply
from rlsys.errors import ConfigError
from rlsys.loop.shared_place import check_shared
from rlsys.testing import FakeWorld
from rlsys.testing.fake_training import FakeActor
from rlsys.util.any_paths import AnyPath, RemotePath
from workers.train.ranks import Rank


class OnTwoMachines(FakeActor):
    """Two ranks, of which the second sees another disk under the same path."""

    def __init__(self, world: FakeWorld, folder: Path) -> None:
        super().__init__(world)
        self._folder = folder

    async def answer_marker(self, folder: AnyPath) -> list[MarkerReply]:
        assert isinstance(folder, Path)
        there = self._folder / "disk1" / folder.relative_to(self._folder / "disk0")
        return [Rank().answer_marker(folder, "actor-0"), Rank().answer_marker(there, "actor-1")]


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_a_shared_place_is_left_as_it_was(tmp_path, kind):
    urls = {"file": f"file://{tmp_path}/store", "memory": f"memory://{uuid4().hex}"}
    place = RemotePath(urls[kind]) if kind in urls else tmp_path / "checkpoints"
    asyncio.run(check_shared(FakeWorld().workers(), place))
    assert (place.names() if isinstance(place, RemotePath) else list(place.iterdir())) == []


def test_ranks_that_see_different_folders_are_refused(tmp_path):
    world = FakeWorld()
    workers = replace(world.workers(), actor=OnTwoMachines(world, tmp_path))
    place = tmp_path / "disk0" / "checkpoints"
    with pytest.raises(ConfigError) as raised:
        asyncio.run(check_shared(workers, place))
    text = str(raised.value)
    assert text.startswith(f"{place} is not shared by all machines: actor-1 on node {platform.node()} cannot read what")
    assert "let run.folder be a folder that all machines share, or set checkpoint.to to a URL" in text
    assert raised.value.exit_code == 2
    assert list(place.iterdir()) == []
    assert not (tmp_path / "disk1").exists()


def test_a_marker_that_the_driver_cannot_read_is_refused(tmp_path):
    class OnAnotherDisk(FakeActor):
        async def answer_marker(self, folder: AnyPath) -> list[MarkerReply]:
            return [MarkerReply("actor-0", "gpu-02", "")]

    world = FakeWorld()
    workers = replace(world.workers(), actor=OnAnotherDisk(world))
    with pytest.raises(ConfigError, match=r"actor-0 on node gpu-02 wrote a file that the driver cannot read"):
        asyncio.run(check_shared(workers, tmp_path))


def test_a_place_that_the_driver_cannot_write_is_refused(tmp_path):
    (tmp_path / "store").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"cannot be written to file:.*: the driver cannot write there: .*Not a dir"):
        asyncio.run(check_shared(FakeWorld().workers(), RemotePath(f"file://{tmp_path}/store/checkpoints")))
