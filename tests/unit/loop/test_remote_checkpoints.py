"""Copies of checkpoints: complete or not there, retired like the originals, and never a reason to end a run."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.run_folder import keep_fetched, start_of
from rlsys.loop.checkpoint import Checkpoints, read_state
from rlsys.loop.remote_checkpoints import CheckpointCopies, RemoteCheckpoints
from rlsys.monitoring.events import CheckpointCopied, CheckpointCopyFailed, Events
from rlsys.testing import EventRecorder
from tests.unit.loop.test_checkpoint import names, save, state_of


class Copied:
    """A run in `tmp_path` whose checkpoints are copied to a folder beside it."""

    def __init__(self, folder: Path, keep_last: int = 2) -> None:
        self.run, self.store = folder / "run", folder / "store"
        self.checkpoints = Checkpoints(self.run / "checkpoints", every=1, keep_last=keep_last)
        self.recorder = EventRecorder()
        self.remote = RemoteCheckpoints(f"file://{self.store}/run/checkpoints")

    @property
    def folder(self) -> Path:
        """The folder of the copies."""
        return self.store / "run" / "checkpoints"

    def save(self, *steps: int) -> None:
        for step in steps:
            save(self.checkpoints, step)
            asyncio.run(self._copy())

    async def _copy(self) -> None:
        copies = CheckpointCopies(self.checkpoints, self.remote, Events([self.recorder]))
        copies.begin()
        await copies.end(60.0)

    def config(self, resume: str, name: str = "run") -> Config:
        folder = f"run.folder={self.run.parent}"
        keys = ["model.path=m", "data.path=d", "run.steps=9", folder, f"run.name={name}", f"run.resume={resume}"]
        return Config.load([], [*keys, f"checkpoint.copy_to=file://{self.store}"])


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    copied = Copied(tmp_path)
    copied.save(1, 2, 3)
    return copied


def test_copies_are_retired_like_the_checkpoints(copied):
    assert names(copied.folder) == names(copied.checkpoints.folder) == ["latest", "step_000002", "step_000003"]
    assert [event.step for event in copied.recorder.of(CheckpointCopied)] == [1, 2, 3]


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_lost_folder_is_resumed_from_its_copy(copied, resume):
    shutil.rmtree(copied.run)
    start = start_of(copied.config(resume))
    assert start.checkpoint == copied.run / "checkpoints" / "step_000003"
    assert start.checkpoint is not None and read_state(start.checkpoint) == state_of(3)
    assert names(copied.run / "checkpoints") == ["step_000003"]


def test_another_run_starts_from_a_url(copied):
    new = copied.run.parent / "new"
    start = start_of(copied.config(f"file://{copied.store}/run", name="new"))
    assert start.checkpoint == new / "fetched" / "step_000003"
    assert start_of(copied.config("auto", name="new")).checkpoint is None, "the start may be refused"
    keep_fetched(new, start.checkpoint)
    assert start_of(copied.config("auto", name="new")).checkpoint == new / "checkpoints" / "step_000003"
    assert names(new) == ["checkpoints"]


def test_what_a_refused_start_has_fetched_is_deleted(copied):
    new = copied.run.parent / "new"
    start_of(copied.config(f"file://{copied.store}/run", name="new"))
    keep_fetched(new, None)
    assert names(new) == []


def test_a_copy_that_is_cut_is_passed_over(copied):
    shutil.rmtree(copied.run)
    (copied.folder / "step_000003" / "actor" / "weights.bin").write_bytes(b"w")
    start = start_of(copied.config("auto"))
    assert start.checkpoint is not None and start.checkpoint.name == "step_000002"
    (problem,) = start.passed_over
    assert "step_000003" in problem and "weights.bin has 1 bytes" in problem


def test_a_copy_without_a_manifest_does_not_exist(copied):
    shutil.rmtree(copied.run)
    (copied.folder / "step_000003" / "manifest.json").unlink()
    assert copied.remote.names() == ["step_000002"]


def test_damaged_copies_alone_never_restart_a_run(copied):
    shutil.rmtree(copied.run)
    for weights in copied.folder.rglob("weights.bin"):
        weights.unlink()
    with pytest.raises(CheckpointError, match=r"every copy in file:.* is damaged:(.|\n)*weights\.bin is missing"):
        start_of(copied.config("auto"))


def test_damaged_checkpoints_are_replaced_by_a_copy(copied):
    for weights in copied.checkpoints.folder.rglob("weights.bin"):
        weights.write_bytes(b"w")
    start = start_of(copied.config("auto"))
    assert start.checkpoint is not None and read_state(start.checkpoint) == state_of(3)
    assert "is damaged" in start.passed_over[0]


def test_a_manifest_never_writes_outside(copied, tmp_path):
    manifest = copied.folder / "step_000003" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("actor/weights.bin", "../../../escaped.bin"))
    _, problems = copied.remote.fetch_newest(tmp_path / "into")
    assert "escaped.bin, which is outside" in problems[0]
    assert list(tmp_path.rglob("escaped.bin")) == []


def test_a_new_run_is_refused_beside_copies_of_another(copied):
    shutil.rmtree(copied.run)
    with pytest.raises(ConfigError, match=r"file:.*/run/checkpoints holds a run already"):
        start_of(copied.config("never"))


def test_a_failed_copy_is_an_event_and_tried_again(tmp_path):
    copied = Copied(tmp_path)
    copied.store.write_text("a file where a folder should be")
    copied.save(1)
    (failure,) = copied.recorder.of(CheckpointCopyFailed)
    assert (failure.step, copied.recorder.of(CheckpointCopied)) == (1, [])
    copied.store.unlink()
    copied.save(2)
    assert {event.step for event in copied.recorder.of(CheckpointCopied)} == {1, 2}


def test_a_url_that_nothing_opens_is_named():
    with pytest.raises(ConfigError, match=r"nosuch://bucket cannot be opened: .*nosuch"):
        RemoteCheckpoints("nosuch://bucket").names()


def test_copies_keep_what_a_lost_folder_had(copied):
    """The retention counts the copies, not the fewer checkpoints of a resumed run."""
    shutil.rmtree(copied.run)
    start_of(copied.config("auto"))
    copied.save(4)
    assert names(copied.folder) == ["latest", "step_000003", "step_000004"]


def test_a_memory_file_system_has_copies_too(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep_last=1)
    remote = RemoteCheckpoints("memory://bucket/run/checkpoints")
    assert remote.copy(save(checkpoints, 5))
    assert not remote.copy(tmp_path / "checkpoints" / "step_000005")
    found, problems = remote.fetch_newest(tmp_path / "into")
    assert found is not None and problems == []
    assert read_state(found) == state_of(5)
