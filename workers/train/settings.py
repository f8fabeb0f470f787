"""The optimizer's settings and the learning rate of a step: known to whoever starts an actor, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW (arXiv:1711.05101) with a linear warm-up and a linear decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """The gradient is scaled down to this global 2-norm if it is longer."""
    warmup_steps: int = 0
    total_steps: int
    final_lr_fraction: float = 1.0
    """Learning rate at the end over its peak; 1 keeps it constant."""


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """The rate of optimizer step `step`, counted from 0: up over `warmup_steps`, then linearly down to the end.

    A function of the step alone, so that a resumed run needs no scheduler state.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    decay_steps = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / decay_steps)
    return settings.lr * (1 - done * (1 - settings.final_lr_fraction))
