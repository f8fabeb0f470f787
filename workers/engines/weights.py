"""The check every engine makes before it touches a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlsys.errors import WeightsMismatch

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


def check_weights(worker: str, weights: Mapping[str, Tensor], *, required: Shapes, optional: Shapes | None = None) -> None:
    """Raise `WeightsMismatch` naming every tensor that is missing, unknown or misshapen; `optional` ones may be left out."""
    known = {**(optional or {}), **required}
    problems = [f"missing {name}" for name in sorted(required.keys() - weights.keys())]
    problems += [f"unknown {name}" for name in sorted(weights.keys() - known.keys())]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, the engine's has {known[name]}"
        for name in sorted(weights.keys() & known.keys())
        if tuple(weights[name].shape) != known[name]
    ]
    if problems:
        raise WeightsMismatch(
            worker, "loading weights", f"{'; '.join(problems)}. Nothing was changed: publish the model the engine was built from"
        )
