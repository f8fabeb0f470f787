"""Training on stale samples in a second: a contextual bandit with old samples.

As in AReaL (arXiv:2505.24298, section 5): treating stale samples as fresh costs reward, correcting for their age does
not.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import pytest
import torch
from torch import Tensor

from algorithms.grpo import GRPO
from rlsys.algorithm import LossInputs

pytestmark = pytest.mark.slow

SEEDS = range(5)
STEPS, CONTEXTS, ACTIONS, FEATURES, SAMPLES = 150, 32, 12, 6, 8


def learned(staleness: int, seed: int, *, is_blind: bool = False) -> float:
    """Probability of the right action in the last 20 steps, trained on samples `staleness` versions old.

    `is_blind`: the trainer's own logprobs stand in for those of the sampler, as if the samples were fresh.
    """
    chance = torch.Generator().manual_seed(seed)
    features_CF = torch.randn(CONTEXTS, FEATURES, generator=chance)
    right_C1 = (features_CF @ torch.randn(FEATURES, ACTIONS, generator=chance)).argmax(1, keepdim=True)
    policy = (0.3 * torch.randn(FEATURES, ACTIONS, generator=chance)).requires_grad_()
    optimizer = torch.optim.Adam([policy], lr=0.1, betas=(0.9, 0.99))
    versions = deque([policy.detach().clone()] * (staleness + 1), maxlen=staleness + 1)
    shares: list[float] = []
    for _ in range(STEPS):
        old_CA = features_CF @ versions[0]
        actions_CS = torch.multinomial(old_CA.softmax(-1), SAMPLES, replacement=True, generator=chance)
        logprobs_N = taken(features_CF @ policy, actions_CS)
        proximal_N = logprobs_N.detach()
        behavior_N = proximal_N if is_blind else taken(old_CA, actions_CS)
        inputs = LossInputs(
            behavior_logprobs_N=behavior_N,
            proximal_logprobs_N=proximal_N,
            advantages_N=standardised((actions_CS == right_C1).float()),
            staleness_N=torch.full((len(behavior_N),), staleness),
            lengths_S=torch.ones(len(behavior_N), dtype=torch.int64),
            groups_S=torch.zeros(len(behavior_N), dtype=torch.int64),
        )
        optimizer.zero_grad()
        GRPO().loss(logprobs_N, inputs).loss_N.mean().backward()
        torch.nn.utils.clip_grad_norm_([policy], 1.0)
        optimizer.step()
        versions.append(policy.detach().clone())
        shares.append(float((features_CF @ versions[-1]).softmax(-1).gather(1, right_C1).mean()))
    return sum(shares[-20:]) / 20


def taken(logits_CA: Tensor, actions_CS: Tensor) -> Tensor:
    return logits_CA.log_softmax(-1).gather(1, actions_CS).flatten()


def standardised(rewards_CS: Tensor) -> Tensor:
    centred_CS = rewards_CS - rewards_CS.mean(1, keepdim=True)
    return (centred_CS / (rewards_CS.std(1, keepdim=True) + 1e-6)).flatten()


def test_corrected_samples_of_staleness_eight_learn_like_fresh_ones() -> None:
    fresh = median(learned(0, seed) for seed in SEEDS)
    corrected = median(learned(8, seed) for seed in SEEDS)
    blind = median(learned(8, seed, is_blind=True) for seed in SEEDS)
    assert corrected > fresh - 0.02
    assert blind < min(fresh, corrected) - 0.03


def test_uncorrected_samples_learn_worse_the_older_they_are() -> None:
    blind = [median(learned(staleness, seed, is_blind=True) for seed in SEEDS) for staleness in (4, 8, 16)]
    assert blind == sorted(blind, reverse=True)
    assert blind[0] - blind[-1] > 0.08
