"""Checkpoints at a URL: there once their manifest is, removed with it first, fetched where a command needs files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from rlsys.config import Config
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.run_folder import checkpoint_of, start_of, write_run_dir
from rlsys.loop.checkpoint import Checkpoints, read_state
from rlsys.loop.checkpoint_files import (
    find_latest,
    local_checkpoint,
    newest_first,
    newest_whole,
    problem_of,
    remove_checkpoint,
)
from rlsys.monitoring.events import CheckpointPassedOver
from rlsys.testing import FakeRun
from rlsys.testing.fake_run import go_on
from rlsys.util.any_paths import RemotePath
from tests.unit.loop.test_checkpoint import CONTENTS, Written, names, save, state_of


class Elsewhere:
    """A run whose checkpoints are at a URL."""

    def __init__(self, folder: Path, store: str) -> None:
        self.run, self.store = folder / "runs" / "sums", store
        self.place = RemotePath(f"{store}/sums/checkpoints")
        self.checkpoints = Checkpoints(self.place, every=1, keep_last=2)

    def save(self, *steps: int) -> None:
        for step in steps:
            assert save(self.checkpoints, step) == self.place / f"step_{step:06d}"

    def config(self, resume: str = "auto", name: str = "sums") -> Config:
        keys = ["model.path=m", "data.path=d", "run.steps=9", f"run.folder={self.run.parent}", f"run.name={name}"]
        return Config.load([], [*keys, f"run.resume={resume}", f"checkpoint.to={self.store}"])


@pytest.fixture(params=["file", "memory"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Elsewhere:
    """A run with checkpoints of steps 1 to 3, of which two are kept."""
    store = f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid4().hex}"
    elsewhere = Elsewhere(tmp_path, store)
    elsewhere.save(1, 2, 3)
    return elsewhere


def test_checkpoints_at_a_url_are_those_of_a_folder(elsewhere):
    assert elsewhere.place.names() == ["latest", "step_000002", "step_000003"]
    newest = find_latest(elsewhere.place)
    assert newest is not None and newest == elsewhere.place / "step_000003"
    assert read_state(newest) == state_of(3)
    assert newest_whole(elsewhere.place) == (newest, [])
    assert {name: (newest / name).read_bytes() for name in CONTENTS} == CONTENTS


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_run_without_its_folder_goes_on_from_its_url(elsewhere, resume):
    assert start_of(elsewhere.config(resume)).checkpoint == elsewhere.place / "step_000003"
    assert not elsewhere.run.exists(), "nothing is fetched"


def test_another_run_starts_from_a_url(elsewhere):
    other = elsewhere.config(f"{elsewhere.store}/sums", name="new")
    assert start_of(other).checkpoint == elsewhere.place / "step_000003"
    save(Checkpoints(other.checkpoints_at, 1, 1), 4)
    assert start_of(other).checkpoint == other.checkpoints_at / "step_000004"


def test_a_run_that_gets_a_url_goes_on_from_its_folder(elsewhere, tmp_path):
    config = elsewhere.config(name="moved")
    save(Checkpoints(config.run_dir / "checkpoints", 1, 1), 2)
    assert start_of(config).checkpoint == config.run_dir / "checkpoints" / "step_000002"
    save(Checkpoints(config.checkpoints_at, 1, 1), 3)
    assert start_of(config).checkpoint == config.checkpoints_at / "step_000003"


def test_a_file_that_is_cut_passes_the_checkpoint_over(elsewhere):
    weights = elsewhere.place / "step_000003" / "actor" / "weights.bin"
    weights.write_bytes(b"w")
    start = start_of(elsewhere.config())
    assert start.checkpoint == elsewhere.place / "step_000002"
    assert start.passed_over == [f"{weights} has 1 bytes, and was saved with 100"]


def test_a_file_that_is_missing_passes_the_checkpoint_over(elsewhere):
    weights = elsewhere.place / "step_000003" / "actor" / "weights.bin"
    weights.remove()
    assert start_of(elsewhere.config()).passed_over == [f"{weights} cannot be read: there is no such file"]


def test_a_file_that_was_not_saved_passes_the_checkpoint_over(elsewhere):
    further = elsewhere.place / "step_000003" / "actor" / "more.bin"
    further.write_bytes(b"more")
    assert start_of(elsewhere.config()).passed_over == [f"{further} was not saved with this checkpoint"]


def test_a_flipped_bit_is_found_by_reading(elsewhere):
    weights = elsewhere.place / "step_000003" / "actor" / "weights.bin"
    weights.write_bytes(b"w" * 99 + b"x")
    found, problems = newest_whole(elsewhere.place)
    assert (found, problems) == (elsewhere.place / "step_000002", [f"{weights} has other contents than were saved"])


def test_without_its_manifest_a_checkpoint_is_not_there(elsewhere):
    (elsewhere.place / "step_000003" / "manifest.json").remove()
    start = start_of(elsewhere.config())
    assert (start.checkpoint, start.passed_over) == (elsewhere.place / "step_000002", [])


def test_damaged_checkpoints_alone_never_restart_a_run(elsewhere):
    for step in (2, 3):
        (elsewhere.place / f"step_{step:06d}" / "actor" / "weights.bin").remove()
    with pytest.raises(CheckpointError, match=r"every checkpoint in .*:/.* is damaged:(.|\n)*weights\.bin cannot be"):
        start_of(elsewhere.config())


def test_a_new_run_is_refused_beside_checkpoints_of_another(elsewhere):
    with pytest.raises(ConfigError, match=r"/sums/checkpoints/step_000003 holds a run already"):
        start_of(elsewhere.config("never"))
    assert start_of(elsewhere.config("never", name="new")).checkpoint is None


class Stubborn(MemoryFileSystem):
    """A file system that removes files, and no folders."""

    protocol = "stubborn"

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        if self.isdir(path):
            raise TimeoutError("the store is busy")
        super().rm(path)


def test_a_checkpoint_is_removed_with_its_manifest_first():
    register_implementation("stubborn", Stubborn, clobber=True)
    place = RemotePath(f"stubborn://{uuid4().hex}/checkpoints")
    checkpoints = Checkpoints(place, every=1, keep_last=1)
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert [*newest_first(place)] == [place / "step_000002"]
    assert (place / "step_000001" / "groups.jsonl").exists(), "and the run goes on"
    with pytest.raises(CheckpointError, match=r"cannot remove stubborn:.*step_000002: TimeoutError: the store is busy"):
        remove_checkpoint(place / "step_000002")
    assert find_latest(place) is None


class Flaky(MemoryFileSystem):
    """A store in which some requests time out now, and in which others do something in the middle of one."""

    protocol = "flaky"
    broken: ClassVar[list[str]] = []
    """Requests that fail, with the ends of their paths: `ls checkpoints`."""
    meanwhile: ClassVar[list[Callable[[], object]]] = []
    """Done once, during the next read of weights."""
    removing: ClassVar[list[Callable[[], object]]] = []
    """Done once, before the next removal."""
    requests: ClassVar[list[tuple[str, bool]]] = []
    """Path of each request of the driver, and whether it blocked an event loop."""

    def _begin(self, what: str, path: str) -> None:
        if path.endswith(("manifest.json", "latest")):
            self.requests.append((path, is_on_loop()))
        if any(what == verb and path.endswith(end) for verb, end in map(str.split, self.broken)):
            raise TimeoutError("the store is busy")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._begin("ls", path)
        return super().ls(path, detail, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._begin("info", path)
        return super().info(path, **kwargs)

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        self._begin("write" if "w" in mode else "read", path)
        return super().open(path, mode, *args, **kwargs)

    def rm(self, path: str, *args: Any, **kwargs: Any) -> None:
        if self.removing:
            self.removing.pop()()
        super().rm(path, *args, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._begin("read", path)
        if path.endswith("weights.bin") and self.meanwhile:
            self.meanwhile.pop()()
        return super().cat_file(path, *args, **kwargs)


def is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[Elsewhere]:
    """A run with a checkpoint of step 1 in a store whose requests may fail."""
    register_implementation("flaky", Flaky, clobber=True)
    elsewhere = Elsewhere(tmp_path, f"flaky://{uuid4().hex}")
    elsewhere.save(1)
    yield elsewhere
    for state in (Flaky.broken, Flaky.meanwhile, Flaky.removing, Flaky.requests):
        state.clear()


def test_a_listing_that_fails_after_a_save_ends_nothing(flaky):
    Flaky.broken.append("ls checkpoints")
    flaky.save(2)
    Flaky.broken.clear()
    assert newest_whole(flaky.place) == (flaky.place / "step_000002", [])


def test_a_complete_checkpoint_is_never_removed(flaky):
    Flaky.broken.append("write latest")
    with pytest.raises(CheckpointError, match="of step 2 could not be written"):
        save(flaky.checkpoints, 2)
    assert problem_of(flaky.place / "step_000002") is None


def test_a_save_that_fails_half_way_is_removed(flaky):
    Flaky.broken.append("write driver.json")
    with pytest.raises(CheckpointError, match="of step 2 could not be written"):
        save(flaky.checkpoints, 2)
    assert flaky.place.names() == ["latest", "step_000001"]


def test_a_cancelled_save_that_failed_is_removed_before_it_ends(flaky):
    """A later save of the same step begins with nothing of it."""

    async def left_behind() -> list[str]:
        loop, written = asyncio.get_running_loop(), flaky.checkpoints.save(2, state_of(2), Written)
        await written.take_copy()
        saving = asyncio.create_task(written.write_copy())

        async def cancel() -> None:
            saving.cancel()
            for _ in range(9):  # as many turns as the cancellation may take
                await asyncio.sleep(0)

        Flaky.broken.append("write driver.json")
        Flaky.removing.append(lambda: asyncio.run_coroutine_threadsafe(cancel(), loop).result())
        with pytest.raises(asyncio.CancelledError):
            await saving
        return flaky.place.names()

    assert asyncio.run(left_behind()) == ["latest", "step_000001"]


def test_a_manifest_that_cannot_be_read_now_is_not_damaged(flaky):
    flaky.save(2)
    Flaky.broken.append("read step_000002/manifest.json")
    with pytest.raises(CheckpointError, match=r"cannot read flaky:.*/manifest\.json: TimeoutError: the store is busy"):
        start_of(flaky.config())


def test_rests_of_saves_that_were_cut_off_are_removed(flaky):
    for step in (2, 4):
        (flaky.place / f"step_{step:06d}" / "actor" / "weights.bin").write_bytes(b"half of")
    flaky.save(3)
    assert flaky.place.names() == ["latest", "step_000001", "step_000003", "step_000004"], "4 may be in writing"


def test_a_run_reads_no_store_on_its_event_loop(flaky, tmp_path):
    sections = {"checkpoint": {"every": 1, "to": flaky.store}}
    assert FakeRun(tmp_path / "run", run={"steps": 2}, **sections).train() == 2
    Flaky.requests.clear()
    Flaky.broken.append("write latest")
    with pytest.raises(CheckpointError, match="of step 3 could not be written"):
        asyncio.run(go_on(FakeRun(tmp_path / "run", run={"steps": 3}, **sections).driver))
    blocking = {path for path, is_blocking in Flaky.requests if is_blocking}
    assert Flaky.requests and not blocking


def test_a_checkpoint_that_cannot_be_written_names_url_and_cause(tmp_path):
    elsewhere = Elsewhere(tmp_path, f"file://{tmp_path}/store")
    elsewhere.save(1)
    (tmp_path / "store" / "sums" / "checkpoints" / "step_000002").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError) as raised:
        (elsewhere.place / "step_000002" / "actor" / "weights.bin").write_bytes(b"w")
    assert f"cannot write file://{tmp_path}/store/sums/checkpoints/step_000002/actor" in str(raised.value)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("a file where a folder should be")
    with pytest.raises(
        CheckpointError, match=r"of step 2 could not be written to file:(.|\n)*Not a directory.* Go on with"
    ):
        save(elsewhere.checkpoints, 2)


def test_a_url_that_nothing_opens_is_named():
    with pytest.raises(ConfigError, match=r"nosuch://bucket cannot be opened: .*nosuch"):
        RemotePath("nosuch://bucket").names()


def test_the_old_key_is_refused_with_the_new_one(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.copy_to(.|\n)*set `checkpoint\.to: URL`"):
        Config.load([], ["model.path=m", "data.path=d", "run.steps=9", f"checkpoint.copy_to=file://{tmp_path}"])


# --------------------------------------------------------------------------------------------- on this machine, fetched


def test_a_command_fetches_a_checkpoint_once(elsewhere):
    write_run_dir(elsewhere.config())
    found = checkpoint_of(elsewhere.run, "latest")
    assert found == elsewhere.run / "fetched" / "step_000003"
    assert read_state(found) == state_of(3)
    inode = (found / "groups.jsonl").stat().st_ino
    assert checkpoint_of(elsewhere.run, "3") == found
    assert (found / "groups.jsonl").stat().st_ino == inode
    (found / "groups.jsonl").write_bytes(b"damaged")
    assert checkpoint_of(elsewhere.run, "3") == found
    assert (found / "groups.jsonl").read_bytes() == CONTENTS["groups.jsonl"]
    assert names(elsewhere.run / "fetched") == ["step_000003"]


def test_commands_that_fetch_at_once_get_one_whole_copy(flaky):
    found: list[tuple[Path, int]] = []

    def fetch() -> None:
        path = local_checkpoint(flaky.place / "step_000001", flaky.run)
        found.append((path, path.stat().st_ino))

    Flaky.meanwhile.append(fetch)
    fetch()
    assert found == [found[0]] * 2
    assert names(flaky.run / "fetched") == ["step_000001"]


def test_a_damaged_checkpoint_is_not_fetched(elsewhere):
    write_run_dir(elsewhere.config())
    (elsewhere.place / "step_000003" / "actor" / "weights.bin").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=r"weights\.bin has other contents than were saved"):
        checkpoint_of(elsewhere.run, "latest")
    assert names(elsewhere.run / "fetched") == []


def test_a_manifest_never_writes_outside(elsewhere, tmp_path):
    write_run_dir(elsewhere.config())
    manifest = elsewhere.place / "step_000003" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"actor/weights.bin", b"../../../escaped.bin"))
    with pytest.raises(CheckpointError, match=r"escaped\.bin', which is not in its folder"):
        checkpoint_of(elsewhere.run, "latest")
    assert list(tmp_path.rglob("escaped.bin")) == []


# ------------------------------------------------------------------------------------------------------------- in a run


def test_a_run_goes_on_from_a_url_bit_for_bit(tmp_path):
    whole = FakeRun(tmp_path / "whole", run={"steps": 5}, checkpoint={"every": 1})
    assert whole.train() == 5
    sections = {"checkpoint": {"every": 1, "to": f"memory://{uuid4().hex}"}}
    assert FakeRun(tmp_path / "run", run={"steps": 3}, **sections).train() == 3
    rest = FakeRun(tmp_path / "run", run={"steps": 5}, **sections)
    assert rest.train() == 5
    assert rest.world.weights == whole.world.weights
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_ranks_find_a_flipped_bit_at_a_url(tmp_path):
    sections = {"checkpoint": {"every": 1, "to": f"memory://{uuid4().hex}"}}
    run = FakeRun(tmp_path / "run", run={"steps": 3}, **sections)
    run.train()
    weights = run.config.checkpoints_at / "step_000003" / "actor" / "weights.json"
    weights.write_bytes(weights.read_bytes().replace(b"weights", b"weighty"))
    rest = FakeRun(tmp_path / "run", run={"steps": 5}, **sections)
    rest.train()
    (passed,) = rest.recorder.of(CheckpointPassedOver)
    assert passed.problem == f"{weights} has other contents than were saved"
    assert len(rest.metrics) == 3, "it goes on from step 2"
