"""One rank of the critic: computes the values of its share of a step, then trains on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsys.algorithm import Signal
from rlsys.batch.packing import RankPlan
from rlsys.contracts import TrainStats
from rlsys.util.deadlines import remote
from workers.train.rank import Rank, RankSpec, flushed

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from workers.train.backend import ValueBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec(RankSpec):
    """The specification of a rank of the critic."""

    policy_path: str
    """The policy's model, which defines the token ids."""


class CriticRank(Rank):
    """Rank `rank` of `spec.num_ranks`, each in its own process."""

    def __init__(self, rank: int, spec: CriticSpec, address: str) -> None:
        """Join the other ranks at `address` and load the model. Raises `ModelError`."""
        from workers.train.rank_group import RankGroup
        from workers.train.value_model import CriticBackend, check_vocabulary

        self._spec = spec
        if spec.model_path != spec.policy_path:
            check_vocabulary(spec.model_path, spec.policy_path)
        device = spec.resources.claim()
        ranks = RankGroup(rank, spec.num_ranks, address=address)
        self._backend: ValueBackend = CriticBackend(
            spec.model_path, spec.optimizer, ranks, dtype=spec.dtype, device=device
        )

    @remote("valuing a step")
    def values(self, plan: RankPlan) -> tuple[int, StepColumn]:
        """A receipt, and the values of the fetched step."""
        column = self._backend.values(plan, self.fetched)
        return len(column), column

    def train_step(self, plan: RankPlan, signals: Sequence[Signal], *columns: StepColumn) -> TrainStats:
        start_s = time.monotonic()
        metrics = self._backend.train_step(plan, self.taken(signals, columns), self._spec.algorithm)
        return TrainStats(metrics, time.monotonic() - start_s)

    def save(self, folder: Path) -> None:
        self._backend.save(folder)
        flushed(folder)

    @remote("loading a checkpoint")
    def load(self, folder: Path) -> None:
        """Load a checkpoint. Raises `CheckpointError`."""
        self._backend.load(folder)
