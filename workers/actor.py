"""One rank of the actor: trains its share of a step, publishes, saves, and writes groups to disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import ray

from rlsys.algorithm import Algorithm, Assigned, Signal
from rlsys.batch.plan import RankPlan
from rlsys.contracts import Published, TrainStats
from rlsys.record import GroupRecord, RolloutRecord, read_groups, write_groups, write_rollouts
from rlsys.stabilizer import Stabilizer, StabilizerPlugin
from rlsys.types import Episode, Group, PolicyVersion, Task
from workers.cluster import Resources
from workers.rank import Rank, disk, flushed
from workers.streams import Parcel

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from workers.train.base import TrainBackend
    from workers.train.settings import OptimizerSettings
    from workers.transport.object_store import ObjectStorePublisher

Payload: TypeAlias = tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """What a rank is built from."""

    model_path: str
    dtype: Literal["float32", "bfloat16"]
    num_ranks: int
    optimizer: OptimizerSettings
    algorithm: Algorithm
    stabilizer: StabilizerPlugin | None
    temperature: float
    probe_length: int
    """Tokens of the probe that goes with published weights."""
    resources: Resources


class ActorRank(Rank):
    """Rank `rank` of `spec.num_ranks`. Plain class: Ray makes an actor of it, one per rank."""

    def __init__(self, rank: int, spec: ActorSpec, publisher: ObjectStorePublisher) -> None:
        self._rank, self._spec, self._publisher = rank, spec, publisher
        self._backend: TrainBackend | None = None
        self._stabilizer: Stabilizer | None = None

    def setup(self, address: str) -> None:
        """Join the other ranks at `address` and load the model. Raises `ModelError`."""
        import torch

        from workers.train.fsdp import FsdpBackend
        from workers.train.ranks import Ranks

        spec = self._spec
        torch.set_num_threads(spec.resources.threads)
        device = spec.resources.device()
        ranks = Ranks(self._rank, spec.num_ranks, address=address)
        self._backend = FsdpBackend(
            spec.model_path, spec.optimizer, ranks, dtype=spec.dtype, device=device, probe_length=spec.probe_length
        )
        if spec.stabilizer:
            self._stabilizer = spec.stabilizer.start(self._backend.shards())

    @property
    def backend(self) -> TrainBackend:
        assert self._backend is not None, "setup comes first"
        return self._backend

    def train_step(self, plan: RankPlan, signals: Sequence[Signal], *columns: StepColumn) -> TrainStats:
        """One step on what was fetched for it, with this rank's column of each of `signals`."""
        start_s = time.monotonic()
        metrics = self.backend.train_step(
            plan,
            self.taken(signals, columns),
            self._spec.algorithm,
            temperature=self._spec.temperature,
            stabilizer=self._stabilizer,
        )
        return TrainStats(metrics, time.monotonic() - start_s)

    def publish(self, version: PolicyVersion) -> Published | None:
        """Copy the weights for the relays, from rank 0; the others take part in gathering them.

        Raises what kept the version before from the relays, see `ObjectStorePublisher`.
        """
        import torch

        start_s = time.monotonic()
        into: Mapping[str, torch.Tensor] = {}
        if self._rank == 0:
            specs = self.backend.specs(getattr(torch, self._spec.dtype))
            into = self._publisher.begin(specs, pin=self._spec.resources.device().type == "cuda")
        self.backend.copy_weights(into)
        probe = self.backend.probe()
        return self._publisher.publish(version, probe, start_s) if self._rank == 0 else None

    def announce_again(self, version: PolicyVersion) -> None:
        """Rank 0: see `Actor.announce_again`."""
        self._publisher.announce_again(version)

    def save(self, folder: Path) -> None:
        """Raises `CheckpointError`."""
        self.backend.save(folder, self._stabilizer)
        flushed(folder)

    def load(self, folder: Path) -> int:
        """Steps that the stabilizer must still see without staleness: see `Actor.load`. Raises `CheckpointError`."""
        self.backend.load(folder, self._stabilizer)
        return self._stabilizer.synchronous_steps_left if self._stabilizer else 0

    def export(self, folder: Path) -> None:
        """Hugging Face safetensors with config and tokenizer."""
        self.backend.export(folder)

    def record(
        self,
        path: Path,
        step: int,
        tasks: Sequence[Task],
        groups: Sequence[Group],
        assigned: Sequence[Sequence[Assigned]],
        parcel: Parcel,
    ) -> None:
        """Write what a step trained, for people to read.

        Raises `CheckpointError` if the disk will not have it, `PayloadLost` if the payloads are gone.
        """
        rows = zip(tasks, groups, parcel.open(), assigned, strict=True)
        with disk(path):
            write_rollouts(path, (RolloutRecord.of(step, t, g, p, a) for t, g, p, a in rows))

    def save_groups(self, path: Path, groups: Sequence[Group], parcel: Parcel) -> None:
        """Write groups with their payloads.

        Raises `CheckpointError` if the disk will not have them, `PayloadLost` if they are gone.
        """
        payloads = parcel.open()
        with disk(path):
            write_groups(path, map(GroupRecord, groups, payloads))

    @ray.method(num_returns=2)
    def load_groups(self, path: Path) -> tuple[list[Group], tuple[Payload, ...]]:
        """The groups of a file without payloads, and the payloads."""
        records = read_groups(path)
        return [record.group for record in records], tuple(record.episodes for record in records)
