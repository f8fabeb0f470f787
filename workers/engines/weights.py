"""The check every engine makes before it touches a weight."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from rlsys.errors import WeightsMismatch

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


def check_weights(worker: str, weights: Mapping[str, Tensor], *, known: Shapes, required: Set[str]) -> None:
    """Raise `WeightsMismatch` naming every tensor that is missing, unknown or misshapen."""
    problems = [f"missing {name}" for name in sorted(required - weights.keys())]
    problems += [f"unknown {name}" for name in sorted(weights.keys() - known.keys())]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, the engine's has {known[name]}"
        for name in sorted(weights.keys() & known.keys())
        if tuple(weights[name].shape) != known[name]
    ]
    if problems:
        raise WeightsMismatch(
            worker,
            "loading weights",
            f"{'; '.join(problems)}. Nothing was changed; publish the model that the engine was built from",
        )
