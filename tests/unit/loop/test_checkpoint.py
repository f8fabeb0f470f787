"""Checkpoints: after any interruption, the previous checkpoint is complete and found."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.contracts import Files, Saving
from rlsys.data.task_source import Cursor
from rlsys.errors import CheckpointError
from rlsys.loop.checkpoint import Checkpoints, DriverState, copy_and_write, read_state
from rlsys.loop.checkpoint_files import find_latest, is_complete, newest_whole, parse_manifest, problem_of
from rlsys.loop.task_ledger import LedgerState, TaskDraw
from rlsys.util.any_paths import AnyPath, writing
from rlsys.util.hashed_files import SavedFile

pytestmark = pytest.mark.slow

PARTS = ["actor/weights.bin", "actor/optimizer.bin", "groups.jsonl", "driver.json", "manifest.json"]


def state_of(step: int) -> DriverState:
    pending = {7: TaskDraw(task_id="a", cursor=Cursor(1, 2))}
    ledger = LedgerState("8 tasks", Cursor(1, 3), 8, 7, pending)
    return DriverState(step, {0: "cafe", step: "beef"}, ledger, past={"policy/entropy": 0.1 + 0.2})


CONTENTS = {"actor/weights.bin": b"w" * 100, "actor/optimizer.bin": b"o" * 200, "groups.jsonl": b'{"group": 1}\n'}
FILES = {name: SavedFile.of(content) for name, content in CONTENTS.items()}


@dataclass(frozen=True)
class Written:
    """Some files of actor and groups."""

    folder: AnyPath

    async def take_copy(self) -> None:
        for name, content in CONTENTS.items():
            with writing(self.folder / name) as file:
                file.write(content)

    async def write_copy(self) -> Files:
        return FILES


class DiskIsFull(Written):
    async def take_copy(self) -> None:
        (self.folder / "groups.jsonl").write_bytes(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class DiskFillsUp(Written):
    async def take_copy(self) -> None:
        (self.folder / "groups.jsonl").write_bytes(b"half of")

    async def write_copy(self) -> Files:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save(
    checkpoints: Checkpoints,
    step: int,
    files_in: Callable[[AnyPath], Saving[Files]] = Written,
    state: DriverState | None = None,
) -> AnyPath:
    """Save the state of a step, both parts."""

    async def both() -> AnyPath:
        return await copy_and_write(checkpoints.save(step, state or state_of(step), files_in))

    return asyncio.run(both())


def checkpoints_in(folder: Path, *steps: int, keep_last: int = 10) -> Checkpoints:
    """Checkpoints of `steps`, saved in that order."""
    checkpoints = Checkpoints(folder, every=2, keep_last=keep_last)
    for step in steps:
        assert save(checkpoints, step) == folder / f"step_{step:06d}"
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_what_is_saved_is_what_is_read(tmp_path):
    checkpoints_in(tmp_path, 2)
    latest = tmp_path / "step_000002"
    assert find_latest(tmp_path) == latest
    assert read_state(latest) == state_of(2)
    assert names(tmp_path) == ["latest", "step_000002"]
    assert (tmp_path / "latest").read_text() == "step_000002"
    assert sorted(str(p.relative_to(latest)) for p in latest.rglob("*") if p.is_file()) == sorted(PARTS)


def test_the_manifest_is_what_the_ranks_report(tmp_path):
    """A driver that read the files would find their real hashes."""

    class Reported(Written):
        async def write_copy(self) -> Files:
            return {name: replace(file, xxh3_128="of the rank") for name, file in FILES.items()}

    checkpoint = save(Checkpoints(tmp_path, 1, 1), 1, Reported)
    manifest = parse_manifest((checkpoint / "manifest.json").read_bytes())
    assert {name: file.xxh3_128 for name, file in manifest.items() if name != "driver.json"} == dict.fromkeys(
        FILES, "of the rank"
    )
    assert manifest["driver.json"] == SavedFile.of((checkpoint / "driver.json").read_bytes())


@pytest.mark.parametrize("damage", [truncate, Path.unlink], ids=["truncated", "missing"])
@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_checkpoint_is_passed_over_for_the_previous_one(tmp_path, part, damage: Callable[[Path], None]):
    checkpoints_in(tmp_path, 2, 4)
    damage(tmp_path / "step_000004" / part)
    assert not is_complete(tmp_path / "step_000004")
    assert find_latest(tmp_path) == tmp_path / "step_000002"
    with pytest.raises(CheckpointError, match="step_000004 is not a complete checkpoint"):
        read_state(tmp_path / "step_000004")


@given(st.data())
def test_any_damage_is_passed_over_and_named(data):
    with TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints_in(folder, 2, 4)
        whole, newest = folder / "step_000002", folder / "step_000004"
        path = newest / data.draw(st.sampled_from(PARTS))
        content = path.read_bytes()
        place = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(content[:place])
        else:
            other = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
            path.write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
        found, problems = newest_whole(folder)
        if found == newest:  # white space between two words of the manifest
            assert path.name == "manifest.json" and json.loads(path.read_bytes()) == json.loads(content)
            return
        assert found == whole
        (problem,) = problems
        assert str(newest) in problem


def test_a_file_with_other_contents_is_named(tmp_path):
    checkpoints_in(tmp_path, 2)
    weights = tmp_path / "step_000002" / "actor" / "weights.bin"
    weights.write_bytes(b"w" * 50 + b"x" + b"w" * 49)
    assert find_latest(tmp_path) is not None
    assert problem_of(tmp_path / "step_000002") == f"{weights} has other contents than were saved"
    with pytest.raises(CheckpointError, match=rf"{weights} has other contents than were saved"):
        newest_whole(tmp_path)


def test_a_file_that_was_not_saved_is_named(tmp_path):
    checkpoints_in(tmp_path, 2)
    further = tmp_path / "step_000002" / "actor" / "more.bin"
    further.touch()
    assert problem_of(tmp_path / "step_000002", sizes_only=True) == f"{further} was not saved with this checkpoint"


@pytest.mark.parametrize("named", ["step_000009", "", "step_0000", None])
def test_whatever_latest_says_the_newest_whole_one_is_found(tmp_path, named):
    checkpoints_in(tmp_path, 2, 4)
    (tmp_path / "latest").unlink() if named is None else (tmp_path / "latest").write_text(named)
    assert find_latest(tmp_path) == tmp_path / "step_000004"


def test_latest_decides_between_whole_ones(tmp_path):
    checkpoints_in(tmp_path, 2, 4)
    (tmp_path / "latest").write_text("step_000002\n")
    assert find_latest(tmp_path) == tmp_path / "step_000002"


def test_where_nothing_was_saved_nothing_is_found(tmp_path):
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None
    assert not is_complete(tmp_path / "nowhere")


def test_an_interrupted_write_is_not_a_checkpoint(tmp_path):
    checkpoints_in(tmp_path, 2)
    shutil.copytree(tmp_path / "step_000002", tmp_path / "step_000004.tmp")
    assert find_latest(tmp_path) == tmp_path / "step_000002"
    checkpoints_in(tmp_path, 4)
    assert names(tmp_path) == ["latest", "step_000002", "step_000004"]


@pytest.mark.parametrize("files_in", [DiskIsFull, DiskFillsUp], ids=["at once", "while writing"])
def test_a_full_disk_names_and_keeps_the_last_good_checkpoint(tmp_path, files_in):
    checkpoints = checkpoints_in(tmp_path, 2)
    with pytest.raises(CheckpointError) as raised:
        save(checkpoints, 4, files_in)
    for part in ("step 4", str(tmp_path), "GiB free", "No space left", f"last good one is {tmp_path / 'step_000002'}"):
        assert part in str(raised.value)
    assert names(tmp_path) == ["latest", "step_000002"]
    assert checkpoints.last_saved == 2


def test_a_full_disk_at_the_first_save_reports_none_saved(tmp_path):
    with pytest.raises(CheckpointError, match="none was saved before"):
        save(Checkpoints(tmp_path / "new", 1, 1), 1, DiskIsFull)


def test_a_full_disk_while_saving_again_keeps_the_old_checkpoint(tmp_path):
    checkpoints = checkpoints_in(tmp_path, 2)
    with pytest.raises(CheckpointError):
        save(checkpoints, 2, DiskIsFull)
    assert find_latest(tmp_path) == tmp_path / "step_000002"


def test_only_the_newest_are_kept(tmp_path):
    checkpoints_in(tmp_path, 2, 4, 6, 8, keep_last=2)
    assert names(tmp_path) == ["latest", "step_000006", "step_000008"]


def test_the_one_that_latest_names_is_kept_however_old(tmp_path):
    checkpoints_in(tmp_path, 6, 8)
    checkpoints_in(tmp_path, 2, keep_last=1)
    assert find_latest(tmp_path) == tmp_path / "step_000002"
    assert "step_000002" in names(tmp_path)


@pytest.mark.parametrize(
    ("every", "step", "is_last", "last_saved", "due"),
    [
        (2, 4, False, 2, True),
        (2, 3, False, 2, False),
        (2, 3, True, 2, True),
        (0, 4, False, None, False),
        (0, 4, True, None, True),
        (2, 4, True, 4, False),
    ],
)
def test_when_a_checkpoint_is_due(tmp_path, every, step, is_last, last_saved, due):
    assert Checkpoints(tmp_path, every, 1, last_saved=last_saved).is_due(step, 0.0, is_last=is_last) is due


def test_a_checkpoint_is_due_once_its_seconds_have_passed(tmp_path):
    checkpoints = Checkpoints(tmp_path, every=100, keep_last=1, every_s=600.0)
    asked = [(step, step * 250.0) for step in range(1, 8)]
    assert [step for step, now_s in asked if checkpoints.is_due(step, now_s, is_last=False)] == [4, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", r"driver\.json cannot be read"),
        ('{"state_v": 9}', r"driver\.json has format 9, and this version of rlsys reads 1; go on with the version"),
        ('{"state_v": 1}', r"driver\.json cannot be read: (.|\n)*ledger(.|\n)*run\.resume=PATH"),
    ],
    ids=["no JSON", "another format", "fields missing"],
)
def test_an_unreadable_driver_state_is_named(tmp_path, text, message):
    checkpoints_in(tmp_path, 2)
    path = tmp_path / "step_000002" / "driver.json"
    path.write_text(text.ljust(path.stat().st_size))
    with pytest.raises(CheckpointError, match=message):
        read_state(tmp_path / "step_000002")


def rewritten(path: Path, pending: object) -> None:
    """Replace the pending groups of a state."""
    row = json.loads(path.read_text())
    row["ledger"]["pending"] = pending
    path.write_text(json.dumps(row).ljust(path.stat().st_size))


def test_pending_groups_are_rows_with_a_group_id(tmp_path):
    checkpoints_in(tmp_path, 2)
    path = tmp_path / "step_000002" / "driver.json"
    cursor = {"epoch": 1, "position": 2, "source": ""}
    rows = [{"group_id": 7, "task_id": "a", "cursor": cursor, "size": None, "token_limit": None}]
    assert json.loads(path.read_text())["ledger"]["pending"] == rows
    rewritten(path, [{"group_id": 7, "task_id": "a", "cursor": cursor}])
    assert read_state(tmp_path / "step_000002") == state_of(2)


@pytest.mark.parametrize("pending", [3, [3], [{}], [{"group_id": []}], [{"group_id": 7}] * 2, {"group_id": 7}])
def test_pending_groups_in_another_form_are_refused(tmp_path, pending):
    checkpoints_in(tmp_path, 2)
    rewritten(tmp_path / "step_000002" / "driver.json", pending)
    with pytest.raises(CheckpointError, match=r"driver\.json cannot be read"):
        read_state(tmp_path / "step_000002")


def test_a_state_without_a_format_is_of_the_first(tmp_path):
    checkpoints_in(tmp_path, 2)
    path = tmp_path / "step_000002" / "driver.json"
    row = json.loads(path.read_text())
    del row["state_v"]
    path.write_text(json.dumps(row).ljust(path.stat().st_size))
    assert read_state(tmp_path / "step_000002") == state_of(2)


def test_an_older_state_without_past_metrics_loads_with_none(tmp_path):
    checkpoints_in(tmp_path, 2)
    path = tmp_path / "step_000002" / "driver.json"
    row = json.loads(path.read_text())
    del row["past"]
    path.write_text(json.dumps(row).ljust(path.stat().st_size))
    assert read_state(tmp_path / "step_000002") == replace(state_of(2), past={})


def test_metrics_that_are_not_finite_survive_a_save(tmp_path):
    state = replace(state_of(2), past={"a": math.nan, "b": -math.inf})
    save(Checkpoints(tmp_path, 1, 1), 2, state=state)
    past = read_state(tmp_path / "step_000002").past
    assert math.isnan(past["a"])
    assert past["b"] == -math.inf
