"""Training that sleeps between any two calls: it ends on the same weights, and has nothing on its device meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from algorithms.gac import GAC
from rlsys.algorithm import Column
from rlsys.config.lora_section import LoraSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings, SyncSection
from rlsys.types import Distribution
from tests.training import PLAIN, SETTINGS, JoinedRanks, data_of, differing, everything_in, planned
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup

KINDS = ("whole", "lora", "synced", "bfloat16", "offload")


def left_on(backend: FsdpBackend, state: list[torch.Tensor]) -> int:
    """Bytes of what a sleeping rank still has."""
    return sum(t.untyped_storage().nbytes() for t in (*backend.shards().values(), *state))


def trained(model_path: str, kind: str, folder: Path, ranks: RankGroup, sleeps: bool) -> list[float]:
    """Losses of four steps, of which the third begins from a checkpoint; the state is saved at the end."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if kind == "bfloat16" else "float32"
    lora = LoraSection(rank=2) if kind == "lora" else None
    sync = SyncSection(every=2, mixup=0.25) if kind == "synced" else None
    savings = MemorySavings(offload=True) if kind == "offload" else NO_SAVINGS
    backend = FsdpBackend(model_path, SETTINGS, ranks, dtype=dtype, lora=lora, sync=sync, savings=savings)
    stabilizer = GAC(calibrate_steps=10).start(backend.shards())

    def rest() -> None:
        if sleeps:
            backend.move_out(stabilizer, moves_state=True)
            assert left_on(backend, list(stabilizer.state_dict().values())) == 0
            backend.move_in()

    losses = []
    for step in range(4):
        plan, payloads = planned(step, ranks.num_ranks, PLAIN)
        mine, data = plan[ranks.rank], data_of(payloads)
        rest()
        if step == 2:
            backend.save(folder / "middle", stabilizer).wait()
            rest()
            backend.load(folder / "middle", stabilizer)
            rest()
        if sync:
            backend.reference(mine, data, Column.REFERENCE_LOGPROBS, Distribution(1.0))
            rest()
        found = backend.train_step(mine, data, PLAIN, distribution=Distribution(1.0), stabilizer=stabilizer)
        losses.append(found["loss"])
    rest()
    backend.save(folder / "end", stabilizer).wait()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_sleeps_trains_as_one_that_does_not(model_path: str, tmp_path: Path, kind: str) -> None:
    slept, calm = (trained(model_path, kind, tmp_path / str(s), RankGroup(), s) for s in (True, False))
    assert slept == calm
    assert differing(*(everything_in(tmp_path / str(s) / "end") for s in (True, False))) == []


def test_two_ranks_that_sleep_train_as_two_that_do_not(model_path: str, two_ranks: JoinedRanks, tmp_path: Path) -> None:
    slept, calm = (two_ranks(in_turns, model_path, tmp_path / str(s), s) for s in (True, False))
    assert slept == calm
    assert differing(*(everything_in(tmp_path / str(s) / "end") for s in (True, False))) == []


def in_turns(model_path: str, folder: Path, sleeps: bool, ranks: RankGroup) -> list[float]:
    return trained(model_path, "bfloat16", folder, ranks, sleeps)
