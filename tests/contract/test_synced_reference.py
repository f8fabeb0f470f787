"""A reference that follows the policy: what it is after each step, and in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algorithm import Column
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings, SyncSection
from rlsys.types import Distribution
from tests.training import PLAIN, SETTINGS, JoinedRanks, data_of, differing, everything_in, planned
from workers.model.logprobs import trained_logprobs
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup

SAMPLED = Distribution(0.9)
SYNC = SyncSection(every=2, mixup=0.25)
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of some steps with a reference that follows the policy."""

    model_path: str
    num_steps: int
    sync: SyncSection | None = SYNC
    scores: bool = True
    savings: MemorySavings = NO_SAVINGS
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshSection | None = None
    """None: `shard`, over all ranks."""
    load: Path | None = None
    save: Path | None = None


@dataclass(frozen=True)
class Done:
    """What is seen of it on one rank."""

    weights: list[Weights]
    """Those of the policy before and after each step; on other ranks than the first nothing."""
    columns: list[Any]
    """Logprobs of the reference before each step and after the last, of samples that are always the same."""


def do(job: Job, ranks: RankGroup) -> Done:
    ranks = ranks.with_mesh(job.mesh) if job.mesh else ranks
    backend = FsdpBackend(
        job.model_path, SETTINGS, ranks, sync=job.sync, savings=job.savings, dtype=job.dtype, probe_length=4
    )
    if job.load:
        backend.load(job.load)
    weights, columns = [backend.full_weights(torch.float32)], [_column(backend, ranks)] if job.scores else []
    for _ in range(job.num_steps):
        plan, payloads = planned(backend.step, ranks.mesh.num_batches, PLAIN)
        backend.train_step(plan[ranks.batch], data_of(payloads), PLAIN, distribution=SAMPLED)
        weights.append(backend.full_weights(torch.float32))
        columns += [_column(backend, ranks)] if job.scores else []
    if job.save:
        backend.save(job.save).wait()
    return Done(weights, columns)


def _column(backend: FsdpBackend, ranks: RankGroup) -> Any:
    plan, payloads = planned(0, ranks.mesh.num_batches, PLAIN)
    return backend.reference(plan[ranks.batch], data_of(payloads), Column.REFERENCE_LOGPROBS, distribution=SAMPLED)


def column_of(weights: Weights, model_path: str, batch: int, num_batches: int) -> list[Any]:
    """The same logprobs by a plain model."""
    model = load_model(model_path, torch.float32)
    model.load_state_dict(weights, strict=False)
    plan, payloads = planned(0, num_batches, PLAIN)
    batches = [data_of(payloads).micro_batch(micro_batch) for micro_batch in plan[batch].micro_batches]
    with torch.no_grad():
        return [trained_logprobs(model, batch, SAMPLED)[0].numpy() for batch in batches]


def followed(weights: list[Weights], sync: SyncSection) -> list[Weights]:
    """The reference before and after each step, by the formula."""
    found = [weights[0]]
    for step, policy in enumerate(weights[1:], start=1):
        before, share = found[-1], sync.mixup if step % sync.every == 0 else 0.0
        found.append({name: share * policy[name] + (1 - share) * before[name] for name in before})
    return found


LAYOUTS = {
    "one rank": (None, NO_SAVINGS),
    "shard": (MeshSection(shard=2), NO_SAVINGS),
    "offload": (MeshSection(shard=2), MemorySavings(offload=True, gather_weights="update")),
    "tensor": (MeshSection(tensor=2), NO_SAVINGS),
    "context": (MeshSection(context=2), NO_SAVINGS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_follows_the_policy_by_the_formula(layout: str, two_ranks: JoinedRanks, model_path: str) -> None:
    mesh, savings = LAYOUTS[layout]
    job = Job(model_path=model_path, num_steps=4, mesh=mesh, savings=savings)
    done = two_ranks(do, job) if mesh else [do(job, RankGroup())]
    references, num_batches = followed(done[0].weights, SYNC), mesh.num_batches if mesh else 1
    for batch, of_rank in enumerate(done[:num_batches]):
        for reference, column in zip(references, of_rank.columns, strict=True):
            expected = column_of(reference, model_path, batch, num_batches)
            assert len(column) == len(expected)
            for one, plain in zip(column, expected, strict=True):
                np.testing.assert_allclose(one, plain, rtol=0, atol=1e-5)
    first, second, third = (np.concatenate(done[0].columns[step]) for step in (0, 1, 2))
    assert (first == second).all(), "it stays as it is between synchronizations"
    assert abs(second - third).max() > 1e-2, "the test sees a synchronization"


def test_a_model_is_exported_without_the_reference_that_followed_it(model_path: str, tmp_path: Path) -> None:
    do(Job(model_path=model_path, num_steps=2, save=tmp_path), RankGroup())
    plain = FsdpBackend(model_path, SETTINGS, RankGroup())
    plain.load_weights(tmp_path)
    without = FsdpBackend(model_path, SETTINGS, RankGroup())
    without.load(tmp_path)  # and `reference.sync` may be taken back
    assert differing(plain.full_weights(torch.float32), without.full_weights(torch.float32)) == []


@pytest.mark.parametrize("savings", [MemorySavings(), MemorySavings(offload=True, gather_weights="update")])
def test_scoring_with_the_reference_changes_nothing_of_the_policy(
    savings: MemorySavings, two_ranks: JoinedRanks, model_path: str
) -> None:
    of_each = [
        two_ranks(do, Job(model_path=model_path, num_steps=3, scores=scores, savings=savings))[0].weights[-1]
        for scores in (True, False)
    ]
    assert differing(*of_each) == []


def test_a_reference_in_bfloat16_is_kept_in_float32(two_ranks: JoinedRanks, model_path: str, tmp_path: Path) -> None:
    job = Job(model_path=model_path, num_steps=2, dtype="bfloat16", save=tmp_path)
    done = two_ranks(do, job)[0]
    expected = followed(done.weights, SYNC)[-1]
    saved = {n.removeprefix("reference."): t for n, t in everything_in(tmp_path).items() if n.startswith("reference.")}
    assert saved.keys() <= expected.keys() and saved
    for name, tensor in saved.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_resuming_equals_never_having_stopped(model_path: str, tmp_path: Path) -> None:
    whole = do(Job(model_path=model_path, num_steps=5), RankGroup())
    do(Job(model_path=model_path, num_steps=3, save=tmp_path), RankGroup())
    resumed = do(Job(model_path=model_path, num_steps=2, load=tmp_path), RankGroup())
    assert differing(whole.weights[-1], resumed.weights[-1]) == []
    for straight, again in zip(whole.columns[3:], resumed.columns, strict=True):
        assert all((a == b).all() for a, b in zip(straight, again, strict=True))


def test_a_checkpoint_moves_between_numbers_of_ranks_bit_for_bit(
    two_ranks: JoinedRanks, model_path: str, tmp_path: Path
) -> None:
    two_ranks(do, Job(model_path=model_path, num_steps=2, save=tmp_path / "a"))
    do(Job(model_path=model_path, num_steps=0, load=tmp_path / "a", save=tmp_path / "b"), RankGroup())
    assert differing(everything_in(tmp_path / "a"), everything_in(tmp_path / "b")) == []


def test_a_run_that_lets_its_reference_follow_from_a_resume_begins_with_the_initial_one(
    model_path: str, tmp_path: Path
) -> None:
    do(Job(model_path=model_path, num_steps=1, sync=None, scores=False, save=tmp_path), RankGroup())
    resumed = do(Job(model_path=model_path, num_steps=0, load=tmp_path), RankGroup())
    new = do(Job(model_path=model_path, num_steps=0), RankGroup())
    assert all((a == b).all() for a, b in zip(resumed.columns[0], new.columns[0], strict=True))
