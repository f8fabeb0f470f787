"""Checkpoints on a real file server, of another kind than a folder: a run, and ranks that write and read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import ThreadedFTPServer

from rlsys.errors import CheckpointError
from rlsys.loop.checkpoint_files import hash_files, newest_whole
from rlsys.testing import FakeRun
from rlsys.util.any_paths import RemotePath
from tests.contract.test_remote_state import save_at, weights_at
from tests.training import JoinedRanks
from workers.train.rank_group import RankGroup


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """URL of a server of the folder `served`."""
    (tmp_path / "served").mkdir()
    authorizer = DummyAuthorizer()
    authorizer.add_anonymous(str(tmp_path / "served"), perm="elradfmwMT")
    handler = type("Handler", (FTPHandler,), {"authorizer": authorizer})
    with ThreadedFTPServer(("127.0.0.1", 0), handler) as ftp:
        thread = Thread(target=ftp.serve_forever, kwargs={"handle_exit": False})
        thread.start()
        yield f"ftp://127.0.0.1:{ftp.address[1]}"
        ftp.close_all()
        thread.join()


@pytest.mark.filterwarnings("ignore:write permissions assigned to anonymous user")
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


@pytest.mark.filterwarnings("ignore:write permissions assigned to anonymous user")
def test_ranks_write_and_read_a_server_themselves(
    model_path: str, two_ranks: JoinedRanks, server: str, tmp_path: Path
) -> None:
    actor = RemotePath(f"{server}/store/actor")
    reports = two_ranks(save_at, model_path, actor)
    assert {**reports[0], **reports[1]} == hash_files(tmp_path / "served" / "store" / "actor")
    one, two = weights_at(model_path, actor, RankGroup()), two_ranks(weights_at, model_path, actor)[0]
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.filterwarnings("ignore:write permissions assigned to anonymous user")
def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read ftp://127\.0\.0\.1:9/store: ConnectionRefusedError"):
        RemotePath("ftp://127.0.0.1:9/store").names()
