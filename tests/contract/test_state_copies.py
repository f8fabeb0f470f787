"""Saving while training goes on: what is written is the state at the save, whatever the next steps do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlsys.contracts import Files
from rlsys.errors import CheckpointError
from rlsys.loop.checkpoint import check_seen
from rlsys.loop.checkpoint_files import hash_files
from rlsys.types import Distribution
from tests.training import PLAIN, SETTINGS, JoinedRanks, data_of, differing, everything_in, planned
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup


def test_each_of_several_saves_has_the_state_of_its_step(model_path: str, tmp_path: Path) -> None:
    """Each step begins right after a save; a second run that waits for every file wrote the same."""
    for name in ("beside", "alone"):
        backend = FsdpBackend(model_path, SETTINGS, RankGroup())
        for step in range(4):
            plan, payloads = planned(step, 1, PLAIN)
            writing = backend.save(tmp_path / name / str(step))
            if name == "alone":
                writing.wait()
            backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
        writing.wait()
    for step in range(4):
        beside, alone = (everything_in(tmp_path / name / str(step)) for name in ("beside", "alone"))
        assert differing(beside, alone) == []
    first, second = (everything_in(tmp_path / "beside" / str(step)) for step in range(2))
    assert differing(first, second) != []


def save_apart(model_path: str, folder: Path, ranks: RankGroup) -> Files:
    return FsdpBackend(model_path, SETTINGS, ranks).save(folder / f"machine{ranks.rank}").wait()


def test_each_rank_reports_the_files_that_it_wrote(model_path: str, two_ranks: JoinedRanks, tmp_path: Path) -> None:
    reports = two_ranks(save_apart, model_path, tmp_path)
    first, second = (hash_files(tmp_path / f"machine{rank}") for rank in range(2))
    assert reports == [first, second]
    assert first and second and not first.keys() & second.keys()
    check_seen(tmp_path / "machine1", second)
    with pytest.raises(CheckpointError, match=rf"machine1/{min(first)} is missing, and a rank wrote"):
        check_seen(tmp_path / "machine1", {**first, **second})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_saves_the_state_of_each_step(model_path: str, tmp_path: Path) -> None:
    backend = FsdpBackend(model_path, SETTINGS, RankGroup(), device=torch.device("cuda"))
    for step in range(3):
        plan, payloads = planned(step, 1, PLAIN)
        expected = {name: p.detach().cpu().clone() for name, p in backend.parameters().items()}
        writing = backend.save(tmp_path / str(step))
        backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
        writing.wait()
        saved = everything_in(tmp_path / str(step))
        assert differing({name: saved[f"model.{name}"] for name in expected}, expected) == []
