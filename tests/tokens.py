"""Trained tokens made by hand, as an algorithm sees them, in float64 so that gradients can be checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput

F64 = torch.float64


def column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=F64)


def tokens(
    behavior: Sequence[float],
    advantages: Sequence[float],
    *,
    proximal: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    staleness: Sequence[int] | None = None,
    columns: Mapping[Column, Sequence[float]] | None = None,
    returns: Sequence[float] | None = None,
    facts: Mapping[str, float] | None = None,
) -> LossInputs:
    """One entry per token. Without `proximal` the trainer starts from the sampler's distribution; without `lengths` all
    tokens are of one sample."""
    return LossInputs(
        behavior_logprobs_N=column(behavior),
        proximal_logprobs_N=column(behavior if proximal is None else proximal),
        advantages_N=column(advantages),
        staleness_N=torch.tensor([0] * len(behavior) if staleness is None else staleness),
        lengths_S=torch.tensor([len(behavior)] if lengths is None else lengths),
        groups_S=torch.tensor([0] * len(lengths or [0]) if groups is None else groups),
        columns_N={kind: column(values) for kind, values in (columns or {}).items()},
        returns_N=None if returns is None else column(returns),
        facts=facts or {},
    )


def loss_of(algorithm: Algorithm, logprobs: Sequence[float], batch: LossInputs) -> tuple[list[float], list[float]]:
    """The loss of each token, and the gradient of their sum by each token's logprob."""
    logprobs_N = column(logprobs).requires_grad_()
    loss_N = algorithm.loss(logprobs_N, batch).loss_N
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    return loss_N.tolist(), gradient_N.tolist()


def numeric_gradient(function: Callable[[Tensor], LossOutput | Tensor], at: Sequence[float]) -> list[float]:
    """Central differences in float64 of the sum that `function` gives."""

    def total(values: Sequence[float]) -> float:
        output = function(column(values))
        return float((output.loss_N if isinstance(output, LossOutput) else output).sum())

    step, gradient = 1e-6, []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        gradient.append((total(up) - total(down)) / (2 * step))
    return gradient


class OneRank:
    """The collectives of a rank that is alone."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, values_N: Tensor) -> Tensor:
        return values_N
