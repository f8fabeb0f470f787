"""The reference worker: the frozen initial model, asked for the logprobs of tokens the policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rlsys.batch.samples import samples_in
from rlsys.batch.tensors import packed
from rlsys.types import Episode
from workers.train.model import load_model
from workers.train.scoring import score

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReferenceWorker:
    """Scores whole groups, whose samples share prompts."""

    def __init__(
        self,
        model_path: str,
        dtype: Literal["float32", "bfloat16"],
        temperature: float,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        """`temperature` is that of sampling: both sides of the KL are tempered alike. Raises `ModelError`."""
        self._model: PreTrainedModel = load_model(model_path, getattr(torch, dtype), device)
        self._temperature, self._max_tokens = temperature, max_tokens

    def logprobs(self, payload: tuple[Episode, ...]) -> list[tuple[float, ...]]:
        """One row per sample, in the order of `samples_in`: a logprob per completion token, 0.0 where not trained."""
        samples = [sample for _, sample in samples_in(payload)]
        return score(self._model, packed(samples, self._max_tokens), self._temperature)
