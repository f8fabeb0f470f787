"""What the actor needs of a training back-end: one rank of the policy being trained.

One contract suite (`tests/contract/test_train.py`) runs against every back-end. Every method is collective: all ranks
call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlsys.algorithm import Algorithm, Stabilizer
from rlsys.batch.plan import Denominators, MicroBatchPlan
from rlsys.weights import Probe, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlsys.batch.tensors import StepData


class TrainBackend(Protocol):
    """One rank."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the model was first loaded; continues over `save` and `load`."""
        ...

    def train_step(
        self,
        plan: Sequence[MicroBatchPlan],
        denominators: Denominators,
        data: StepData,
        algorithm: Algorithm,
        *,
        temperature: float,
        stabilizer: Stabilizer | None = None,
    ) -> dict[str, float]:
        """One optimizer step on this rank's share of the batch; returns metrics, equal on all ranks.

        `temperature` is that of sampling: the trained distribution is the sampled one. Raises `TrainingError`, on all
        ranks and with nothing stepped, if the loss or the gradient's norm is not finite.
        """
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

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state and step, each rank its share. Raises `CheckpointError`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore bit for bit what any number of ranks saved. Raises `CheckpointError`."""
        ...

    def export(self, folder: Path) -> None:
        """Write config, safetensors and tokenizer, for `AutoModelForCausalLM.from_pretrained(folder)`."""
        ...
