"""One rank of the actor or of the critic: it fetches the data of a step and trains on its share."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlsys.algorithm import Algorithm, Column
from rlsys.batch.packing import RankPlan
from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import MemorySavings, SyncSection
from rlsys.contracts import Files, MarkerReply, Published, TrainStats
from rlsys.errors import CheckpointError, PayloadLost
from rlsys.loop.checkpoint_files import content_problem
from rlsys.loop.shared_place import answer_marker
from rlsys.replay.rollout_json import GroupRecord, read_groups, write_groups
from rlsys.stabilizer import Stabilizer, StabilizerPlugin
from rlsys.types import Distribution, Episode, Group, PolicyVersion
from rlsys.util.any_paths import AnyPath, RemotePath
from rlsys.util.deadlines import remote
from rlsys.util.files import flush
from rlsys.util.hashed_files import SavedFile
from rlsys.weight_sync.manifest import Rectangle
from workers.ray.call_stream import Parcel
from workers.ray.cluster import Resources
from workers.transport.publisher import WeightPublisher
from workers.transport.route import Route

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn, StepData
    from workers.train.optimizer import OptimizerSettings
    from workers.train.sharded import Sharded
    from workers.train.state_files import Writing
    from workers.train.token_columns import TokenColumns


Payload: TypeAlias = tuple[Episode, ...]


@dataclass(frozen=True, slots=True)
class StepParcel:
    """Data of a step for some ranks, on its way to an actor."""

    parcel: Parcel
    keys: tuple[tuple[int, Column | None], ...]
    """For each payload, the index of its group in the step, and the column if it is not the episodes."""

    @classmethod
    def of(
        cls, groups: Sequence[Group], plans: Sequence[RankPlan], columns: Collection[str], *, has_pairs: bool
    ) -> StepParcel:
        """Data for these ranks, with these `columns`. If the ranks make mismatched pairs, also partners:
        groups that supply only a prompt."""
        trained = sorted({sample.group for plan in plans for m in plan.micro_batches for sample in m.samples})
        found = {plans[0].partners[index] for index in trained} if has_pairs else set()
        partners = sorted(index for index in found - {*trained} if index is not None)
        keys = [
            *((i, None) for i in (*trained, *partners)),
            *((i, Column(name)) for name in sorted(columns) for i in trained),
        ]
        payloads = ((groups[i].group_id, groups[i].columns[s] if s else groups[i].payload) for i, s in keys)
        return cls(Parcel.of(payloads), tuple(keys))

    def open(self) -> StepData:
        """Open the data. Raises `PayloadLost` naming all groups with lost data."""
        from rlsys.batch.tensors import StepData

        payloads: dict[int, Payload] = {}
        columns: dict[int, dict[Column, Any]] = {}
        for (index, kind), opened in zip(self.keys, self.parcel.open(), strict=True):
            if kind is None:
                payloads[index], columns[index] = opened, {}
            else:
                columns[index][kind] = opened
        return StepData(payloads, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The specification of a rank of the actor or of the critic."""

    model_path: str
    dtype: Literal["float32", "bfloat16"]
    mesh: MeshSection
    optimizer: OptimizerSettings
    savings: MemorySavings
    lora: LoraSection | None
    """The adapter to train; None: all weights."""
    algorithm: Algorithm
    resources: Resources


class Rank:
    """One process of several that train a model together."""

    _spec: Any
    """The `RankSpec` of its kind."""
    _backend: Sharded
    _stabilizer: Stabilizer | None = None
    _fetched: StepData | None = None
    _writing: Writing | None = None

    @property
    def progress(self) -> int:
        """A count that grows with each micro-batch; see `Remote.watch_process`."""
        return self._backend.num_passes

    @remote("fetching the data of a step")
    def fetch(self, parcel: StepParcel) -> tuple[int, ...]:
        """Fetch the data of the next step. Returns the ids of groups with lost data."""
        try:
            self._fetched = parcel.open()
        except PayloadLost as loss:
            return loss.group_ids
        return ()

    @remote("training a step", patience=inf)
    def train_step(self, plan: RankPlan, kinds: Sequence[Column], *columns: StepColumn) -> TrainStats:
        """Train one step on the fetched data; `columns` are this rank's data of `kinds`."""
        start_s = time.monotonic()
        metrics = self._train(plan, self.take_data(kinds, columns))
        return TrainStats(metrics, time.monotonic() - start_s)

    def _train(self, plan: RankPlan, data: StepData) -> dict[str, float]:
        raise NotImplementedError

    @remote("copying its state for a checkpoint")
    def save(self, folder: AnyPath) -> None:
        """Begin to copy the state, then to write it. The next step waits with its changes until it is copied."""
        self._writing = self._backend.save(folder, self._stabilizer)

    @remote("writing a checkpoint")
    def finish_save(self) -> Files:
        """Return this rank's files once they are written and flushed; another thread may train.

        Raises `CheckpointError`.
        """
        assert self._writing is not None, "save comes first"
        writing, self._writing = self._writing, None
        files, folder = writing.wait(), writing.folder
        if not isinstance(folder, RemotePath):
            with _disk(folder):
                flush(folder, map(folder.joinpath, files))
        return files

    @remote("reading the driver's marker")
    def answer_marker(self, folder: AnyPath, worker: str) -> MarkerReply:
        """Read the driver's marker, and write one under the name of this worker. Not collective."""
        return answer_marker(folder, worker)

    @remote("checking a checkpoint")
    def find_damage(self, checkpoint: AnyPath, files: Files) -> str | None:
        """Read these files; return the first difference from what was saved. Not collective."""
        return content_problem(checkpoint, files)

    @remote("loading a checkpoint")
    def load(self, folder: AnyPath) -> int:
        """Load a checkpoint; returns the synchronous steps still due, see `Actor.load`. Raises `CheckpointError`."""
        self._backend.load(folder, self._stabilizer)
        return self._stabilizer.synchronous_steps_left if self._stabilizer else 0

    @remote("giving its device away")
    def sleep(self) -> None:
        """Free what only a step needs; move the rest to the host, if others use its GPU. Not collective."""
        self._backend.move_out(self._stabilizer, moves_state=self._spec.resources.num_gpus > 0)

    @remote("taking its device back")
    def wake(self) -> None:
        """Undo `sleep`. Not collective."""
        self._backend.move_in()

    @property
    def fetched_data(self) -> StepData:
        """The data of the current step."""
        assert self._fetched is not None, "fetch comes first"
        return self._fetched

    def take_data(self, kinds: Sequence[Column], columns: Sequence[StepColumn]) -> StepData:
        """Return the data with the columns of the step, and drop it from this rank."""
        data, self._fetched = self.fetched_data, None
        return data.with_columns(dict(zip(kinds, columns, strict=True)))


@contextmanager
def _disk(path: AnyPath) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec(RankSpec):
    """The specification of a rank of the actor."""

    stabilizer: StabilizerPlugin | None
    distribution: Distribution
    probe_length: int
    """Tokens of the probe that is published with the weights."""
    replays_routing: bool
    """Value of `train.routing_replay`."""
    sync: SyncSection | None
    """Value of `reference.sync`."""


class ActorRank(Rank):
    """Rank `rank` of `spec.mesh`, each in its own process."""

    def __init__(self, rank: int, spec: ActorSpec, route: Route, address: str) -> None:
        """Join the other ranks at `address` and load the model. Raises `ModelError`, or `ConfigError` for an algorithm
        whose loss contradicts its `skips_zero_advantages`."""
        from workers.train.fsdp import FsdpBackend
        from workers.train.rank_group import RankGroup
        from workers.train.step_data import check_skipped

        check_skipped(spec.algorithm)
        self._rank, self._spec, self._publisher = rank, spec, WeightPublisher(route)
        device = spec.resources.claim()
        ranks = RankGroup(rank, spec.mesh.num_ranks, address=address).with_mesh(spec.mesh)
        self._backend = self._policy = FsdpBackend(
            spec.model_path, spec.optimizer, ranks, dtype=spec.dtype, device=device, probe_length=spec.probe_length,
            savings=spec.savings, lora=spec.lora, replays_routing=spec.replays_routing, sync=spec.sync,
        )  # fmt: skip
        self._policy.wait_published = self._publisher.wait_copied
        if spec.stabilizer:
            self._stabilizer = spec.stabilizer.start(self._policy.shards())

    def _train(self, plan: RankPlan, data: StepData) -> dict[str, float]:
        spec = self._spec
        return self._policy.train_step(
            plan, data, spec.algorithm, distribution=spec.distribution, stabilizer=self._stabilizer
        )

    @remote("scoring a step with the reference", patience=inf)
    def reference(self, plan: RankPlan, kind: Column) -> tuple[int, StepColumn]:
        """A receipt, and the column `kind` of the fetched step: see `FsdpBackend.reference`."""
        column = self._policy.reference(plan, self.fetched_data, kind, self._spec.distribution)
        return len(column), column

    @remote("measuring the cost of attention")
    def pair_cost(self) -> float:
        """See `Actor.pair_cost`."""
        return self._policy.pair_cost

    @remote("publishing version {version}")
    def publish(self, version: PolicyVersion) -> Published:
        """Begin to publish this rank's part of the weights. They are copied beside the next step, whose first update
        waits for the end of that.

        Raises the error of the previous publish, if it failed; see `WeightPublisher`.
        """
        start_s = time.monotonic()
        policy, spec, waited_s = self._policy, self._spec, self._publisher.take_waited_s()
        num_bytes = self._publisher.publish(
            version,
            policy.owned_tensors(),
            self._rectangles,
            rank=self._rank,
            num_ranks=spec.mesh.num_ranks,
            probe=policy.probe(),
            base=policy.base,
            pin=policy.is_on_gpu,
        )
        return Published(version, num_bytes, time.monotonic() - start_s + waited_s)

    @cached_property
    def _rectangles(self) -> list[Rectangle]:
        return self._policy.published_rectangles()

    @remote("announcing version {version} again")
    def announce_again(self, version: PolicyVersion) -> None:
        """Announce this rank's part again: see `Actor.announce_again`."""
        self._publisher.announce_again(version)

    @remote("exporting the model")
    def export(self, folder: Path) -> None:
        """Write Hugging Face safetensors with config and tokenizer."""
        self._policy.export(folder)

    @remote("reporting token records")
    def columns(self) -> tuple[int, list[TokenColumns]]:
        """A receipt, and the per-token results of this rank's last step."""
        columns = self._policy.columns()
        return len(columns), columns

    @remote("writing {path.name}")
    def save_groups(self, path: AnyPath, groups: Sequence[Group], parcel: Parcel) -> SavedFile:
        """Write groups with their payloads; return the size and hash of the file.

        Raises `CheckpointError` if the file cannot be written, `PayloadLost` if payloads are lost.
        """
        payloads = parcel.open()
        with _disk(path):
            return write_groups(path, map(GroupRecord, groups, payloads))

    @remote("reading {path.name}")
    def load_groups(self, path: AnyPath) -> tuple[list[Group], tuple[Payload, ...]]:
        """The groups of a file without payloads, and the payloads."""
        records = read_groups(path)
        return [record.group for record in records], tuple(record.episodes for record in records)


class CriticRank(Rank):
    """Rank `rank` of `spec.mesh`, each in its own process."""

    def __init__(self, rank: int, spec: RankSpec, policy_path: str, address: str) -> None:
        """Join the other ranks at `address` and load the model; the policy's model defines the token ids.

        Raises `ModelError`.
        """
        from workers.train.rank_group import RankGroup
        from workers.train.value_model import CriticBackend, check_vocabulary

        self._spec = spec
        if spec.model_path != policy_path:
            check_vocabulary(spec.model_path, policy_path)
        device = spec.resources.claim()
        ranks = RankGroup(rank, spec.mesh.num_ranks, address=address).with_mesh(spec.mesh)
        self._backend = self._critic = CriticBackend(
            spec.model_path, spec.optimizer, ranks, dtype=spec.dtype, device=device,
            savings=spec.savings, lora=spec.lora,
        )  # fmt: skip

    @remote("computing the values of a step", patience=inf)
    def values(self, plan: RankPlan) -> tuple[int, StepColumn]:
        """A receipt, and the values of the fetched step."""
        column = self._critic.values(plan, self.fetched_data)
        return len(column), column

    def _train(self, plan: RankPlan, data: StepData) -> dict[str, float]:
        return self._critic.train_step(plan, data, self._spec.algorithm)
