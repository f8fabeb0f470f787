"""What the actor and the critic need of a training back-end: one rank of a model being trained.

One contract suite (`tests/contract/test_train.py`) runs against every back-end. Every method is collective, unless
it says otherwise: all ranks call it, in the same order.
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
        """Train steps taken since the model was first loaded; continues over `save` and `load`."""
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
        """One step on this rank's share of the batch, update by update; returns metrics, equal on all ranks.

        `temperature` is that of sampling: the trained distribution is the sampled one. A step in which the algorithm
        does not train the policy counts, and does nothing else. Raises `TrainingError`, on all ranks and with nothing
        of that update stepped, if the loss or the gradient's norm is not finite.
        """
        ...

    def columns(self) -> list[TokenColumns]:
        """What the last step made of each token that this rank trained; nothing before the first. Not collective."""
        ...

    def shards(self) -> dict[str, Tensor]:
        """This rank's live shard of every parameter, for `StabilizerPlugin.start`."""
        ...

    def specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """The weights by their Hugging Face names, without tied duplicates, as they are published in `dtype`."""
        ...

    def copy_weights(self, into: Mapping[str, Tensor]) -> None:
        """Write the whole weights into these host tensors, cast to their dtype. Rank 0 alone writes; others take part.

        Once it returns, training may go on.
        """
        ...

    def full_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """A copy of the weights on the host, as `specs` names them, for rank 0.

        Other ranks take part and get an empty dict.
        """
        ...

    def probe(self) -> Probe | None:
        """What this rank's model says of some fixed tokens under the weights it has; None if it was built without."""
        ...

    def save(self, folder: Path, stabilizer: Stabilizer | None = None) -> None:
        """Write weights, optimizer state, step and stabilizer, each rank its share. Raises `CheckpointError`."""
        ...

    def load(self, folder: Path, stabilizer: Stabilizer | None = None) -> None:
        """Restore bit for bit what any number of ranks saved.

        A stabilizer that was not saved stays as it is, fresh; one that was saved and is not there now is left out.
        Raises `CheckpointError`.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write config, safetensors and tokenizer, for `AutoModelForCausalLM.from_pretrained(folder)`."""
        ...


class ValueBackend(Protocol):
    """One rank of the critic."""

    @property
    def step(self) -> int:
        """Train steps taken since the model was first loaded; continues over `save` and `load`."""
        ...

    def values(self, plan: RankPlan, data: StepData) -> StepColumn:
        """What it expects of the state before each trained token, for each of this rank's micro-batches."""
        ...

    def train_step(self, plan: RankPlan, data: StepData, algorithm: Algorithm) -> dict[str, float]:
        """One step on this rank's share of the batch, update by update; returns metrics, equal on all ranks.

        `data` holds the step's columns, `Signal.VALUES` among them. Raises `TrainingError` as `TrainBackend` does.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and step, each rank its share. Raises `CheckpointError`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore bit for bit what any number of ranks saved. Raises `CheckpointError`."""
        ...
