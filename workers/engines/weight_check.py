"""Check of new weights, made by every engine before it changes any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsys.errors import WeightsMismatch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model's tensors by name, as a trainer publishes them."""

    known: Mapping[str, tuple[int, ...]]
    """Every name with its shape, including tied tensors."""
    required: frozenset[str]
    """Names that every set of weights must contain."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShapes:
        """Shapes of a Hugging Face model, which may be on the meta device."""
        every = model.named_parameters(remove_duplicate=False)
        return cls({n: tuple(p.shape) for n, p in every}, frozenset(n for n, _ in model.named_parameters()))


def check_weights(worker: str, weights: Mapping[str, Tensor], shapes: ModelShapes) -> None:
    """Raise `WeightsMismatch` naming every tensor that is missing, unknown or misshapen."""
    known = shapes.known
    problems = [f"missing {name}" for name in sorted(shapes.required - weights.keys())]
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
