"""The driver's view of the ranks of actor and critic, and of the reference worker: implements `rlsys.contracts`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import ray

from rlsys.algorithm import Assigned, Signal
from rlsys.batch.plan import BatchPlan, RankPlan
from rlsys.contracts import Published, TrainStats
from rlsys.errors import PayloadLost
from rlsys.types import Group, PolicyVersion, Ref, Task
from workers.actor import Trained
from workers.cluster import RayActor, call
from workers.pools import SET_UP_S
from workers.rank import StepParcel
from workers.streams import Parcel, PayloadRef

T = TypeVar("T")


class ReferenceHandle:
    """Implements `Reference` for `Signal.REFERENCE_LOGPROBS`, `StepAnnotator` for `Signal.REFERENCE_MISMATCHED`."""

    def __init__(self, actor: RayActor, deadline_s: float) -> None:
        """`deadline_s` bounds the scoring of one step's groups."""
        self._actor, self._deadline_s = actor, deadline_s

    async def ready(self) -> None:
        await call(self._actor.setup.remote(), "reference", "setting up", SET_UP_S)

    async def close(self) -> None:
        """End the worker."""
        ray.kill(self._actor)

    async def annotate(self, groups: Sequence[Group], signal: Signal) -> list[Group]:
        receipt, column = self._actor.annotate.remote(_payloads(groups))
        await call(receipt, "reference", f"scoring {len(groups)} groups", self._deadline_s)
        return [replace(g, columns={**g.columns, signal: PayloadRef(column, i)}) for i, g in enumerate(groups)]

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, signal: Signal) -> list[Ref]:
        plans = _of_ranks(plan)
        parcel = StepParcel.of(groups, plans, (), has_pairs=True)
        annotate = self._actor.annotate_step.options(num_returns=1 + len(plans))
        receipt, *columns = annotate.remote(parcel, plans)
        await call(receipt, "reference", f"scoring mismatched pairs of {len(groups)} groups", self._deadline_s)
        return columns


class RanksHandle:
    """All ranks of the actor, or of the critic."""

    kind: ClassVar[str]

    def __init__(self, ranks: Sequence[RayActor], deadline_s: float, *, has_pairs: bool = False) -> None:
        """`deadline_s` bounds one step, save or load. `has_pairs`: do ranks make mismatched pairs themselves?"""
        self._ranks, self._deadline_s, self._has_pairs = ranks, deadline_s, has_pairs

    async def ready(self) -> None:
        address = ""
        if len(self._ranks) > 1:
            address = await self._first(self._ranks[0].address.remote(), "choosing a port", SET_UP_S)
        await self._all("setting up", lambda rank, _: rank.setup.remote(address), SET_UP_S)

    async def close(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            ray.kill(rank)

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        """Apart from the step, so that no rank waits in a collective for one whose data is lost."""
        signals = groups[0].columns

        def fetch(rank: RayActor, r: int) -> Awaitable[tuple[int, ...]]:
            return rank.fetch.remote(StepParcel.of(groups, [plan.of_rank(r)], signals, has_pairs=self._has_pairs))

        lost = await self._all("fetching the data of a step", fetch)
        if serials := sorted({serial for of_rank in lost for serial in of_rank}):
            raise PayloadLost(tuple(serials))

    async def train_step(self, plan: BatchPlan, columns: Mapping[Signal, Sequence[Ref]]) -> TrainStats:
        signals = sorted(columns)

        def train(rank: RayActor, r: int) -> Awaitable[TrainStats]:
            return rank.train_step.remote(plan.of_rank(r), signals, *(columns[signal][r] for signal in signals))

        stats = await self._all("training a step", train)
        return TrainStats(stats[0].metrics, max(s.train_s for s in stats))

    async def save(self, folder: Path) -> None:
        await self._all("saving a checkpoint", lambda rank, _: rank.save.remote(folder))

    async def _first(self, ref: Awaitable[T], phase: str, deadline_s: float | None = None) -> T:
        """What rank 0 alone was asked for."""
        return await call(ref, f"{self.kind}-0", phase, deadline_s or self._deadline_s)

    async def _all(
        self, phase: str, start: Callable[[RayActor, int], Awaitable[T]], deadline_s: float | None = None
    ) -> list[T]:
        """The same call on every rank. If one fails, so does the call, at once, with that rank's error."""
        deadline_s = deadline_s or self._deadline_s
        calls = [call(start(rank, r), f"{self.kind}-{r}", phase, deadline_s) for r, rank in enumerate(self._ranks)]
        return list(await asyncio.gather(*calls))


class ActorHandle(RanksHandle):
    """Implements `Actor`."""

    kind = "actor"

    async def publish(self, version: PolicyVersion) -> Published:
        receipts = await self._all(f"publishing version {version}", lambda rank, _: rank.publish.remote(version))
        return receipts[0]

    async def load(self, folder: Path) -> int:
        left = await self._all("loading a checkpoint", lambda rank, _: rank.load.remote(folder))
        return left[0]

    async def announce_again(self, version: PolicyVersion) -> None:
        await self._first(self._ranks[0].announce_again.remote(version), f"announcing version {version} again")

    async def export(self, folder: Path) -> None:
        """Write the model as Hugging Face safetensors."""
        await self._all("exporting the model", lambda rank, _: rank.export.remote(folder))

    async def record(
        self,
        path: Path,
        step: int,
        tasks: Sequence[Task],
        groups: Sequence[Group],
        assigned: Sequence[Sequence[Assigned]],
    ) -> None:
        signals = tuple(sorted(map(str, groups[0].columns)))  # JSON takes no `Signal` for a key
        trained = Trained(step, tasks, _bare(groups), assigned, signals)
        columns: list[Ref] = []

        def start(rank: RayActor, r: int) -> Awaitable[int]:
            receipt, column = rank.columns.remote()
            columns.append(column)
            return receipt

        await self._all("telling what it made of tokens", start)
        ref = self._ranks[0].record.remote(path, trained, _with_columns(groups, signals), *columns)
        await self._first(ref, f"writing {path.name}")

    async def save_groups(self, path: Path, groups: Sequence[Group]) -> None:
        ref = self._ranks[0].save_groups.remote(path, _bare(groups), _payloads(groups))
        await self._first(ref, f"writing {path.name}")

    async def load_groups(self, path: Path) -> list[Group]:
        metadata, chunk = self._ranks[0].load_groups.remote(path)
        bare = await self._first(metadata, f"reading {path.name}")
        return [replace(group, payload=PayloadRef(chunk, i)) for i, group in enumerate(bare)]


class CriticHandle(RanksHandle):
    """Implements `Critic`."""

    kind = "critic"

    async def load(self, folder: Path) -> None:
        await self._all("loading a checkpoint", lambda rank, _: rank.load.remote(folder))

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, signal: Signal) -> list[Ref]:
        """`Signal.VALUES` of what `fetch` got."""
        columns: list[Ref] = []

        def start(rank: RayActor, r: int) -> Awaitable[int]:
            receipt, column = rank.values.remote(plan.of_rank(r))
            columns.append(column)
            return receipt

        await self._all("valuing a step", start)
        return columns


def _of_ranks(plan: BatchPlan) -> list[RankPlan]:
    return [plan.of_rank(rank) for rank in range(len(plan.updates[0].ranks))]


def _payloads(groups: Sequence[Group]) -> Parcel:
    return Parcel.of((g.serial, g.payload) for g in groups)


def _with_columns(groups: Sequence[Group], signals: Sequence[str]) -> Parcel:
    """Payloads, then the columns of each signal."""
    columns = ((g.serial, g.columns[signal]) for signal in signals for g in groups)
    return Parcel.of([*((g.serial, g.payload) for g in groups), *columns])


def _bare(groups: Sequence[Group]) -> list[Group]:
    """Metadata only: the payloads travel as arguments of their own."""
    return [replace(group, payload=None, columns={}) for group in groups]
