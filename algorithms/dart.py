"""DART: step-wise GRPO on the steps that the policy was least sure of, with truncated importance weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from pydantic.dataclasses import dataclass

from algorithms.corrections import Corrections, Policies, Tis
from algorithms.fields import RULES, AtMostOne
from algorithms.grpo import GRPO
from algorithms.sample_math import sample_means, sample_totals
from rlsys.algorithm import LossInputs, LossOutput, Ranks

LEAST_ENTROPY = "dart/least_entropy"


@dataclass(frozen=True, kw_only=True, config=RULES)
class DART(GRPO):
    """DART (arXiv:2509.23866): GRPO with importance weights of at most 1, on the steps of high entropy.

    A step is a sample: a workflow that rewrites its context gives one per turn. All steps of an episode have its
    advantage. Of the samples of an optimizer step, the share `kept` with the highest entropies is trained. The entropy
    of a sample is estimated by the mean surprisal, -log mu, of its tokens, whose expectation it is. Samples that tie
    are kept together. Masked tokens stay in the denominator.
    """

    correction: Corrections = (Tis(cap=1.0),)
    """See `GRPO`; the paper truncates the weights at 1, without which its success rate collapsed."""
    kept: AtMostOne = 0.8
    """Share of the samples to train. More than 0, at most 1."""

    @property
    def has_step_statistics(self) -> bool:
        return True

    @property
    def scores_ahead(self) -> bool:
        """False, unless single tokens are chosen too: the entropies of samples are those of the sampler."""
        return self.top_entropy_quantile < 1

    def step_statistics(self, step: LossInputs, ranks: Ranks) -> Mapping[str, float]:
        """Compute the least entropy of a sample that is trained."""
        shared = super().step_statistics(step, ranks)
        totals_S = sample_totals(-step.behavior_logprobs_N, step.lengths_S)
        values_S = ranks.gather(totals_S / step.lengths_S.clamp(min=1)).sort(descending=True).values
        least = values_S[ceil(self.kept * len(values_S)) - 1].item() if len(values_S) else 0.0
        return {**shared, LEAST_ENTROPY: least}

    def surrogate(self, policies: Policies) -> LossOutput:
        output = super().surrogate(policies)
        batch = policies.batch
        is_masked_N = sample_means(-batch.behavior_logprobs_N, batch.lengths_S) < batch.facts[LEAST_ENTROPY]
        metrics_N = {**output.metrics_N, "policy/low_entropy_frac": is_masked_N.float()}
        return LossOutput(output.loss_N * ~is_masked_N, metrics_N)
