"""Recorded steps of a run, trained again without Ray: all ranks, the critic and the stabilizer, bit for bit.

Each rank reads the same files, plans the same steps, and trains its part; ranks communicate only in collectives.
Columns that other workers computed per group are in the record. Columns per step are computed again, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from rlsys.algorithm import Signal
from rlsys.batch.packing import BatchPlan, RankPlan
from rlsys.batch.tensors import StepData
from rlsys.loop.checkpoint import ACTOR, CRITIC
from rlsys.replay.replay_results import Comparison, RetrainedSteps, compared
from rlsys.replay.rollout_log import RolloutRecord
from rlsys.replay.run_history import RecordedSteps
from rlsys.types import POLICY
from workers.train.backend import TrainBackend
from workers.train.fsdp import FsdpBackend
from workers.train.local_processes import in_processes
from workers.train.model_loading import CPU
from workers.train.optimizer_settings import critic_optimizer_settings, optimizer_settings
from workers.train.rank_group import RankGroup
from workers.train.reference_worker import ReferenceWorker
from workers.train.value_model import CriticBackend
from workers.transport.hashing import content_hash

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from rlsys.config import Config
    from rlsys.loop.learner import BatchShape

REFERENCE = "reference"

Stop: TypeAlias = "Callable[[int, BatchPlan, Sequence[RolloutRecord], TrainBackend], None]"
"""Callback right before the last step is trained, with its number, its plan, its groups and the policy."""


@dataclass(frozen=True, slots=True)
class RetrainJob:
    """Everything that a rank needs to train the steps again."""

    config: Config
    shape: BatchShape
    recording: RecordedSteps
    on_gpu: frozenset[str]
    """Those of `POLICY`, `CRITIC` and `REFERENCE` that run on a GPU, one per rank."""

    def device(self, model: str, rank: int) -> torch.device:
        """Device of one rank's copy of a model."""
        return torch.device("cuda", rank) if model in self.on_gpu else CPU


@dataclass(frozen=True, slots=True)
class _Retrained:
    """Results of rank 0."""

    hashes: list[str]
    """Hashes of the weights before the first step, and after each."""
    metrics: dict[str, float]
    """Metrics of the last step."""


def retrain(config: Config, shape: BatchShape, recording: RecordedSteps, stop: Stop | None = None) -> RetrainedSteps:
    """Train the steps of a recording again: in this process if the run had one rank, else in one process per rank.

    `stop` is for runs of one rank. Raises `ModelError`, `CheckpointError` or `DataError` for unreadable inputs,
    `TrainingError` if a step produces numbers that are not finite.
    """
    wanted = models_on_gpu(config)
    on_gpu = wanted if torch.cuda.device_count() >= shape.num_ranks else frozenset[str]()
    job = RetrainJob(config, shape, recording, on_gpu)
    trained = _train(job, RankGroup(), stop) if shape.num_ranks == 1 else _in_processes(job)
    told, moved = recording.history, wanted - on_gpu
    versions = range(recording.start, recording.step + 1)
    return RetrainedSteps(
        run=str(recording.run),
        step=recording.step,
        beginning=recording.beginning,
        weights=tuple(
            Comparison(f"weights of version {version}", told.hashes.get(version), found)
            for version, found in zip(versions, trained.hashes, strict=True)
        ),
        metrics=compared(told.ends[recording.step].metrics, trained.metrics),
        device=f"computed on a CPU, where the run had a GPU: {', '.join(sorted(moved))}" if moved else "",
    )


def models_on_gpu(config: Config) -> frozenset[str]:
    """Models of a step that the run has on GPUs, by its sections `train`, `critic` and `reference`."""
    signals = config.algorithm.signals
    is_on_gpu = {
        POLICY: config.train.num_gpus > 0,
        CRITIC: Signal.VALUES in signals and config.critic.num_gpus > 0,
        REFERENCE: Signal.REFERENCE_MISMATCHED in signals and config.reference.num_gpus > 0,
    }
    return frozenset(model for model, is_there in is_on_gpu.items() if is_there)


def _in_processes(job: RetrainJob) -> _Retrained:
    return in_processes(job.shape.num_ranks, partial(_train_rank, job), "training again")


def _train_rank(job: RetrainJob, rank: int, address: str) -> _Retrained:
    ranks = RankGroup(rank, job.shape.num_ranks, address=address)
    try:
        return _train(job, ranks)
    finally:
        ranks.close()


def _train(job: RetrainJob, ranks: RankGroup, stop: Stop | None = None) -> _Retrained:
    recording, models = job.recording, Models(job, ranks)
    if recording.checkpoint is not None:
        models.load(recording.checkpoint)
    hashes, metrics = [models.hash()], {}
    for step in recording.steps:
        groups = recording.rollouts(step)
        plan = job.shape.plan([g.group for g in groups], [g.assigned for g in groups], job.config.algorithm)
        if stop is not None and step == recording.step:
            stop(step, plan, groups, models.policy)
        metrics = models.train(plan.of_rank(ranks.rank), _data_of(groups))
        hashes.append(models.hash())
    return _Retrained(hashes, metrics)


def _data_of(groups: Sequence[RolloutRecord]) -> StepData:
    columns = [{Signal(name): rows for name, rows in group.columns.items()} for group in groups]
    return StepData([group.episodes for group in groups], columns)


class Models:
    """One rank of the policy and of the critic, if the run has one, and a separate reference model."""

    def __init__(self, job: RetrainJob, ranks: RankGroup) -> None:
        """Create all models as at version 0. Raises `ModelError`."""
        self._config, self._ranks = job.config, ranks
        config, device = job.config, partial(job.device, rank=ranks.rank)
        path, dtype, signals = config.model.path, config.model.dtype, config.algorithm.signals
        self.policy = FsdpBackend(path, optimizer_settings(config), ranks, dtype=dtype, device=device(POLICY))
        self._stabilizer = config.stabilizer.start(self.policy.shards()) if config.stabilizer else None
        self._critic = self._reference = None
        if Signal.VALUES in signals:
            own, settings = config.critic.path or path, critic_optimizer_settings(config)
            self._critic = CriticBackend(own, settings, ranks, dtype=dtype, device=device(CRITIC))
        if Signal.REFERENCE_MISMATCHED in signals:
            temperature, max_tokens = config.rollout.temperature, config.train.micro_batch_tokens
            self._reference = ReferenceWorker(path, dtype, temperature, max_tokens, device(REFERENCE))

    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the run. Raises `CheckpointError`."""
        self.policy.load(checkpoint / ACTOR, self._stabilizer)
        if self._critic is not None:
            self._critic.load(checkpoint / CRITIC)

    def train(self, plan: RankPlan, data: StepData) -> dict[str, float]:
        """Train one step of actor and critic. Returns their metrics."""
        config, algorithm = self._config, self._config.algorithm
        data = data.with_columns(self._columns(plan, data))
        with _threads(config.train.threads):
            temperature, stabilizer = config.rollout.temperature, self._stabilizer
            metrics = self.policy.train_step(plan, data, algorithm, temperature=temperature, stabilizer=stabilizer)
        if self._critic is not None:
            with _threads(config.critic.threads):
                metrics |= self._critic.train_step(plan, data, algorithm)
        return metrics

    def hash(self) -> str:
        """Hash of the weights as they would be published; on other ranks than 0, hash of no weights."""
        return content_hash(self.policy.full_weights(getattr(torch, self._config.model.dtype)))

    def _columns(self, plan: RankPlan, data: StepData) -> dict[Signal, StepColumn]:
        """Columns that are computed per step."""
        columns: dict[Signal, StepColumn] = {}
        if self._reference is not None:
            with _threads(self._config.reference.threads):
                columns[Signal.REFERENCE_MISMATCHED] = self._reference.mismatched(plan, data)
        if self._critic is not None:
            with _threads(self._config.critic.threads):
                columns[Signal.VALUES] = self._critic.values(plan, data)
        return columns


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's thread count, because the last bits of large sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
