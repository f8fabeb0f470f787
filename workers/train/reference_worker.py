"""The reference worker: computes logprobs of sampled tokens under the frozen initial model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

from rlsys.algorithm import Column
from rlsys.batch.packing import RankPlan
from rlsys.batch.samples import samples_in
from rlsys.number_arrays import FloatArray
from rlsys.types import POLICY, Distribution, Episode
from rlsys.util.deadlines import remote
from workers.ray.call_stream import Parcel
from workers.train.ranks import StepParcel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rlsys.batch.tensors import StepColumn, StepData


class ReferenceWorker:
    """Scores whole groups, whose samples share prompts."""

    def __init__(
        self,
        model_path: str,
        dtype: Literal["float32", "bfloat16"],
        distribution: Distribution,
        max_tokens: int,
        device: torch.device,
        policy: str = POLICY,
        *,
        shares_device: bool = False,
    ) -> None:
        """`distribution` is that of sampling, so that both sides of the KL use the same. With several policies, only
        tokens of `policy` are scored. `shares_device`: its device is a GPU that others use while it sleeps. Raises
        `ModelError`."""
        import torch

        from workers.model.model_loading import load_model
        from workers.model.moving_memory import MovingMemory, own_memory

        self._policy, self._device = policy, device
        self._model: PreTrainedModel = load_model(model_path, getattr(torch, dtype), self._device)
        self._distribution, self._max_tokens = distribution, max_tokens
        self._memory = MovingMemory(device) if shares_device else None
        if shares_device:
            own_memory(self._model)

    @remote("scoring groups")
    def annotate(self, parcel: Parcel) -> tuple[int, tuple[object, ...]]:
        """A receipt, and the column of each group. Raises `PayloadLost`."""
        payloads = parcel.open()
        return len(payloads), tuple(self.logprobs(payload) for payload in payloads)

    @remote("scoring a step")
    def annotate_step(
        self, parcel: StepParcel, plans: Sequence[RankPlan], kind: Column
    ) -> tuple[int, *tuple[StepColumn, ...]]:
        """A receipt, and the column `kind` of each rank. Raises `PayloadLost`."""
        data = parcel.open()
        return len(plans), *(self.column_of_rank(plan, data, kind) for plan in plans)

    @remote("giving its device away")
    def sleep(self) -> None:
        """Move the model to the host, if others use its GPU."""
        if self._memory is not None:
            self._memory.move_out(chain(self._model.parameters(), self._model.buffers()))

    @remote("taking its device back")
    def wake(self) -> None:
        """Undo `sleep`."""
        if self._memory is not None:
            self._memory.move_in()

    def logprobs(self, payload: tuple[Episode, ...]) -> list[FloatArray]:
        """One row per sample, in the order of `samples_in`: a logprob per completion token, 0.0 where not trained."""
        from workers.model.logprobs import score

        samples = list(samples_in(payload))
        own = [sample for (e, t, _), sample in samples if payload[e].trajectories[t].policy == self._policy]
        rows = iter(score(self._model, own, self._distribution, max_tokens=self._max_tokens))
        return [
            next(rows)
            if payload[e].trajectories[t].policy == self._policy
            else FloatArray((0.0,) * len(sample.completion_ids))
            for (e, t, _), sample in samples
        ]

    def column_of_rank(self, plan: RankPlan, data: StepData, kind: Column) -> StepColumn:
        """Logprobs of the trained tokens of a rank; for `Column.REFERENCE_MISMATCHED` after another task's prompt."""
        import torch

        from workers.model.logprobs import trained_logprobs
        from workers.train.step_data import mismatched_column

        score = torch.no_grad()(lambda batch: trained_logprobs(self._model, batch, self._distribution))
        if kind is Column.REFERENCE_MISMATCHED:
            columns = [mismatched_column(data, m, plan.partners, score, self._device) for m in plan.micro_batches]
        else:
            columns = [score(data.micro_batch(m).to(self._device))[0] for m in plan.micro_batches]
        return [column_N.cpu().numpy() for column_N in columns]
