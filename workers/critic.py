"""One rank of the critic: values its share of a step, then trains on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ray

from rlsys.algorithm import Algorithm, Signal
from rlsys.batch.plan import RankPlan
from rlsys.contracts import TrainStats
from workers.cluster import Resources
from workers.rank import Rank, flushed

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from workers.train.base import ValueBackend
    from workers.train.settings import OptimizerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """What a rank is built from."""

    model_path: str
    policy_path: str
    """The policy's model, whose token ids it reads."""
    dtype: Literal["float32", "bfloat16"]
    num_ranks: int
    optimizer: OptimizerSettings
    algorithm: Algorithm
    resources: Resources


class CriticRank(Rank):
    """Rank `rank` of `spec.num_ranks`. Plain class: Ray makes an actor of it, one per rank."""

    def __init__(self, rank: int, spec: CriticSpec) -> None:
        self._rank, self._spec = rank, spec
        self._backend: ValueBackend | None = None

    def setup(self, address: str) -> None:
        """Join the other ranks at `address` and load the model. Raises `ModelError`."""
        import torch

        from workers.train.ranks import Ranks
        from workers.train.values import CriticBackend, check_vocabulary

        spec = self._spec
        if spec.model_path != spec.policy_path:
            check_vocabulary(spec.model_path, spec.policy_path)
        torch.set_num_threads(spec.resources.threads)
        ranks = Ranks(self._rank, spec.num_ranks, address=address)
        self._backend = CriticBackend(
            spec.model_path, spec.optimizer, ranks, dtype=spec.dtype, device=spec.resources.device()
        )

    @property
    def backend(self) -> ValueBackend:
        assert self._backend is not None, "setup comes first"
        return self._backend

    @ray.method(num_returns=2)
    def values(self, plan: RankPlan) -> tuple[int, StepColumn]:
        """A receipt, and the values of what was fetched for the step."""
        column = self.backend.values(plan, self.fetched)
        return len(column), column

    def train_step(self, plan: RankPlan, signals: Sequence[Signal], *columns: StepColumn) -> TrainStats:
        """One step on what was fetched for it, with this rank's column of each of `signals`."""
        start_s = time.monotonic()
        metrics = self.backend.train_step(plan, self.taken(signals, columns), self._spec.algorithm)
        return TrainStats(metrics, time.monotonic() - start_s)

    def save(self, folder: Path) -> None:
        """Raises `CheckpointError`."""
        self.backend.save(folder)
        flushed(folder)

    def load(self, folder: Path) -> None:
        """Raises `CheckpointError`."""
        self.backend.load(folder)
