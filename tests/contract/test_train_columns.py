"""What a back-end keeps of each token that it trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch

from rlsys.types import Distribution, PolicyVersion
from tests.training import PLAIN, SETTINGS, JoinedRanks, Measuring, Surrogate, data_of, planned
from workers.model.logprobs import trained_logprobs
from workers.model.model_loading import load_model
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup
from workers.train.token_columns import TokenColumns


@dataclass(frozen=True, kw_only=True)
class WarmingUp(Surrogate):
    """The policy is trained from version 1 on."""

    def trains_policy(self, version: PolicyVersion) -> bool:
        return version >= 1


def columns_of(model_path: str, algorithm: Surrogate, num_updates: int, num_steps: int, ranks: RankGroup) -> list:
    """What this rank keeps of each of some equal steps."""
    backend = FsdpBackend(model_path, SETTINGS, ranks)
    found = [backend.columns()]
    for _ in range(num_steps):
        plan, payloads = planned(0, ranks.num_ranks, algorithm, num_updates)
        backend.train_step(plan[ranks.rank], data_of(payloads), algorithm, distribution=Distribution(0.9))
        found.append(backend.columns())
    return found


def by_sample(columns: list[TokenColumns]) -> dict[tuple[int, ...], np.ndarray]:
    """Place of each sample -> trainer's logprobs, entropies, advantages, masks."""
    found = {}
    for one in columns:
        rows = np.stack([one.trainer_logprobs_N, one.entropies_N, one.advantages_N, one.is_masked_N])
        ends = list(accumulate(one.lengths_S))
        for ref, part in zip(one.samples, np.split(rows, ends[:-1], axis=1), strict=True):
            place = (ref.group, ref.episode, ref.trajectory, ref.sample)
            assert place not in found
            found[place] = part
    return found


def test_trained_tokens_have_logprobs_under_the_weights_before_the_step(model_path):
    """Also those of the second update, which were trained under later weights."""
    nothing, columns = columns_of(model_path, PLAIN, 2, 1, RankGroup())
    assert nothing == []
    plan, payloads = planned(0, 1, PLAIN, 2)
    model, data = load_model(model_path, torch.float32), data_of(payloads)
    micro_batches = plan[0].micro_batches
    assert [one.samples for one in columns] == [m.samples for m in micro_batches]
    for one, micro_batch in zip(columns, micro_batches, strict=True):
        batch = data.micro_batch(micro_batch)
        with torch.no_grad():
            expected_N, entropy_N = trained_logprobs(model, batch, Distribution(0.9))
        assert np.array_equal(one.trainer_logprobs_N, expected_N.numpy())
        assert np.array_equal(one.advantages_N, batch.advantages_N.numpy())
        assert one.entropies_N.shape == entropy_N.shape
        assert one.lengths_S == tuple(batch.num_trained_S.tolist())


@pytest.mark.parametrize("algorithm", [PLAIN, Measuring()])
def test_two_ranks_keep_what_one_keeps_each_its_own_samples(algorithm, model_path, two_ranks: JoinedRanks):
    *_, alone = columns_of(model_path, algorithm, 2, 1, RankGroup())
    shares = [of_rank[-1] for of_rank in two_ranks(columns_of, model_path, algorithm, 2, 1)]
    assert all(shares)
    one, two = by_sample(alone), by_sample([*shares[0], *shares[1]])
    assert one.keys() == two.keys()
    for place, row in one.items():
        np.testing.assert_allclose(two[place], row, rtol=1e-4, atol=1e-4)


def test_tokens_left_out_by_the_loss_are_marked_as_masked(model_path):
    *_, columns = columns_of(model_path, Measuring(), 1, 1, RankGroup())
    is_masked_N = np.concatenate([one.is_masked_N for one in columns])
    assert abs(is_masked_N.mean() - 0.5) < 0.1, "Measuring leaves out the half that drifted most"
    assert np.concatenate([one.advantages_N for one in columns]).mean() == pytest.approx(0, abs=1e-5)
    *_, plain = columns_of(model_path, PLAIN, 1, 1, RankGroup())
    assert not any(one.is_masked_N.any() for one in plain)


def test_a_step_without_policy_training_clears_the_kept_columns(model_path):
    before, frozen, trained = columns_of(model_path, WarmingUp(), 1, 2, RankGroup())
    assert (before, frozen) == ([], [])
    assert trained
