"""Losses and advantages in the padded (B, T) form that one writes first, beside ours, on the same tokens.

`cases` pairs every computation of ours with its reference. The unit tests compare results; `benchmarks.losses` times
both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from algorithms.cispo import CISPO
from algorithms.corrections import Geometric, Tis
from algorithms.dapo import DAPO
from algorithms.grpo import GRPO
from algorithms.gspo import GSPO
from algorithms.kto import KTO
from algorithms.m2po import M2PO
from algorithms.policy_gradient import ClippedSurrogate
from algorithms.ppo import PPO
from algorithms.reinforce_pp import ReinforcePP
from algorithms.sample_math import gae
from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput
from rlsys.types import Group
from tests.groups import episode, group
from workers.train.rank_group import RankGroup
from workers.train.whitening import whiten

Run: TypeAlias = Callable[[], Tensor]
"""Function that computes a gradient or advantages: `(N,)`, or `(B, T)` if it is a reference."""
KL_COEF = 0.1
MEAN_BOUND = 1.005
"""Bound of geometric means: some samples are beyond it."""
M2_BOUND = 0.005
"""Bound of M2PO's second moment: some tokens are masked."""
SAME = 1e-4
"""Largest allowed difference, over the largest result: float32 sums in another order."""


@dataclass(frozen=True)
class Both:
    """The same tokens in both layouts. Ours is flat; `mask_BT` marks the trained entries of a padded matrix."""

    batch: LossInputs
    logprobs_N: Tensor
    mask_BT: Tensor


def tokens(num_samples: int, mean_length: int) -> Both:
    """Build tokens of slightly drifted policies, always the same."""
    rng = torch.Generator().manual_seed(0)
    lengths_S = torch.linspace(1, 2 * mean_length - 1, num_samples).round().long()
    lengths_S = lengths_S[torch.randperm(num_samples, generator=rng)]
    num_tokens = int(lengths_S.sum())

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=rng)

    behavior_N = -torch.rand(num_tokens, generator=rng) * 3
    proximal_N = behavior_N + noise(0.1)
    advantages_S = torch.randn(num_samples, generator=rng)
    batch = LossInputs(
        behavior_logprobs_N=behavior_N,
        proximal_logprobs_N=proximal_N,
        advantages_N=advantages_S.repeat_interleave(lengths_S),
        staleness_N=torch.zeros(num_tokens, dtype=torch.int64),
        lengths_S=lengths_S,
        groups_S=torch.arange(num_samples) // 2,
        columns_N={
            Column.VALUES: noise(0.5),
            Column.REFERENCE_LOGPROBS: behavior_N + noise(0.1),
            Column.REFERENCE_MISMATCHED: behavior_N + noise(0.2),
            Column.POLICY_MISMATCHED: behavior_N + noise(0.2),
        },
        returns_N=noise(1.0),
    )
    mask_BT = torch.arange(int(lengths_S.max()))[None] < lengths_S[:, None]
    return Both(batch, proximal_N + noise(0.05), mask_BT)


# --------------------------------------------------------------------------------------------------------------- ours


def gradient(loss: Callable[[Tensor], Tensor], by: Tensor) -> Run:
    """Return a function that computes the gradient of a loss by these numbers."""

    def run() -> Tensor:
        numbers = by.clone().requires_grad_()
        loss(numbers).backward()
        assert numbers.grad is not None
        return numbers.grad

    return run


def ours(algorithm: Algorithm, both: Both) -> Run:
    """Return a function that computes the gradient, by the logprobs, of the loss averaged over tokens or sequences."""
    lengths_S = both.batch.lengths_S
    if algorithm.aggregation.over == "sequences":
        weights_N = (1 / (len(lengths_S) * lengths_S)).repeat_interleave(lengths_S)
    else:
        weights_N = torch.full_like(both.logprobs_N, 1 / len(both.logprobs_N))

    def loss(logprobs_N: Tensor) -> Tensor:
        batch = both.batch
        if algorithm.has_step_statistics:
            batch = replace(batch, facts=algorithm.step_statistics(batch, RankGroup()))
        return with_metrics(algorithm.loss(logprobs_N, batch), weights_N)

    return gradient(loss, both.logprobs_N)


def value_loss(ppo: PPO, both: Both) -> Run:
    """Return a function that computes the gradient, by the values, of the critic's loss averaged over tokens."""
    weights_N = torch.full_like(both.logprobs_N, 1 / len(both.logprobs_N))
    return gradient(lambda values_N: with_metrics(ppo.value_loss(values_N, both.batch), weights_N), both.logprobs_N)


def with_metrics(output: LossOutput, weights_N: Tensor) -> Tensor:
    """Sum a loss with weights, after averaging its metrics."""
    for value_N in output.metrics_N.values():
        value_N.mean()
    return (output.loss_N * weights_N).sum()


def advantages(groups: Sequence[Group]) -> Tensor:
    """Compute GRPO's advantages of all members of all groups."""
    return torch.tensor([a.advantage for assigned in GRPO().finalize_advantages(groups, {}).groups for a in assigned])


def whitened(values_N: Tensor) -> Tensor:
    """Whiten as the trainer does, for one micro-batch of one rank."""
    return whiten(values_N, [values_N], RankGroup())[0]


# ----------------------------------------------------------------------------------------------- what one writes first


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Average over the unmasked entries."""
    return (values_BT * mask_BT).sum() / mask_BT.sum()


@dataclass(frozen=True)
class Padded:
    """Inputs of the references, all `(B, T)`."""

    mask: Tensor
    logprobs: Tensor
    behavior: Tensor
    proximal: Tensor
    advantages: Tensor
    returns: Tensor
    columns: Mapping[Column, Tensor]

    @classmethod
    def of(cls, both: Both) -> Padded:
        def padded(values_N: Tensor | None) -> Tensor:
            assert values_N is not None
            result_BT = values_N.new_zeros(both.mask_BT.shape)
            result_BT[both.mask_BT] = values_N
            return result_BT

        batch = both.batch
        return cls(
            mask=both.mask_BT,
            logprobs=padded(both.logprobs_N),
            behavior=padded(batch.behavior_logprobs_N),
            proximal=padded(batch.proximal_logprobs_N),
            advantages=padded(batch.advantages_N),
            returns=padded(batch.returns_N),
            columns={kind: padded(column_N) for kind, column_N in batch.columns_N.items()},
        )


def clipped(logprobs_BT: Tensor, old_BT: Tensor, x: Padded, a: ClippedSurrogate) -> Tensor:
    """PPO's surrogate, and its clip fractions."""
    return surrogate((logprobs_BT - old_BT).clamp(-20, 20).exp(), x, a)


def surrogate(ratio_BT: Tensor, x: Padded, a: ClippedSurrogate) -> Tensor:
    """Larger loss of the plain and the clipped product, and the clip fractions."""
    first_BT, second_BT = -x.advantages * ratio_BT, -x.advantages * ratio_BT.clamp(1 - a.clip_low, 1 + a.clip_high)
    masked_mean(ratio_BT.detach(), x.mask)
    masked_mean((second_BT > first_BT).float() * (x.advantages > 0), x.mask)
    masked_mean((second_BT > first_BT).float() * (x.advantages < 0), x.mask)
    return torch.maximum(first_BT, second_BT)


def grpo_reference(logprobs_BT: Tensor, x: Padded, a: ClippedSurrogate) -> Tensor:
    """GRPO: clipped against the sampler, mean over tokens."""
    return masked_mean(clipped(logprobs_BT, x.behavior, x, a), x.mask)


def tis_reference(logprobs_BT: Tensor, x: Padded, a: GRPO, kept_B1: Tensor | None = None) -> Tensor:
    """Clipped against the proximal policy, truncated importance weights, mean over tokens."""
    loss_BT = clipped(logprobs_BT, x.proximal, x, a)
    rho_BT = (x.proximal - x.behavior).clamp(-20, 20).exp()
    masked_mean((rho_BT > 2.0).float(), x.mask)
    weights_BT = rho_BT.clamp(max=2.0)
    if kept_B1 is not None:
        masked_mean((1 - kept_B1).expand_as(rho_BT), x.mask)
        weights_BT = weights_BT * kept_B1
    return masked_mean(loss_BT * weights_BT, x.mask)


def geometric_reference(logprobs_BT: Tensor, x: Padded, a: GRPO) -> Tensor:
    """The same without samples whose geometric mean of importance weights is out of bounds."""
    log_rho_BT = (x.proximal - x.behavior).clamp(-20, 20)
    mean_B1 = ((log_rho_BT * x.mask).sum(-1, keepdim=True) / x.mask.sum(-1, keepdim=True)).exp()
    return tis_reference(logprobs_BT, x, a, ((mean_B1 >= 1 / MEAN_BOUND) & (mean_B1 <= MEAN_BOUND)).float())


def kl_reference(logprobs_BT: Tensor, x: Padded, a: GRPO) -> Tensor:
    """Clipped against the sampler, with the KL: value of k3, gradient of k2, weighted by the ratio."""
    loss_BT = clipped(logprobs_BT, x.behavior, x, a)
    x_BT = (logprobs_BT - x.columns[Column.REFERENCE_LOGPROBS]).clamp(-20, 20)
    k2_BT, k3_BT = x_BT.square() / 2, ((-x_BT).exp() + x_BT - 1).clamp(-10, 10)
    kl_BT = k2_BT - k2_BT.detach() + k3_BT.detach()
    masked_mean(kl_BT.detach(), x.mask)
    ratio_BT = (logprobs_BT.detach() - x.behavior).clamp(-20, 20).exp().clamp(max=2.0)
    return masked_mean(loss_BT + a.kl_coef * ratio_BT * kl_BT, x.mask)


def value_reference(values_BT: Tensor, x: Padded, a: PPO) -> Tensor:
    """Clipped squared errors, mean over tokens."""
    assert a.value_clip is not None
    old_BT = x.columns[Column.VALUES]
    clipped_BT = old_BT + (values_BT - old_BT).clamp(-a.value_clip, a.value_clip)
    errors_BT, clipped_errors_BT = (values_BT - x.returns).square(), (clipped_BT - x.returns).square()
    masked_mean((clipped_errors_BT > errors_BT).float(), x.mask)
    return masked_mean(torch.maximum(errors_BT, clipped_errors_BT), x.mask) / 2


def gspo_reference(logprobs_BT: Tensor, x: Padded, a: GSPO) -> Tensor:
    """Sequence ratios, mean over sequences."""
    lengths_B1 = x.mask.sum(-1, keepdim=True)
    means_B1 = ((logprobs_BT - x.behavior) * x.mask).sum(-1, keepdim=True) / lengths_B1
    log_ratio_BT = (logprobs_BT - logprobs_BT.detach() + means_B1.detach()).clamp(max=10)
    loss_BT = surrogate(log_ratio_BT.exp(), x, a)
    return ((loss_BT * x.mask).sum(-1, keepdim=True) / lengths_B1).mean()


def cispo_reference(logprobs_BT: Tensor, x: Padded, a: CISPO) -> Tensor:
    """Clipped weights, mean over tokens."""
    ratio_BT = (logprobs_BT - x.behavior).clamp(-20, 20).exp()
    weights_BT = ratio_BT.clamp(1 - a.clip_low, 1 + a.clip_high).detach()
    masked_mean(ratio_BT.detach(), x.mask)
    masked_mean((ratio_BT.detach() > 1 + a.clip_high).float(), x.mask)
    masked_mean((ratio_BT.detach() < 1 - a.clip_low).float(), x.mask)
    return masked_mean(-weights_BT * x.advantages * logprobs_BT, x.mask)


def m2po_reference(logprobs_BT: Tensor, x: Padded, a: M2PO) -> Tensor:
    """M2PO: the largest drifts masked among tokens that moved with their advantage, mean over tokens."""
    log_rho_BT = x.proximal - x.behavior
    risen_BT, fallen_BT = (x.advantages > 0) & (log_rho_BT > 0), (x.advantages < 0) & (log_rho_BT < 0)
    rows_K, columns_K = ((risen_BT | fallen_BT) & x.mask).nonzero(as_tuple=True)
    squares_K, order_K = log_rho_BT[rows_K, columns_K].double().square().sort(descending=True)
    kept_mean_K = squares_K.flip(0).cumsum(0).flip(0) / torch.arange(len(squares_K), 0, -1)
    is_small_K = kept_mean_K <= a.tau
    num_masked = int(is_small_K.float().argmax()) if is_small_K.any() else len(squares_K)
    masked_K = order_K[:num_masked]
    kept_BT = torch.ones(x.mask.shape)
    kept_BT[rows_K[masked_K], columns_K[masked_K]] = 0
    ratio_BT = (logprobs_BT - x.behavior).clamp(-20, 20).exp()
    masked_mean(ratio_BT.detach(), x.mask)
    masked_mean(1 - kept_BT, x.mask)
    return masked_mean(-kept_BT * ratio_BT * x.advantages, x.mask)


def kto_reference(logprobs_BT: Tensor, x: Padded, a: KTO) -> Tensor:
    """KTO: sums of log-ratios by row, mean over sequences."""
    lengths_B = x.mask.sum(-1)
    scale_B = (a.full_length / lengths_B).clamp(max=1) if a.full_length else torch.ones(len(lengths_B))

    def r(policy_BT: Tensor, reference_BT: Tensor) -> Tensor:
        return ((policy_BT - reference_BT) * x.mask).sum(-1) * scale_B

    z0 = r(x.columns[Column.POLICY_MISMATCHED], x.columns[Column.REFERENCE_MISMATCHED]).mean().clamp(min=0)
    r(x.proximal, x.columns[Column.REFERENCE_LOGPROBS])
    r_B = r(logprobs_BT, x.columns[Column.REFERENCE_LOGPROBS])
    weights_B = x.advantages[:, 0]
    miss_B = 1 - (weights_B.sign() * a.beta * (r_B - z0)).sigmoid()
    if a.clip is not None:
        is_clipped_B = weights_B.sign() * r(logprobs_BT.detach(), x.behavior) > a.clip
        is_clipped_B.float().mean()
        miss_B = torch.where(is_clipped_B, miss_B.detach(), miss_B)
    (4 * miss_B * (1 - miss_B) < 0.1).float().mean()
    return (weights_B.abs() * miss_B).mean()


LOSSES: Mapping[str, tuple[Algorithm, Callable[..., Tensor]]] = {
    "grpo": (GRPO(), grpo_reference),
    "grpo + kl": (GRPO(kl_coef=KL_COEF), kl_reference),
    "grpo, tis": (GRPO(correction=(Tis(),)), tis_reference),
    "[geometric, tis]": (
        GRPO(correction=(Geometric(low=1 / MEAN_BOUND, high=MEAN_BOUND), Tis())),
        geometric_reference,
    ),
    "dapo": (DAPO(), grpo_reference),
    "gspo": (GSPO(), gspo_reference),
    "cispo": (CISPO(), cispo_reference),
    "ppo": (PPO(), grpo_reference),
    "m2po": (M2PO(tau=M2_BOUND), m2po_reference),
    "kto": (KTO(), kto_reference),
}


def rewards_to_go_reference(x: Padded) -> Tensor:
    """Reward at the last token minus the KL of each, summed from the right."""
    rewards_BT = -KL_COEF * (x.behavior - x.columns[Column.REFERENCE_LOGPROBS]) * x.mask
    rows_B, last_B = torch.arange(len(x.mask)), x.mask.sum(-1) - 1
    rewards_BT[rows_B, last_B] += x.advantages[rows_B, last_B]
    return rewards_BT.flip(-1).cumsum(-1).flip(-1) * x.mask


def gae_reference(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE by a loop over tokens, as in common trainers."""
    next_value_B, last_B, reversed_advantages = torch.zeros(len(mask_BT)), torch.zeros(len(mask_BT)), []
    for t in reversed(range(mask_BT.shape[1])):
        is_on_B = mask_BT[:, t].float()
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        advantage_B = delta_B + gamma * lam * last_B
        next_value_B = values_BT[:, t] * is_on_B + next_value_B * (1 - is_on_B)
        last_B = advantage_B * is_on_B + last_B * (1 - is_on_B)
        reversed_advantages.append(last_B)
    return torch.stack(reversed_advantages[::-1], 1)


def advantages_reference(rewards: Sequence[float], group_ids: Sequence[int]) -> Tensor:
    """Advantages by a dictionary of the rewards of each group, and small tensors."""
    by_group: dict[int, list[float]] = defaultdict(list)
    for group_id, reward in zip(group_ids, rewards, strict=True):
        by_group[group_id].append(reward)
    means = {group_id: torch.tensor(members).mean() for group_id, members in by_group.items()}
    stds = {group_id: torch.tensor(members).std() for group_id, members in by_group.items()}
    return torch.stack([(r - means[s]) / (stds[s] + 1e-6) for r, s in zip(rewards, group_ids, strict=True)])


def whitening_reference(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Whiten to mean 0 and standard deviation 1 over the unmasked entries."""
    mean = masked_mean(values_BT, mask_BT)
    variance = masked_mean((values_BT - mean).square(), mask_BT)
    return (values_BT - mean) / (variance.sqrt() + 1e-8) * mask_BT


def cases(both: Both) -> dict[str, tuple[Run, Run]]:
    """Build the pairs to compare: ours, and the reference."""
    x, batch, ppo = Padded.of(both), both.batch, PPO()
    pairs = {
        name: (ours(algorithm, both), gradient(partial(reference, x=x, a=algorithm), x.logprobs))
        for name, (algorithm, reference) in LOSSES.items()
    }
    values_N, values_BT = batch.columns_N[Column.VALUES], x.columns[Column.VALUES]
    rewards = [float(value) for value in torch.rand(both.batch.lengths_S.shape)]
    group_ids = [place // 8 for place in range(len(rewards))]
    groups = [group(s, episodes=[episode(r) for r in rewards[8 * s : 8 * s + 8]]) for s in range(len(rewards) // 8)]
    return {
        **pairs,
        "ppo, critic": (value_loss(ppo, both), gradient(partial(value_reference, x=x, a=ppo), x.logprobs)),
        "reinforce_pp": (
            lambda: ReinforcePP(kl_coef=KL_COEF).token_advantages(batch).advantages_N,
            lambda: rewards_to_go_reference(x),
        ),
        "gae": (
            lambda: gae(batch.advantages_N, values_N, batch.lengths_S, 1.0, 0.95),
            lambda: gae_reference(x.advantages, values_BT, x.mask, 1.0, 0.95),
        ),
        "advantages": (lambda: advantages(groups), lambda: advantages_reference(rewards, group_ids)),
        "whitening": (lambda: whitened(values_N), lambda: whitening_reference(values_BT, x.mask)),
    }


def difference(own_N: Tensor, reference: Tensor, mask_BT: Tensor) -> float:
    """Return the largest difference between two results, over the largest of the reference."""
    other_N = reference[mask_BT] if reference.shape == mask_BT.shape else reference
    return ((own_N - other_N).abs().max() / other_N.abs().max()).item()
