"""Estimators of KL(policy || reference) from sampled tokens, and their uses.

With x = log(p / ref) of a sampled token (http://joschu.net/blog/kl-approx.html):

    k1    x               unbiased, high variance. As a loss its expected gradient is zero, so it is only for rewards.
    k2    x² / 2          biased a little; as a loss its expected gradient is exactly that of the KL.
    k3    e^-x + x - 1    unbiased, never negative, low variance. As a loss (GRPO, arXiv:2402.03300, eq. 4) its expected
                          gradient is that of KL(reference || policy) instead.
    k3+                   the value of k3 with the gradient of k2: right in both; the default as a loss.

Here "the KL" is that of the next token, at the sampled prefixes, summed over them. As a loss, its gradient ignores that
a token also decides which prefixes follow. The gradient of the whole sequence's KL needs the KL in the reward, k1 of
every token (`rewards_to_go`), which credits a token with the KL of all later tokens.

Two values are capped, so that a token with a tiny reference probability does not dominate: k1 at ±20 nats, which only
rewards use, and k3 at 10. Where that cap acts, k3 has no gradient. k2 is not capped: its gradient, which k3+ shares, is
x however large x is, so that a policy that is far from the reference is still pulled back.

All of this holds for tokens sampled from the policy. Other tokens also need their importance weight: with rho = p / mu,
the mean of rho x ∇log p over mu is that of x ∇log p over the policy. Shape suffix: `N` trained tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from algorithms.sample_math import discounted_sums, is_last, log_ratio
from rlsys.algorithm import Column, LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.corrections import Policies

Estimator: TypeAlias = Literal["k1", "k2", "k3", "k3+"]
MAX_K3 = 10.0
"""Largest k3 of a token, in nats."""
MAX_KL_RATIO = 2.0
"""Largest importance ratio of a token in the KL of the loss; equals the default cap of `tis`."""


def kl_estimate(estimator: Estimator, logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Estimate the KL of each token, in nats, with the gradient of the estimator."""
    x_N = log_ratio(logprobs_N, reference_logprobs_N)
    if estimator == "k1":
        return x_N
    k2_N = (logprobs_N - reference_logprobs_N).square() / 2
    if estimator == "k2":
        return k2_N
    k3_N = ((-x_N).expm1() + x_N).clamp(max=MAX_K3)
    return k3_N if estimator == "k3" else k2_N + (k3_N - k2_N).detach()


def kl_term(kl_coef: float, estimator: Estimator, policies: Policies) -> LossOutput:
    """kl_coef · min(r, 2) · KL(policy || reference) per token, with the ratio r of the surrogate, without gradient."""
    kl_N = kl_estimate(estimator, policies.current_N, policies.batch.columns_N[Column.REFERENCE_LOGPROBS])
    ratio_N = policies.log_ratio().detach().exp().clamp(max=MAX_KL_RATIO)
    return LossOutput(kl_coef * ratio_N * kl_N, {"policy/kl_ref": kl_N.detach()})


def penalised_rewards(inputs: LossInputs, kl_coef: float, estimator: Estimator) -> Tensor:
    """Reward of each token: the trajectory's at the last token of a sample, minus `kl_coef` KL at every token
    (arXiv:1909.08593, eq. 2; per token as in arXiv:2203.02155).

    `inputs.advantages_N` contains the trajectory's reward. The KL is that of the sampling policy.
    """
    rewards_N = inputs.advantages_N * is_last(inputs.lengths_S, len(inputs.advantages_N))
    if kl_coef == 0:
        return rewards_N
    reference_N = inputs.columns_N[Column.REFERENCE_LOGPROBS]
    return rewards_N - kl_coef * kl_estimate(estimator, inputs.behavior_logprobs_N, reference_N)


def rewards_to_go(inputs: LossInputs, kl_coef: float, estimator: Estimator) -> Tensor:
    """Sum of `penalised_rewards` from each token to the end of its sample: the rewards a token can still change."""
    return discounted_sums(penalised_rewards(inputs, kl_coef, estimator), inputs.lengths_S, 1.0)
