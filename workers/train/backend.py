"""Contract of a training back-end for actor and critic: one rank of a model in training.

One contract suite (`tests/contract/test_train.py`) runs against every back-end. Unless noted otherwise, every method is
collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlsys.algorithm import Algorithm
from rlsys.batch.packing import RankPlan
from rlsys.stabilizer import Stabilizer
from rlsys.weight_sync.sync import Probe, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlsys.batch.tensors import StepColumn, StepData
    from workers.train.token_columns import TokenColumns


class TrainBackend(Protocol):
    """One rank of the policy."""

    @property
    def step(self) -> int:
        """Train steps taken since the model was first loaded; kept by `save` and `load`."""
        ...

    def train_step(
        self,
        plan: RankPlan,
        data: StepData,
        algorithm: Algorithm,
        *,
        temperature: float,
        stabilizer: Stabilizer | None = None,
    ) -> dict[str, float]:
        """Train one step on this rank's share of the batch, update by update. Returns metrics, equal on all ranks.

        `temperature` is that of sampling: the trained distribution is the sampled one. If the algorithm does not train
        the policy in this step, the step only counts. Raises `TrainingError` on all ranks if the loss or the gradient's
        norm is not finite; that update is then not applied.
        """
        ...

    def columns(self) -> list[TokenColumns]:
        """Per-token results of this rank's last step; empty before the first step. Not collective."""
        ...

    def shards(self) -> dict[str, Tensor]:
        """This rank's live shard of every parameter, for `StabilizerPlugin.start`."""
        ...

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Specs of the weights by Hugging Face name, without tied duplicates, as published in `dtype`."""
        ...

    def copy_weights(self, into: Mapping[str, Tensor]) -> None:
        """Write the whole weights into these host tensors, cast to their dtype. Only rank 0 writes; others take part.

        After the return, training may continue.
        """
        ...

    def full_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """A copy of the weights on the host, with the names of `specs`, for rank 0.

        Other ranks take part and get an empty dict.
        """
        ...

    def probe(self) -> Probe | None:
        """Logprobs of fixed tokens under the current weights of this rank; None if it was built without a probe."""
        ...

    def save(self, folder: Path, stabilizer: Stabilizer | None = None) -> None:
        """Write weights, optimizer state, step and stabilizer; each rank writes its share. Raises `CheckpointError`."""
        ...

    def load(self, folder: Path, stabilizer: Stabilizer | None = None) -> None:
        """Restore a checkpoint from any number of ranks, bit for bit.

        A stabilizer without saved state stays fresh; saved state without a stabilizer is ignored. Raises
        `CheckpointError`.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write config, safetensors and tokenizer, for `AutoModelForCausalLM.from_pretrained(folder)`."""
        ...


class ValueBackend(Protocol):
    """One rank of the critic."""

    @property
    def step(self) -> int:
        """Train steps taken since the model was first loaded; kept by `save` and `load`."""
        ...

    def values(self, plan: RankPlan, data: StepData) -> StepColumn:
        """Value of the state before each trained token, for each of this rank's micro-batches."""
        ...

    def train_step(self, plan: RankPlan, data: StepData, algorithm: Algorithm) -> dict[str, float]:
        """Train one step on this rank's share of the batch, update by update. Returns metrics, equal on all ranks.

        `data` has the step's columns, including `Signal.VALUES`. Raises `TrainingError` as `TrainBackend` does.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and step; each rank writes its share. Raises `CheckpointError`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint from any number of ranks, bit for bit. Raises `CheckpointError`."""
        ...
