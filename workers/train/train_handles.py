"""The driver's view of the ranks of actor and critic, and of the reference worker: implements `rlsys.contracts`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan
from rlsys.contracts import Files, MarkerReply, Published, Saving, TrainedGroup, TrainStats
from rlsys.errors import CollectiveFailed, DeadlineExceeded, PayloadLost, RlsysError, WorkerDied, WorkerError
from rlsys.types import Group, PolicyVersion, Ref
from rlsys.util.any_paths import AnyPath
from rlsys.util.deadlines import timeout, unless
from rlsys.util.event_loops import all_or_none
from rlsys.util.hashed_files import SavedFile
from workers.ray.call_stream import Parcel, PayloadRef
from workers.ray.worker_process import Remote, cause_of
from workers.train.ranks import ActorRank, CriticRank, Rank, StepParcel
from workers.train.recorder import Recorder
from workers.train.reference_worker import ReferenceWorker

P = ParamSpec("P")
R = TypeVar("R", bound=Rank)
T = TypeVar("T")
LOOK_S = 2.0
"""Longest look at all ranks before the error of one is raised. A death may be known .3 s after the errors of peers."""


class ReferenceHandle:
    """Implements `Reference` for `Column.REFERENCE_LOGPROBS`, and `StepAnnotator`."""

    def __init__(
        self, start: Callable[[int], Remote[ReferenceWorker]], silence_s: float, *, is_shared: bool = False
    ) -> None:
        """`start(n)` gives a process to the successor of `n` others; one without a heartbeat for `silence_s` has
        failed. With `is_shared`, its device may belong to others when it is replaced."""
        self._start, self._silence_s, self._is_shared = start, silence_s, is_shared
        self._num_before, self._worker = 0, start(0)
        self._is_set_up = False
        self.on_unplaced: Callable[[WorkerError], None] = lambda lack: None
        """Called again and again while the worker waits for a place that the cluster does not have."""
        self._replacing = asyncio.Lock()

    @property
    def processes(self) -> list[Remote[ReferenceWorker]]:
        return [self._worker]

    async def ready(self) -> None:
        await self._worker.setup(silence_s=self._silence_s, on_unplaced=self.on_unplaced)
        self._is_set_up = True

    async def close(self) -> None:
        self._worker.kill()

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        async with self._replacing:
            if worker != self._worker.name:
                return
            began_s = time.monotonic()
            await self._worker.kill_with_stacks()
            self._num_before += 1
            self._worker, self._is_set_up = self._start(self._num_before), False
            if not self._is_shared:  # else its next call sets it up, which has the device
                await self.ready()
            on_recovery(worker, time.monotonic() - began_s)

    async def annotate(self, groups: Sequence[Group], column: Column) -> list[Group]:
        _, (chunk,) = await self._split(ReferenceWorker.annotate, 1, _payloads(groups))
        return [replace(g, columns={**g.columns, column: PayloadRef(chunk, i)}) for i, g in enumerate(groups)]

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        parcel = StepParcel.of(groups, plan, (), has_pairs=column.is_paired)
        _, columns = await self._split(ReferenceWorker.annotate_step, len(plan), parcel, plan, column)
        return [*columns]

    async def sleep(self) -> None:
        """See `Tenant.sleep`. A worker that fails is killed; then the next column has another started."""
        if not self._is_set_up:
            return
        try:
            await self._watch_call(self._worker.call(ReferenceWorker.sleep))
        except (WorkerDied, DeadlineExceeded):
            await self._worker.kill_with_stacks()

    async def wake(self) -> None:
        await self._ensure_set_up()
        await self._watch_call(self._worker.call(ReferenceWorker.wake))

    async def _ensure_set_up(self) -> None:
        if self._is_shared and not self._is_set_up:
            await self.ready()

    async def _split(self, method: Callable[..., Any], num_kept: int, *args: object) -> tuple[Any, list[Any]]:
        """See `Remote.split`; raises as soon as the process is dead or silent."""
        await self._ensure_set_up()
        return await self._watch_call(self._worker.split(method, num_kept, *args))

    async def _watch_call(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a call of the worker; raise as soon as the process is dead or silent."""
        return await unless(call, self._worker.watch_process(self._silence_s))


class RecorderHandle:
    """The rollout recorder of a policy. One that cannot start, dies or is silent is replaced at the next file."""

    def __init__(self, start: Callable[[int], Remote[Recorder]], silence_s: float) -> None:
        """`start(n)` gives a process to the successor of `n` others; one without a heartbeat for `silence_s` has
        failed."""
        self._start, self._silence_s, self._num_before = start, silence_s, 0
        self._worker: Remote[Recorder] | None = None
        self._writing = asyncio.Lock()

    async def ready(self) -> None:
        """Start the process, so that none starts in the middle of a run. A failure is told at the first file, which
        tries again."""
        if self._worker is None:
            with suppress(RlsysError):
                self._worker = await self._start_recorder()

    async def write(self, *args: Any) -> None:  # noqa: ANN401
        """Call `Recorder.write`, after those that came before."""
        async with self._writing:
            if self._worker is None:
                self._worker = await self._start_recorder()
            worker = self._worker
            try:
                await unless(worker.call(Recorder.write, *args), worker.watch_process(self._silence_s))
            except (WorkerDied, DeadlineExceeded):
                self.close()
                raise

    async def write_evaluated(self, path: Path, version: PolicyVersion, evaluated: Sequence[TrainedGroup]) -> None:
        """Write groups that no rank has trained."""
        groups = [own.group for own in evaluated]
        bare = [replace(own, group=group) for own, group in zip(evaluated, _bare(groups), strict=True)]
        await self.write(path, version, bare, (), _payloads(groups))

    async def _start_recorder(self) -> Remote[Recorder]:
        worker = self._start(self._num_before)
        try:
            await worker.setup(silence_s=self._silence_s)
        except (RlsysError, asyncio.CancelledError):
            worker.kill()
            self._num_before += 1
            raise
        return worker

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker, self._num_before = None, self._num_before + 1


class RanksHandle(Generic[R]):
    """All ranks of the actor, or of the critic."""

    def __init__(
        self,
        start: Callable[[int], Sequence[Remote[R]]],
        silence_s: float,
        num_peers: int = 1,
        *,
        has_pairs: bool = False,
    ) -> None:
        """`start(n)` gives processes to all ranks, after `n` others of each.

        A rank without a heartbeat for `silence_s` has failed. So many neighbours, `num_peers`, train the same batches.
        `has_pairs`: the ranks make mismatched pairs themselves.
        """
        self._start, self._silence_s, self._has_pairs = start, silence_s, has_pairs
        self._num_peers = num_peers
        self._num_before, self._ranks = 0, start(0)
        self.on_unplaced: Callable[[WorkerError], None] = lambda lack: None
        """Called again and again while a rank waits for a place that the cluster does not have."""

    @property
    def processes(self) -> Sequence[Remote[R]]:
        return self._ranks

    async def ready(self) -> None:
        address = await self._ranks[0].address() if len(self._ranks) > 1 else ""
        watched = {"silence_s": self._silence_s, "on_unplaced": self.on_unplaced}
        await self._gather(rank.setup(address, **watched) for rank in self._ranks)

    async def watch(self, on_progress: Callable[[], None]) -> None:
        await asyncio.gather(*(rank.watch_process(self._silence_s, on_progress) for rank in self._ranks))

    async def sleep(self) -> None:
        await self._all(Rank.sleep)

    async def wake(self) -> None:
        await self._all(Rank.wake)

    async def end(self) -> None:
        await asyncio.gather(*(rank.kill_with_stacks() for rank in self._ranks))

    async def restart(self) -> None:
        await self.end()
        self._num_before += 1
        self._ranks = self._start(self._num_before)
        await self.ready()

    async def close(self) -> None:
        for rank in self._ranks:
            rank.kill()

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        """Fetch the data before the step, so that no rank waits in a collective for a rank whose data is lost."""
        columns, has_pairs = groups[0].columns, self._has_pairs
        parcels = [StepParcel.of(groups, [of_rank], columns, has_pairs=has_pairs) for of_rank in plan]
        lost = await self._gather(r.call(Rank.fetch, parcels[batch]) for batch, r in self._by_batch())
        if group_ids := sorted({group_id for of_rank in lost for group_id in of_rank}):
            raise PayloadLost(tuple(group_ids))

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        kinds = sorted(columns)
        steps = [
            rank.call(Rank.train_step, plan[batch], kinds, *(cast("Any", columns[name][batch]) for name in kinds))
            for batch, rank in self._by_batch()
        ]
        stats = await self._gather(steps)
        return TrainStats(stats[0].metrics, max(s.train_s for s in stats))

    def save(self, folder: AnyPath) -> Saving[Files]:
        return SavedRanks(self, folder)

    async def answer_marker(self, folder: AnyPath) -> list[MarkerReply]:
        return await self._gather(rank.call(Rank.answer_marker, folder, rank.name) for rank in self._ranks)

    async def find_damage(self, checkpoint: AnyPath, files: Files) -> str | None:
        ranks, names = self._ranks, sorted(files)
        shares = [{name: files[name] for name in names[r :: len(ranks)]} for r in range(len(ranks))]
        calls = (rank.call(Rank.find_damage, checkpoint, share) for rank, share in zip(ranks, shares, strict=True))
        return next(filter(None, await self._gather(calls)), None)

    async def copy_state(self, folder: AnyPath) -> None:
        """Begin to save the state of every rank."""
        await self._all(Rank.save, folder)

    async def write_state(self) -> Files:
        """Return the files of all ranks once they are on disk."""
        of_ranks = await self._gather(rank.beside(Rank.finish_save) for rank in self._ranks)
        return {name: saved for files in of_ranks for name, saved in files.items()}

    def _by_batch(self) -> list[tuple[int, Remote[R]]]:
        """Return every rank with the number of its batches in the plan of a step."""
        return [(place // self._num_peers, rank) for place, rank in enumerate(self._ranks)]

    async def _column(self, method: Callable[..., Any], plan: BatchPlan, *args: object) -> list[Ref]:
        """Compute a column of the fetched data; peers take part, and have the same."""
        replies = await self._gather(rank.split(method, 1, plan[batch], *args) for batch, rank in self._by_batch())
        return [column for _, (column,) in replies[:: self._num_peers]]

    async def _all(self, method: Callable[Concatenate[R, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a method on every rank."""
        return await self._gather(rank.call(method, *args, **kwargs) for rank in self._ranks)

    async def _gather(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results of calls of several ranks. If one fails, all fail, without waiting for the other calls.

        Raises the death of a rank, if one is dead, in place of the error: its peers fail in their collectives, and may
        report that before the death is known. Raises `CollectiveFailed` if none is.
        """
        try:
            return await asyncio.gather(*calls)
        except RlsysError as error:
            if isinstance(error, WorkerDied):
                raise
            if death := await self._find_death():
                raise death from error
            if isinstance(error, WorkerError) and _is_of_collective(cause_of(error)):
                raise CollectiveFailed(error.worker, error.phase, f"no rank is dead; {error.detail}") from error
            raise

    async def _find_death(self) -> WorkerDied | None:
        """Return the death of the first dead rank; None if every rank answers a heartbeat, or is silent.

        Waits for the heartbeats; unblocked after `LOOK_S`.
        """

        async def look(rank: Remote[R]) -> WorkerDied | None:
            try:
                async with timeout(LOOK_S):
                    await rank.beat(self._silence_s)
            except WorkerDied as death:
                return death
            except (TimeoutError, DeadlineExceeded):  # `watch` decides when silence is a failure
                pass
            return None

        return next(filter(None, await asyncio.gather(*map(look, self._ranks))), None)


@dataclass(frozen=True)
class SavedRanks:
    """Implements `Saving`: the state of all ranks of a model."""

    ranks: RanksHandle[Any]
    folder: AnyPath

    async def take_copy(self) -> None:
        await self.ranks.copy_state(self.folder)

    async def write_copy(self) -> Files:
        return await self.ranks.write_state()


class ActorHandle(RanksHandle[ActorRank]):
    """Implements `Actor`, and `StepAnnotator` for the reference if it is its own."""

    pair_cost = 0.0
    recorder: RecorderHandle | None = None
    """Writer of rollouts; None where none are recorded."""

    async def close(self) -> None:
        await super().close()
        if self.recorder is not None:
            self.recorder.close()

    async def ready(self) -> None:
        recorder = [self.recorder.ready()] if self.recorder else []
        await all_or_none([super().ready(), *recorder])
        if len(self._ranks) > 1:
            self.pair_cost = await self._ranks[0].call(ActorRank.pair_cost)

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        """Compute a column of the fetched data with the reference."""
        return await self._column(ActorRank.reference, plan, column)

    async def publish(self, version: PolicyVersion) -> Published:
        parts = await self._all(ActorRank.publish, version)
        return Published(version, sum(part.num_bytes for part in parts), max(part.stall_s for part in parts))

    async def load(self, folder: AnyPath) -> int:
        return (await self._all(ActorRank.load, folder))[0]

    async def announce_again(self, version: PolicyVersion) -> None:
        await self._all(ActorRank.announce_again, version)

    async def export(self, folder: Path) -> None:
        await self._all(ActorRank.export, folder)

    def record(self, path: Path, step: int, trained: Sequence[TrainedGroup]) -> Saving[None]:
        return RecordedStep(self, path, step, trained)

    async def step_columns(self) -> list[Any]:
        """Return references to the columns of the last step, of each rank with batches of its own."""
        firsts = self._ranks[:: self._num_peers]
        kept = await self._gather(rank.split(ActorRank.columns, 1) for rank in firsts)
        return [column for _, (column,) in kept]

    async def record_evaluated(self, path: Path, version: PolicyVersion, evaluated: Sequence[TrainedGroup]) -> None:
        assert self.recorder is not None, "a run that records has one"
        await self.recorder.write_evaluated(path, version, evaluated)

    async def save_groups(self, path: AnyPath, groups: Sequence[Group]) -> SavedFile:
        return await self._ranks[0].beside(ActorRank.save_groups, path, _bare(groups), _payloads(groups))

    async def load_groups(self, path: AnyPath) -> list[Group]:
        bare, (chunk,) = await self._ranks[0].split(ActorRank.load_groups, 1, path)
        return [replace(group, payload=PayloadRef(chunk, i)) for i, group in enumerate(bare)]


@dataclass
class RecordedStep:
    """Implements `Saving`: the rollouts of a trained step."""

    actor: ActorHandle
    path: Path
    step: int
    trained: Sequence[TrainedGroup]
    _columns: Sequence[Any] = ()

    async def take_copy(self) -> None:
        self._columns = await self.actor.step_columns()

    async def write_copy(self) -> None:
        groups = [own.group for own in self.trained]
        kinds = tuple(sorted(map(str, groups[0].columns)))  # JSON accepts no `Column` as a key
        payloads = [(g.group_id, g.payload) for g in groups]
        parcel = Parcel.of(payloads + [(g.group_id, g.columns[kind]) for kind in kinds for g in groups])
        bare = [replace(own, group=group) for own, group in zip(self.trained, _bare(groups), strict=True)]
        assert self.actor.recorder is not None, "a run that records has one"
        await self.actor.recorder.write(self.path, self.step, bare, kinds, parcel, *self._columns)


class CriticHandle(RanksHandle[CriticRank]):
    """Implements `Critic`."""

    async def load(self, folder: AnyPath) -> None:
        await self._all(Rank.load, folder)

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        """Compute `Column.VALUES` of the fetched data."""
        return await self._column(CriticRank.values, plan)


def _is_of_collective(error: Exception | None) -> bool:
    """Return True for an exception of a collective: gloo raises a bare `RuntimeError` with the place in its code."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in kinds or ("RuntimeError" in kinds and "/gloo/" in str(error))


def _payloads(groups: Sequence[Group]) -> Parcel:
    return Parcel.of((g.group_id, g.payload) for g in groups)


def _bare(groups: Sequence[Group]) -> list[Group]:
    """Groups without payloads, which travel as separate arguments."""
    return [replace(group, payload=None, columns={}, report=None) for group in groups]
