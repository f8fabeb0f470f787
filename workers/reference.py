"""The reference worker: the frozen initial model, asked for the logprobs of tokens the policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rlsys.batch.plan import RankPlan
from rlsys.batch.samples import samples_in
from rlsys.batch.tensors import MicroBatch, StepData, packed
from rlsys.types import POLICY, Episode
from workers.train.model import load_model
from workers.train.scoring import score, trained_logprobs
from workers.train.step import mismatched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlsys.batch.tensors import StepColumn


class ReferenceWorker:
    """Scores whole groups, whose samples share prompts."""

    def __init__(
        self,
        model_path: str,
        dtype: Literal["float32", "bfloat16"],
        temperature: float,
        max_tokens: int,
        device: torch.device,
        policy: str = POLICY,
    ) -> None:
        """`temperature` is that of sampling: both sides of the KL are tempered alike. Of several policies it scores
        what `policy` said. Raises `ModelError`."""
        self._policy = policy
        self._model: PreTrainedModel = load_model(model_path, getattr(torch, dtype), device)
        self._temperature, self._max_tokens, self._device = temperature, max_tokens, device

    def logprobs(self, payload: tuple[Episode, ...]) -> list[tuple[float, ...]]:
        """One row per sample, in the order of `samples_in`: a logprob per completion token, 0.0 where not trained."""
        samples = list(samples_in(payload))
        own = [sample for (e, t, _), sample in samples if payload[e].trajectories[t].policy == self._policy]
        rows = iter(score(self._model, packed(own, self._max_tokens), self._temperature) if own else ())
        return [
            next(rows) if payload[e].trajectories[t].policy == self._policy else (0.0,) * len(sample.completion_ids)
            for (e, t, _), sample in samples
        ]

    def mismatched(self, plan: RankPlan, data: StepData) -> StepColumn:
        """`Signal.REFERENCE_MISMATCHED` for a rank: logprobs of its trained tokens after another task's prompt."""

        def logprobs(batch: MicroBatch) -> Tensor:
            with torch.no_grad():
                return trained_logprobs(self._model, batch, self._temperature)[0]

        micro_batches = [micro_batch for update in plan.updates for micro_batch in update]
        columns = (mismatched(data, m, plan.partners, logprobs, self._device) for m in micro_batches)
        return [column_N.cpu().numpy() for column_N in columns]
