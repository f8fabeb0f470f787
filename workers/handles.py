"""The driver's view of the actor's ranks and of the reference worker: implements `rlsys.contracts`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import ray

from rlsys.algorithm import Assigned, Signal
from rlsys.batch.plan import BatchPlan
from rlsys.contracts import Published, TrainStats
from rlsys.errors import PayloadLost
from rlsys.types import Group, PolicyVersion, Task
from workers.cluster import RayActor, call
from workers.pools import SET_UP_S
from workers.streams import Parcel, PayloadRef

T = TypeVar("T")


class ReferenceHandle:
    """Implements `Reference` for `Signal.REFERENCE_LOGPROBS`."""

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


class ActorHandle:
    """All ranks of the actor: implements `Actor`."""

    def __init__(self, ranks: Sequence[RayActor], deadline_s: float) -> None:
        """`deadline_s` bounds one step, save or load."""
        self._ranks, self._deadline_s = ranks, deadline_s

    async def ready(self) -> None:
        address = ""
        if len(self._ranks) > 1:
            address = await call(self._ranks[0].address.remote(), "actor-0", "choosing a port", SET_UP_S)
        await self._all("setting up", lambda rank, _: rank.setup.remote(address), SET_UP_S)

    async def close(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            ray.kill(rank)

    async def train_step(self, groups: Sequence[Group], plan: BatchPlan) -> TrainStats:
        """In two phases, so that no rank waits in a collective for one whose data is lost: all fetch, then all train.

        Raises `PayloadLost`, with nothing stepped.
        """
        needed = [sorted({ref.group for micro_batch in ranks for ref in micro_batch.samples}) for ranks in plan.ranks]
        signals = sorted(groups[0].columns)

        def fetch(rank: RayActor, r: int) -> Awaitable[tuple[int, ...]]:
            mine = [groups[i] for i in needed[r]]
            columns = [(g.serial, g.columns[signal]) for signal in signals for g in mine]
            return rank.fetch.remote(Parcel.of([*((g.serial, g.payload) for g in mine), *columns]))

        def train(rank: RayActor, r: int) -> Awaitable[TrainStats]:
            return rank.train_step.remote(plan.ranks[r], plan.denominators, needed[r], signals)

        lost = await self._all("fetching the data of a step", fetch)
        if serials := sorted({serial for of_rank in lost for serial in of_rank}):
            raise PayloadLost(tuple(serials))
        stats = await self._all("training a step", train)
        return TrainStats(stats[0].metrics, max(s.train_s for s in stats))

    async def publish(self, version: PolicyVersion) -> Published:
        receipts = await self._all(f"publishing version {version}", lambda rank, _: rank.publish.remote(version))
        return receipts[0]

    async def announce_again(self, version: PolicyVersion) -> None:
        ref = self._ranks[0].announce_again.remote(version)
        await call(ref, "actor-0", f"announcing version {version} again", self._deadline_s)

    async def save(self, folder: Path) -> None:
        await self._all("saving a checkpoint", lambda rank, _: rank.save.remote(folder))

    async def load(self, folder: Path) -> None:
        await self._all("loading a checkpoint", lambda rank, _: rank.load.remote(folder))

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
        ref = self._ranks[0].record.remote(path, step, tasks, _bare(groups), assigned, _payloads(groups))
        await call(ref, "actor-0", f"writing {path.name}", self._deadline_s)

    async def save_groups(self, path: Path, groups: Sequence[Group]) -> None:
        ref = self._ranks[0].save_groups.remote(path, _bare(groups), _payloads(groups))
        await call(ref, "actor-0", f"writing {path.name}", self._deadline_s)

    async def load_groups(self, path: Path) -> list[Group]:
        metadata, chunk = self._ranks[0].load_groups.remote(path)
        bare = await call(metadata, "actor-0", f"reading {path.name}", self._deadline_s)
        return [replace(group, payload=PayloadRef(chunk, i)) for i, group in enumerate(bare)]

    async def _all(
        self, phase: str, start: Callable[[RayActor, int], Awaitable[T]], deadline_s: float | None = None
    ) -> list[T]:
        """The same call on every rank. If one fails, so does the call, at once, with that rank's error."""
        deadline_s = deadline_s or self._deadline_s
        calls = [call(start(rank, r), f"actor-{r}", phase, deadline_s) for r, rank in enumerate(self._ranks)]
        return list(await asyncio.gather(*calls))


def _payloads(groups: Sequence[Group]) -> Parcel:
    return Parcel.of((g.serial, g.payload) for g in groups)


def _bare(groups: Sequence[Group]) -> list[Group]:
    """Metadata only: the payloads travel as arguments of their own."""
    return [replace(group, payload=None, columns={}) for group in groups]
