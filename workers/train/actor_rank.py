"""One rank of the actor: trains its share of a step, publishes, saves, and writes groups to disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlsys.algorithm import Signal, TrajectoryAdvantage
from rlsys.batch.packing import RankPlan
from rlsys.contracts import Published, TrainStats
from rlsys.replay.rollout_log import GroupRecord, RolloutRecord, read_groups, write_groups, write_rollouts
from rlsys.stabilizer import Stabilizer, StabilizerPlugin
from rlsys.types import Episode, Group, PolicyVersion, Task
from rlsys.util.deadlines import remote
from workers.ray.batched_calls import Parcel
from workers.text.tokenizer import TextTokenizer
from workers.train.rank import Rank, RankSpec, disk, flushed

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from workers.train.backend import TrainBackend
    from workers.train.token_columns import Reader, Speller, TokenColumns
    from workers.transport.object_store import ObjectStorePublisher

Payload: TypeAlias = tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """The driver's record of the groups that a step trained."""

    step: int
    """Number of the step, counted from 1."""
    tasks: Sequence[Task]
    groups: Sequence[Group]
    assigned: Sequence[Sequence[TrajectoryAdvantage]]
    signals: tuple[str, ...]
    """Column names of the groups; the columns come with the payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec(RankSpec):
    """The specification of a rank of the actor."""

    stabilizer: StabilizerPlugin | None
    temperature: float
    probe_length: int
    """Tokens of the probe that is published with the weights."""


class ActorRank(Rank):
    """Rank `rank` of `spec.num_ranks`, each in its own process."""

    def __init__(self, rank: int, spec: ActorSpec, publisher: ObjectStorePublisher, address: str) -> None:
        """Join the other ranks at `address` and load the model. Raises `ModelError`."""
        from workers.train.fsdp import FsdpBackend
        from workers.train.rank_group import RankGroup

        self._rank, self._spec, self._publisher = rank, spec, publisher
        device = spec.resources.claim()
        ranks = RankGroup(rank, spec.num_ranks, address=address)
        self._backend: TrainBackend = FsdpBackend(
            spec.model_path, spec.optimizer, ranks, dtype=spec.dtype, device=device, probe_length=spec.probe_length
        )
        self._stabilizer: Stabilizer | None = None
        if spec.stabilizer:
            self._stabilizer = spec.stabilizer.start(self._backend.shards())

    @cached_property
    def _speller(self) -> Speller:
        from workers.train.token_columns import Speller

        return Speller(TextTokenizer.load(self._spec.model_path).spell)

    def train_step(self, plan: RankPlan, signals: Sequence[Signal], *columns: StepColumn) -> TrainStats:
        start_s = time.monotonic()
        metrics = self._backend.train_step(
            plan,
            self.taken(signals, columns),
            self._spec.algorithm,
            temperature=self._spec.temperature,
            stabilizer=self._stabilizer,
        )
        return TrainStats(metrics, time.monotonic() - start_s)

    @remote("publishing version {version}")
    def publish(self, version: PolicyVersion) -> Published | None:
        """Copy the weights for the relays, from rank 0; the other ranks take part in gathering them.

        Raises the error of the previous publish, if it failed; see `ObjectStorePublisher`.
        """
        import torch

        start_s = time.monotonic()
        into: Mapping[str, torch.Tensor] = {}
        if self._rank == 0:
            specs = self._backend.specs(getattr(torch, self._spec.dtype))
            into = self._publisher.begin(specs, pin=self._spec.resources.num_gpus > 0)
        self._backend.copy_weights(into)
        probe = self._backend.probe()
        return self._publisher.publish(version, probe, start_s) if self._rank == 0 else None

    @remote("announcing version {version} again")
    def announce_again(self, version: PolicyVersion) -> None:
        """Announce the version again, on rank 0: see `Actor.announce_again`."""
        self._publisher.announce_again(version)

    def save(self, folder: Path) -> None:
        self._backend.save(folder, self._stabilizer)
        flushed(folder)

    @remote("loading a checkpoint")
    def load(self, folder: Path) -> int:
        """Load a checkpoint; returns the synchronous steps still due, see `Actor.load`. Raises `CheckpointError`."""
        self._backend.load(folder, self._stabilizer)
        return self._stabilizer.synchronous_steps_left if self._stabilizer else 0

    @remote("exporting the model")
    def export(self, folder: Path) -> None:
        """Write Hugging Face safetensors with config and tokenizer."""
        self._backend.export(folder)

    @remote("telling what it made of tokens")
    def columns(self) -> tuple[int, list[TokenColumns]]:
        """A receipt, and the per-token results of this rank's last step."""
        columns = self._backend.columns()
        return len(columns), columns

    @remote("writing {path.name}")
    def record(self, path: Path, trained: Trained, parcel: Parcel, *columns: list[TokenColumns]) -> None:
        """Write the groups of the last step. `parcel` has the payloads, then the columns of each signal; `columns` are
        those of all ranks.

        Raises `CheckpointError` if the file cannot be written, `PayloadLost` if payloads are lost.
        """
        from workers.train.token_columns import Reader

        opened = parcel.open()
        reader = Reader(chain(*columns), self._speller)
        with disk(path):
            write_rollouts(path, _records(trained, opened, reader))

    @remote("writing {path.name}")
    def save_groups(self, path: Path, groups: Sequence[Group], parcel: Parcel) -> None:
        """Write groups with their payloads.

        Raises `CheckpointError` if the file cannot be written, `PayloadLost` if payloads are lost.
        """
        payloads = parcel.open()
        with disk(path):
            write_groups(path, map(GroupRecord, groups, payloads))

    @remote("reading {path.name}")
    def load_groups(self, path: Path) -> tuple[list[Group], tuple[Payload, ...]]:
        """The groups of a file without payloads, and the payloads."""
        records = read_groups(path)
        return [record.group for record in records], tuple(record.episodes for record in records)


def _records(trained: Trained, opened: Sequence[Any], reader: Reader) -> Iterator[RolloutRecord]:
    size = len(trained.groups)
    rows = {signal: opened[size * k :] for k, signal in enumerate(trained.signals, 1)}
    for i, (task, group, assigned) in enumerate(zip(trained.tasks, trained.groups, trained.assigned, strict=True)):
        record = RolloutRecord.of(trained.step, task, group, opened[i], assigned)
        columns = {signal: tuple(map(tuple, of_signal[i])) for signal, of_signal in rows.items()}
        yield replace(record, columns=columns, readings=reader.read(i, record))
