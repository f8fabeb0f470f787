"""Names and forms that checkpoints give the tensors of a model, where the Transformers library has others in memory.

    save(in_own_memory(checkpoint_tensors(outline, tensors)))

In memory, the experts of a layer are one tensor; in a checkpoint, each has its own. Versions are published as they are
in memory. An export, and an engine that reads checkpoints, get what this module makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def checkpoint_tensors(outline: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a model as its checkpoints have them: the mapping itself if that is how they are in memory,
    else all of them at once, as views where that is possible.

    `outline` is the model without weights. One that was loaded remembers the names of its files, which may lack a
    prefix or be those of an earlier library.
    """
    return revert_weight_conversion(outline, cast("dict[str, Tensor]", tensors))


def in_own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with copies of those that are views of others: no file of safetensors may share memory."""
    return {n: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for n, t in tensors.items()}
