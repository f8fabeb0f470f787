"""Optimizer settings and the learning rate of a step. Free of torch, for the driver that starts the actor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsys.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW (arXiv:1711.05101) with a linear warm-up and a linear decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest global 2-norm of the gradient; a longer gradient is scaled down."""
    warmup_steps: int = 0
    total_steps: int
    final_lr_fraction: float = 1.0
    """Final learning rate as a fraction of the peak; 1 keeps it constant."""


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Learning rate of optimizer step `step`, counted from 0: up over `warmup_steps`, then linearly down to the end.

    It depends only on the step, so a resumed run needs no scheduler state.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    decay_steps = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / decay_steps)
    return settings.lr * (1 - done * (1 - settings.final_lr_fraction))


def optimizer_settings(config: Config) -> OptimizerSettings:
    """The policy's optimizer settings."""
    train = config.train
    return OptimizerSettings(
        lr=train.lr,
        betas=train.betas,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
        warmup_steps=train.warmup_steps,
        total_steps=config.run.steps,
        final_lr_fraction=train.final_lr_fraction,
    )


def critic_optimizer_settings(config: Config) -> OptimizerSettings:
    """The critic's optimizer settings: those of the policy except for the learning rate."""
    return replace(optimizer_settings(config), lr=config.critic.lr or 10 * config.train.lr)
