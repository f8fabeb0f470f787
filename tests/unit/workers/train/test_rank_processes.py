"""`RankGroup` in separate processes: a failing rank ends the others, wherever they wait."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path

import pytest

from rlsys.errors import DataError, WorkerDied
from workers.train.rank_group import in_processes

pytestmark = pytest.mark.slow


def sums(rank: int, address: str) -> float:
    import torch

    from workers.train.rank_group import RankGroup

    ranks = RankGroup(rank, 2, address=address, timeout_s=60)
    total = ranks.sum(torch.tensor([rank + 1.0])).item()
    ranks.close()
    return total


def waits_while_the_other_fails(pipe: Path, rank: int, address: str) -> None:
    """Rank 1 fails once rank 0 is about to join it."""
    if rank:
        pipe.read_bytes()
        raise DataError("step_000001.jsonl is broken")
    from workers.train.rank_group import RankGroup

    pipe.write_bytes(b"joining")
    RankGroup(rank, 2, address=address)


def dies(rank: int, address: str) -> None:
    if rank:
        os._exit(7)
    multiprocessing.get_context("spawn").Event().wait()  # of nobody


def test_ranks_find_each_other_and_the_first_answers() -> None:
    assert in_processes(2, sums, "adding") == 3.0


def test_a_failed_rank_ends_one_that_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    others = set(multiprocessing.active_children())
    with pytest.raises(DataError, match=r"step_000001\.jsonl is broken"):
        in_processes(2, partial(waits_while_the_other_fails, pipe), "training again")
    assert set(multiprocessing.active_children()) <= others


def test_a_process_that_is_gone_is_named() -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(WorkerDied, match=r"rank 1 while training again: its process ended; was it short of memory\?"):
        in_processes(2, dies, "training again")
    assert set(multiprocessing.active_children()) <= others
