"""AdamW: its settings and learning rate, and gradients as named shards. Imports torch only where ranks call it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import cos, pi, sqrt
from typing import TYPE_CHECKING, Any, Literal

from rlsys.stabilizer import inner_product
from workers.model.model_tensors import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlsys.config import Config
    from rlsys.config.train_section import LrStaleness
    from rlsys.stabilizer import Gradients


STALENESS_POWERS: Mapping[LrStaleness, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Power of 1 + s that divides the learning rate of a step whose samples are s versions old."""


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
    lr_schedule: Literal["linear", "cosine"] = "linear"
    lr_staleness: LrStaleness = "none"


def learning_rate(step: int, settings: OptimizerSettings, staleness: float = 0.0) -> float:
    """Learning rate of optimizer step `step`, counted from 0: up over `warmup_steps`, then down to the end, linearly or
    by half a cosine (SGDR without restarts, arXiv:1608.03983, eq. 5); then divided for the age of the samples.

    With `lr_staleness`, samples that are s = `staleness` versions old divide it by 1 + s or its root (Zhang et al.,
    arXiv:1511.05950, divide by s). It depends only on the step and its samples, so a resumed run needs no
    scheduler state.
    """
    return _scheduled_lr(step, settings) / (1 + staleness) ** STALENESS_POWERS[settings.lr_staleness]


def _scheduled_lr(step: int, settings: OptimizerSettings) -> float:
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    decay_steps = max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, (step - settings.warmup_steps) / decay_steps)
    if settings.lr_schedule == "cosine":
        done = (1 - cos(pi * done)) / 2
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
        lr_schedule=train.lr_schedule,
        lr_staleness=train.lr_staleness,
    )


def critic_optimizer_settings(config: Config) -> OptimizerSettings:
    """The critic's optimizer settings: those of the policy except for the learning rate, which no age divides, because
    returns are regressed on whatever sampled them."""
    return replace(optimizer_settings(config), lr=config.critic.lr or 10 * config.train.lr, lr_staleness="none")


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are not frozen, by name, tied ones once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def adamw(module: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over the trained parameters of a module, with allocated state: a fresh optimizer can be saved and loaded
    into."""
    import torch
    from torch.distributed.tensor import DTensor

    parameters = trained_parameters(module).values()
    alike: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:  # one fused update takes weights of one mesh
        alike.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in alike.values()],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def local_gradients(module: nn.Module) -> Gradients:
    """This rank's shard of every gradient, by parameter name. Editing a shard edits the gradient."""
    return {name: local(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def squared_norms(gradients: Gradients) -> dict[str, Tensor]:
    """Squared norm of each of this rank's shards, fp64 scalars. Their `AllReduce` is that of the whole gradient."""
    return {name: inner_product(gradient, gradient) for name, gradient in gradients.items()}


def clip(gradients: Gradients, norm: float, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`."""
    if (scale := max_norm / (norm + 1e-6)) < 1:
        for gradient in gradients.values():
            gradient.mul_(scale)


CPU_PIECE, GPU_PIECE = 2**17, 2**22
"""Elements per piece of an update. Four temporaries of a piece fit in a CPU's cache, or take 64 MiB on a GPU."""


class AdamUpdates:
    """`Updates` of an AdamW that is about to step, computed from its moments and the current gradients. They are
    computed one piece at a time, so that no copy of the model is needed."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> None:
        self._rule = optimizer.param_groups[0]
        self._with_gradient = {name: p for name, p in parameters.items() if p.grad is not None}
        self._state = optimizer.state

    def pieces(self) -> Iterator[AdamPiece]:
        if not self._with_gradient:
            return
        import torch

        states = [self._state[parameter] for parameter in self._with_gradient.values()]
        counts = torch.stack([state["step"] for state in states]).tolist()
        for (name, parameter), state, count in zip(self._with_gradient.items(), states, counts, strict=True):
            assert parameter.grad is not None
            tensors = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            flat = [local(tensor).reshape(-1) for tensor in tensors]  # weights are contiguous: `add` writes into them
            size = CPU_PIECE if flat[0].device.type == "cpu" else GPU_PIECE
            for weights, gradient, mean, square in zip(*(tensor.split(size) for tensor in flat), strict=True):
                yield AdamPiece(name, self._rule, int(count), weights, gradient, mean, square)


@dataclass(frozen=True, slots=True)
class AdamPiece:
    """Implements `Piece`.

    With moments m and v, the number t of updates behind them and decay rates beta1 and beta2 (arXiv:1412.6980), the
    direction is m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps).
    """

    name: str
    rule: Mapping[str, Any]
    """The optimizer's settings for this update."""
    count: int
    """Number of updates behind the moments."""
    weights: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor

    def before(self) -> Tensor:
        if not self.count:
            return self.mean.new_zeros(self.mean.shape)
        return self._direction(self.mean.clone(), self.square.sqrt(), self.count)

    def now(self) -> Tensor:
        (beta1, beta2), g = self.rule["betas"], self.gradient
        square = self.square.mul(beta2).addcmul_(g, g, value=1 - beta2)
        return self._direction(self.mean.lerp(g, 1 - beta1), square.sqrt_(), self.count + 1)

    def add(self, direction: Tensor, scale: float) -> None:
        """See `Piece.add`. The step begins with weight decay, which shrinks this move. So the move is larger by the
        same factor."""
        lr, weight_decay = self.rule["lr"], self.rule["weight_decay"]
        alpha = -lr * scale / (1 - lr * weight_decay)
        self.weights.add_(direction, alpha=alpha)

    def _direction(self, mean: Tensor, root: Tensor, count: int) -> Tensor:
        """Direction from a first moment and the root of a second moment; overwrites both."""
        beta1, beta2 = self.rule["betas"]
        root.div_(sqrt(1 - beta2**count)).add_(self.rule["eps"])
        return mean.div_(root).div_(1 - beta1**count)
