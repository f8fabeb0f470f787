"""Checkpoints on a server with the interface of S3: a run, and ranks that write and read it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from rlsys.contracts import Files
from rlsys.errors import CheckpointError
from rlsys.loop.checkpoint_files import newest_whole
from rlsys.testing import FakeRun
from rlsys.util.any_paths import RemotePath
from rlsys.util.hashed_files import SavedFile
from tests.contract.test_remote_state import save_at, weights_at
from tests.object_stores import object_store
from tests.training import JoinedRanks
from workers.train.rank_group import RankGroup


@pytest.fixture(scope="session")  # fsspec keeps a client, and with it the address of the server it began with
def store() -> Iterator[Mapping[str, str]]:
    with object_store() as variables:
        yield variables


@pytest.fixture
def server(store: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a bucket that this process reaches."""
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket"


def save_there(variables: Mapping[str, str], model_path: str, folder: RemotePath, ranks: RankGroup) -> Files:
    os.environ.update(variables)
    return save_at(model_path, folder, ranks)


def test_a_run_goes_on_from_a_server(server: str, tmp_path: Path) -> None:
    whole = FakeRun(tmp_path / "whole", run={"steps": 4}, checkpoint={"every": 1})
    assert whole.train() == 4
    sections = {"checkpoint": {"every": 1, "keep_last": 2, "to": f"{server}/store"}}
    assert FakeRun(tmp_path / "run", run={"steps": 3}, **sections).train() == 3
    rest = FakeRun(tmp_path / "run", run={"steps": 4}, **sections)
    assert rest.train() == 4
    assert rest.world.weights == whole.world.weights
    place = rest.config.checkpoints_at
    assert isinstance(place, RemotePath)
    assert place.names() == ["latest", "step_000003", "step_000004"]
    assert newest_whole(place) == (place / "step_000004", [])


def test_ranks_write_and_read_a_server_themselves(
    model_path: str, two_ranks: JoinedRanks, server: str, store: Mapping[str, str]
) -> None:
    actor = RemotePath(f"{server}/ranks/actor")
    reports = two_ranks(save_there, store, model_path, actor)
    assert {**reports[0], **reports[1]} == {n: SavedFile.of((actor / n).read_bytes()) for n in actor.names()}
    one, two = weights_at(model_path, actor, RankGroup()), two_ranks(weights_at, model_path, actor)[0]
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_server_that_is_gone_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"cannot read ftp://127\.0\.0\.1:9/store: ConnectionRefusedError"):
        RemotePath("ftp://127.0.0.1:9/store").names()
