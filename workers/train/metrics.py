"""What a step reports: means over the step's trained tokens, summed up micro-batch by micro-batch and rank by rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsys.batch.plan import Denominators
from workers.train.ranks import Ranks


def sampler_metrics(logprobs_N: Tensor, behavior_logprobs_N: Tensor, entropy_N: Tensor) -> dict[str, Tensor]:
    """Per token: how far the trained policy is from the one that sampled.

    `approx_kl` is k3, r - 1 - log r with r = policy / sampler, an estimate of KL(sampler || policy).
    """
    x_N = (logprobs_N - behavior_logprobs_N).clamp(-20, 20)
    return {"policy/entropy": entropy_N, "policy/approx_kl": x_N.exp() - 1 - x_N, "sampler/logp_diff_mean": x_N.abs()}


class StepMetrics:
    """Sums over the micro-batches of one rank, on the device; nothing waits for them until `reduced`."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, Tensor] = {}
        self._loss = torch.zeros((), device=device)
        self._max_diff = torch.zeros((), device=device)

    def add(self, loss: Tensor, diff_N: Tensor, metrics_N: Mapping[str, Tensor], weight: float) -> None:
        """One micro-batch: its share of the step's loss, |policy - sampler| per token, and other values per token."""
        self._loss += loss
        self._max_diff = torch.maximum(self._max_diff, diff_N.max() * weight)
        for name, value_N in metrics_N.items():
            value = value_N.sum() * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduced(self, ranks: Ranks, denominators: Denominators, grad_norm: Tensor) -> dict[str, float]:
        """The step's figures, equal on all ranks."""
        sums = ranks.sum(torch.stack([self._loss, *self._sums.values()]))
        sums[1:] /= denominators.tokens
        loss, *means, max_diff, norm = torch.cat([sums, ranks.max(self._max_diff)[None], grad_norm[None]]).tolist()
        return {
            "loss": loss,
            **dict(zip(self._sums, means, strict=True)),
            "sampler/logp_diff_max": max_diff,
            "optim/grad_norm": norm,
        }
