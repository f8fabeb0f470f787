"""Common base of the ranks of actor and critic: they fetch the data of a step, and train on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlsys.algorithm import Algorithm, Signal
from rlsys.batch.packing import RankPlan
from rlsys.contracts import TrainStats
from rlsys.errors import CheckpointError, PayloadLost
from rlsys.types import Group
from rlsys.util.deadlines import remote
from rlsys.util.files import flush
from workers.ray.batched_calls import Parcel
from workers.ray.cluster import Resources

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn, StepData
    from workers.train.optimizer_settings import OptimizerSettings


@dataclass(frozen=True, slots=True)
class StepParcel:
    """Data of a step for some ranks, on its way to an actor."""

    parcel: Parcel
    """Payloads of `trained` and then of `partners`; after them, for each signal, the columns of `trained`."""
    trained: tuple[int, ...]
    """Groups by their index in the step."""
    partners: tuple[int, ...]
    """Further groups that supply only a prompt."""
    signals: tuple[Signal, ...]

    @classmethod
    def of(
        cls, groups: Sequence[Group], plans: Sequence[RankPlan], signals: Collection[str], *, has_pairs: bool
    ) -> StepParcel:
        """Data for these ranks, with the columns of `signals`, and with partners if the ranks make mismatched pairs."""
        samples = [s for plan in plans for update in plan.updates for m in update for s in m.samples]
        trained = sorted({sample.group for sample in samples})
        found = {plans[0].partners[index] for index in trained} if has_pairs else set()
        partners = sorted(index for index in found - {*trained} if index is not None)
        names = tuple(map(Signal, sorted(signals)))
        payloads = [(groups[i].group_id, groups[i].payload) for i in (*trained, *partners)]
        columns = [(groups[i].group_id, groups[i].columns[signal]) for signal in names for i in trained]
        return cls(Parcel.of([*payloads, *columns]), tuple(trained), tuple(partners), names)

    def open(self) -> StepData:
        """Open the data. Raises `PayloadLost` naming all groups with lost data."""
        from rlsys.batch.tensors import StepData

        opened = self.parcel.open()
        indices, size = (*self.trained, *self.partners), len(self.trained)
        payloads = dict(zip(indices, opened, strict=False))
        rows = [opened[i : i + size] for i in range(len(indices), len(opened), size)]
        columns = {
            index: {signal: row[position] for signal, row in zip(self.signals, rows, strict=True)}
            for position, index in enumerate(self.trained)
        }
        everything = range(max(indices) + 1)
        return StepData([payloads.get(i, ()) for i in everything], [columns.get(i, {}) for i in everything])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The specification of a rank of the actor or of the critic."""

    model_path: str
    dtype: Literal["float32", "bfloat16"]
    num_ranks: int
    optimizer: OptimizerSettings
    algorithm: Algorithm
    resources: Resources


class Rank:
    """One process of several that train a model together."""

    _fetched: StepData | None = None

    @remote("fetching the data of a step")
    def fetch(self, parcel: StepParcel) -> tuple[int, ...]:
        """Fetch the data of the next step. Returns the ids of groups with lost data."""
        try:
            self._fetched = parcel.open()
        except PayloadLost as loss:
            return loss.group_ids
        return ()

    @remote("training a step")
    def train_step(self, plan: RankPlan, signals: Sequence[Signal], *columns: StepColumn) -> TrainStats:
        """Train one step on the fetched data; `columns` are this rank's columns of `signals`."""
        raise NotImplementedError

    @remote("saving a checkpoint")
    def save(self, folder: Path) -> None:
        """Save a checkpoint. Raises `CheckpointError`."""
        raise NotImplementedError

    @property
    def fetched(self) -> StepData:
        """The data of the current step."""
        assert self._fetched is not None, "fetch comes first"
        return self._fetched

    def taken(self, signals: Sequence[Signal], columns: Sequence[StepColumn]) -> StepData:
        """Return the data with the columns of the step, and drop it from this rank."""
        data, self._fetched = self.fetched, None
        return data.with_columns(dict(zip(signals, columns, strict=True)))


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def flushed(folder: Path) -> None:
    """Flush every file of a folder to disk. Raises `CheckpointError`."""
    with disk(folder):
        flush(folder, folder.iterdir())
