"""Training state at a URL: written and read by ranks themselves, by byte ranges."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY

from rlsys.contracts import Files
from rlsys.data.task_source import Cursor
from rlsys.errors import CheckpointError
from rlsys.loop.checkpoint import Checkpoints, DriverState
from rlsys.loop.checkpoint_files import content_problem, hash_files, newest_whole, parse_manifest
from rlsys.loop.task_ledger import LedgerState
from rlsys.util.any_paths import AnyPath, RemotePath, any_path, writing
from rlsys.util.hashed_files import SavedFile
from tests.training import SETTINGS, JoinedRanks
from workers.model.model_tensors import local
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup
from workers.train.ranks import Rank
from workers.train.state_files import StateWriter, load_state, saved_shapes


def tensors() -> dict[str, dict[str, Tensor]]:
    """Tensors of all kinds that a state has."""
    return {
        "model": {"matrix": torch.arange(12.0).reshape(3, 4), "half": torch.arange(5).bfloat16()},
        "progress": {"step": torch.tensor(7), "none": torch.empty(0, 3), "bytes": torch.arange(9, dtype=torch.uint8)},
    }


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    return any_path(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{uuid4().hex}/store")


def test_a_state_at_a_url_is_read_bit_for_bit(place):
    files = StateWriter(RankGroup(), torch.device("cpu")).save(tensors(), place / "actor").wait()
    assert files == {name: SavedFile.of((place / "actor" / name).read_bytes()) for name in (place / "actor").names()}
    assert saved_shapes(place / "actor", "model") == {"matrix": (3, 4), "half": (5,)}
    found = {part: {name: torch.zeros_like(t) for name, t in named.items()} for part, named in tensors().items()}
    load_state(found, place / "actor", num_ranks=1)
    assert all(torch.equal(found[part][name], t) for part, named in tensors().items() for name, t in named.items())


def test_a_place_without_state_is_named(place):
    with pytest.raises(CheckpointError, match=rf"cannot read training state from {place}/actor: it contains no"):
        load_state(tensors(), place / "actor", num_ranks=1)


def file_of(header: object) -> bytes:
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DAMAGED = {
    "length": b"\xff" * 20,
    "no JSON": file_of({})[:-1] + b"x",
    "a list": file_of([]),
    "no shape": file_of({"model.matrix": {}}),
    "no dtype": file_of({"model.matrix": {**TENSOR, "dtype": "?"}}),
    "no sizes": file_of({"model.matrix": {**TENSOR, "shape": ["x"]}}),
    "other offsets": file_of(
        {"model.matrix": TENSOR, "__metadata__": {CUSTOM_METADATA_KEY: '{"model.matrix": {"saved_offsets": []}}'}}
    ),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_header_that_is_damaged_is_named(place: AnyPath, content: bytes) -> None:
    with writing(place / "actor" / "a.safetensors") as file:
        file.write(content)
    message = r"cannot read training state from .*a\.safetensors"
    with pytest.raises(CheckpointError, match=message):
        load_state(tensors(), place / "actor", num_ranks=1)
    with pytest.raises(CheckpointError, match=message):
        saved_shapes(place / "actor", "model")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "store").write_text("a file where a folder should be")
    writing = StateWriter(RankGroup(), torch.device("cpu")).save(
        tensors(), RemotePath(f"file://{tmp_path}/store/actor")
    )
    with pytest.raises(CheckpointError, match=rf"cannot write file://{tmp_path}/store/actor.*NotADirectoryError"):
        writing.wait()


def test_a_rank_reads_its_share_and_names_a_damaged_file(place):
    files = StateWriter(RankGroup(), torch.device("cpu")).save(tensors(), place / "actor").wait()
    assert content_problem(place / "actor", files) is None
    assert Rank().find_damage(place / "actor", files) is None
    (name,) = files
    content = (place / "actor" / name).read_bytes()
    (place / "actor" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert Rank().find_damage(place / "actor", files) == f"{place}/actor/{name} has other contents than were saved"


def changed(model_path: str, ranks: RankGroup) -> FsdpBackend:
    """A model with other weights than those of its files."""
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    with torch.no_grad():
        for parameter in backend.parameters().values():
            local(parameter).add_(1.0)
    return backend


def save_at(model_path: str, folder: AnyPath, ranks: RankGroup) -> Files:
    return changed(model_path, ranks).save(folder).wait()


def weights_at(model_path: str, folder: AnyPath, ranks: RankGroup) -> dict[str, Tensor]:
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    backend.load(folder)
    return backend.full_weights(torch.float32)


def test_ranks_write_and_read_a_url_themselves(model_path: str, two_ranks: JoinedRanks, tmp_path: Path) -> None:
    """Two ranks write; one and two read."""
    actor = RemotePath(f"file://{tmp_path}/store/actor")
    reports = two_ranks(save_at, model_path, actor)
    assert {**reports[0], **reports[1]} == hash_files(tmp_path / "store" / "actor")
    expected = changed(model_path, RankGroup()).full_weights(torch.float32)
    for found in (weights_at(model_path, actor, RankGroup()), two_ranks(weights_at, model_path, actor)[0]):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_driver_reads_nothing_of_what_ranks_write(model_path: str, two_ranks: JoinedRanks) -> None:
    """The files are in the memory of the ranks' processes, where the driver cannot open them."""
    checkpoints = Checkpoints(any_path(f"memory://{uuid4().hex}"), 1, 1)
    partial = checkpoints.partial(1)
    reports = two_ranks(save_at, model_path, partial / "actor")
    of_ranks = {f"actor/{name}": saved for report in reports for name, saved in report.items()}
    files = {**of_ranks, "groups.jsonl": SavedFile.of(b"")}
    state = DriverState(1, {}, LedgerState("", Cursor(0, 0), 0, 0, {}))
    checkpoint = checkpoints.complete(state, partial, files)
    manifest = parse_manifest((checkpoint / "manifest.json").read_bytes())
    assert {name: saved for name, saved in manifest.items() if name != "driver.json"} == files
    assert (checkpoint / "driver.json").exists()
    with pytest.raises(CheckpointError, match="cannot be read: there is no such file"):
        newest_whole(checkpoints.folder)
