"""The optimizer, and gradients as named shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.train.settings import OptimizerSettings

if TYPE_CHECKING:
    from rlsys.algorithm import Gradients


def adamw(module: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over all parameters of a module, its state allocated: a fresh optimizer can be saved and loaded into."""
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in module.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def local_gradients(module: nn.Module) -> Gradients:
    """This rank's shard of every gradient there is, by parameter name; editing one edits the gradient."""
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {n: g.to_local() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def global_norm(gradients: Gradients, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """The 2-norm of the whole gradient, a scalar, from every rank's shards."""
    squares = torch.stack([gradient.square().sum() for gradient in gradients.values()])
    return all_reduce(squares.sum()).sqrt()


def clip(gradients: Gradients, norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(scale)
