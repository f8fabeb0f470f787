"""Pool of interchangeable workers: replaces members that fail, grows and shrinks. `RewardPool` and `RolloutPool` build
on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

from rlsys.errors import DeadlineExceeded, RlsysError, RunAborted, WeightsMismatch, WorkerDied, WorkerError
from rlsys.util import deadlines
from rlsys.util.event_loops import all_or_none
from rlsys.weight_sync.sync import with_deadline
from workers.ray.call_stream import CallStream, PayloadRef
from workers.ray.worker_process import BEATS, Chunks, Raylet, Remote, may_live, successor_name

W = TypeVar("W")
Recovered: TypeAlias = Callable[[str, float], None]
"""Takes the name of a worker that died, and the seconds until its successor was ready; or that of one that joined or
left, and the seconds since it was asked to."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause before a lost place is tried again; it doubles up to the longest."""


@dataclass(frozen=True, slots=True)
class PoolSpec(Generic[W]):
    """Specification of a pool: how its members start, and their limits."""

    size: int
    start: Callable[[str], Remote[W]]
    """Gives one worker a process, given its name."""
    deadline_s: float
    """Deadline of one piece of work; infinite if only its worker can tell when it takes too long."""
    silence_s: float
    """Seconds without a heartbeat after which a member is replaced."""
    max_attempts: int
    """Failed attempts at filling a place again, after which it counts as lost. It is tried again all the same, with
    pauses."""


@dataclass(eq=False)
class PoolMember(Generic[W]):
    """One worker of a pool. A replacement gets a new name, so that an old failure is never taken for its own."""

    index: int
    generation: int
    """Members that had this place before it."""
    name: str
    worker: Remote[W]
    calls: CallStream
    num_running: int = 0
    is_live: bool = False
    """True if it is set up and has not failed since."""
    is_cut_off: bool = False
    """True while no connection to its node succeeds."""
    raylet: Raylet = ("", 0)
    """Address of its node's raylet."""

    @property
    def is_reachable(self) -> bool:
        """True if the member can be given work."""
        return self.is_live and not self.is_cut_off


class Pool(Generic[W]):
    """Workers of one kind, any of which can do the next piece of work.

    One that fails or sends no heartbeat is replaced in the background, while work goes to the others. One whose node is
    cut off keeps its place, as long as Ray waits for that node.
    """

    def __init__(self, kind: str, phase: str, supply: PoolSpec[W]) -> None:
        """`phase` is the name of one piece of work in errors."""
        self._kind, self._phase, self._supply = kind, phase, supply
        self._generations = Counter[int]()
        """Members that each place has had."""
        self.members = [self._member(i) for i in range(supply.size)]
        self._leaving: list[PoolMember[W]] = []
        """Members without a place, which end what they have begun."""
        self.on_failure: Callable[[WorkerError], None] = lambda error: None
        """Called with the failure of each replacement that cannot be set up, and of each death that the pool itself
        detects."""
        self.on_recovery: Recovered = lambda name, seconds: None
        """Called after each recovery from such a death: see `restart`."""
        self.on_arrival: Recovered = lambda name, seconds: None
        """Called with each member that was added, once it can be given work."""
        self.on_departure: Recovered = lambda name, seconds: None
        """Called with each member that left because fewer are wanted."""
        self.on_unplaced: Callable[[WorkerError], None] = lambda lack: None
        """Called again and again while a member waits for a place that the cluster does not have."""
        self._replacing: set[int] = set()
        """Places for which a successor is being set up."""
        self._given: set[int] = set()
        """Places that are empty because their member gave way."""
        self._lost: set[int] = set()
        """Places that could not be filled again so far."""
        self._fillers: dict[int, asyncio.Task[None]] = {}
        """By place: what fills it."""
        self._last_failure = ""
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Return once every member is set up. Raises the error of the first member that fails."""
        await all_or_none(self._set_up(member) for member in self.members)

    async def restart(self, worker: str, on_recovery: Recovered) -> None:
        """Replace the member called `worker` if it still has its place; return once any member can serve.

        `on_recovery` is told its name, and the seconds until its successor was ready. Raises `RunAborted` if `worker`
        is none of this pool, or all places are lost.
        """
        if (dead := self._find_member(worker)) is not None:
            if not dead.is_cut_off:
                self._replace(dead, on_recovery)
        elif not self.has(worker):
            raise RunAborted(f"{worker} failed, and cannot be replaced in a run; resume with run.resume=auto")
        await self._serving()

    @property
    def processes(self) -> list[Remote[W]]:
        """Members that have a place, wait for one, or are about to leave."""
        placed = [member for member in self.members if member.index not in self._given]
        return [member.worker for member in (*placed, *self._leaving)]

    def resize(self, size: int) -> None:
        """Have `size` members, at least 1, after a while: new ones start in the background, and the last ones leave
        once all that they have begun has ended or gone on elsewhere."""
        while len(self.members) > max(1, size):
            self._retire(self.members.pop())
        while len(self.members) < size:
            member = self._member(len(self.members))
            self.members.append(member)
            self._replacing.add(member.index)
            self._fill(member.index, self._recover_member(member, member, self.on_arrival))

    def _retire(self, member: PoolMember[W]) -> None:
        """Let a member that has lost its place leave."""
        if (filler := self._fillers.pop(member.index, None)) is not None:
            filler.cancel()
        for places in (self._replacing, self._given, self._lost):
            places.discard(member.index)
        if member.is_live:
            self._leaving.append(member)
            self._spawn(self._see_off(member))
        else:
            self._spawn(member.worker.end())

    async def _see_off(self, member: PoolMember[W]) -> None:
        """End a leaving member once it has nothing to do, or has died."""
        began_s = asyncio.get_running_loop().time()
        await self._empty(member)
        self._leave(member.name)
        self._leaving.remove(member)
        await member.worker.end()
        self.on_departure(member.name, asyncio.get_running_loop().time() - began_s)

    async def _empty(self, member: PoolMember[W]) -> None:
        """Return once a leaving member does no work; unblocked by the end of a piece of it, or by its death."""
        while member.num_running:
            await self._changed.wait()

    def give_way(self, worker: str) -> None:
        """End the last live member, unless it is the only one, so that `worker`, which is scarcer, has its resources.

        Its place is tried again after a pause.
        """
        *others, last = self._live() or [None]
        if not others or last is None:
            return
        failure = WorkerDied(last.name, "yielding its resources", f"the cluster has no other room for {worker}")
        self.on_failure(failure)
        self._leave(last.name)
        last.calls.fail(failure)
        last.worker.kill()
        self._replacing.add(last.index)
        self._given.add(last.index)
        self._fill(last.index, self._return(last))

    async def _return(self, member: PoolMember[W]) -> None:
        """Fill the place of a member that gave way. Waits for a pause: room in the cluster cannot notify."""
        await deadlines.sleep(LONGEST_PAUSE_S)
        self._given.discard(member.index)
        await self._recover_member(member, self._replace_member(member), self.on_recovery)

    async def close(self) -> None:
        """Close every member that answers, and end all of them."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*(member.worker.end() for member in (*self.members, *self._leaving)))

    async def _serving(self) -> None:
        """Return once a member can be given work; unblocked by a replacement that is set up, by the return of one that
        was cut off, or by the loss of the last place.

        Raises `RunAborted` then.
        """
        while not self._live():
            if len(self._lost) == len(self.members):
                raise self._nobody_left()
            await self._changed.wait()

    def _nobody_left(self) -> RunAborted:
        return RunAborted(f"no {self._kind} worker is left; the last failure: {self._last_failure}")

    def has(self, worker: str) -> bool:
        """True if `worker` is the name of a worker of this pool, now or earlier."""
        return worker.startswith(f"{self._kind}-")

    def _replace(self, dead: PoolMember[W], on_recovery: Recovered) -> None:
        """Replace a dead member in the background, unless it was about to leave. A set-up of it that is under way
        fails, and is tried again."""
        self._leave(dead.name)
        if dead.index not in self._replacing and dead not in self._leaving:
            self._replacing.add(dead.index)
            self._fill(dead.index, self._recover_member(dead, self._replace_member(dead), on_recovery))

    async def _recover_member(self, dead: PoolMember[W], successor: PoolMember[W], on_recovery: Recovered) -> None:
        """Set up the successor of a dead member; if that fails, another.

        Waits for a pause once the place is lost: what it lacks, such as a node, cannot notify.
        """
        began_s = asyncio.get_running_loop().time()
        for attempt in count(1):
            if attempt > 1:
                successor = self._replace_member(successor)
            try:
                await self._set_up(successor)
            except RlsysError as error:
                failure = (
                    error
                    if isinstance(error, WorkerError)
                    else WorkerError(successor.name, "setting up the worker", str(error))
                )
                self._last_failure = str(failure)
                self.on_failure(failure)
                if (num_more := attempt - self._supply.max_attempts) >= 0:
                    successor.worker.kill()
                    self._lost.add(dead.index)
                    self._notify()
                    if len(self._lost) == len(self.members):
                        self._on_give_up(self._nobody_left())
                    await deadlines.sleep(min(FIRST_PAUSE_S * 2 ** min(num_more, 10), LONGEST_PAUSE_S))
            else:
                self._lost.discard(dead.index)
                on_recovery(dead.name, asyncio.get_running_loop().time() - began_s)
                break
        self._replacing.discard(dead.index)

    def _replace_member(self, member: PoolMember[W]) -> PoolMember[W]:
        """Kill a member and put a successor in its place; the successor is not set up yet."""
        self._spawn(member.worker.kill_with_stacks())
        successor = self.members[member.index] = self._member(member.index)
        return successor

    def _member(self, index: int) -> PoolMember[W]:
        generation = self._generations[index]
        self._generations[index] += 1
        name = successor_name(f"{self._kind}-{index}", generation)
        worker = self._supply.start(name)
        calls = CallStream(name, self._phase, lambda requests: self._send(worker, requests))
        return PoolMember(index, generation, name, worker, calls)

    def _find_member(self, worker: str) -> PoolMember[W] | None:
        return next((member for member in self._all if member.name == worker), None)

    @property
    def _all(self) -> list[PoolMember[W]]:
        return [*self.members, *self._leaving]

    def _live(self) -> list[PoolMember[W]]:
        """Members that can be given work."""
        return [member for member in self.members if member.is_reachable]

    async def _set_up(self, member: PoolMember[W]) -> None:
        await member.worker.setup(silence_s=self._supply.silence_s, on_unplaced=self.on_unplaced)
        member.raylet, member.is_live = await member.worker.raylet(), True
        self._on_join(member)
        self._notify()
        self._spawn(self._watch(member))

    async def _watch(self, member: PoolMember[W]) -> None:
        """Replace a live member once its process is dead or silent, or it has failed; its work fails at once.

        Waits for such a failure, and out a link that is cut. Ends when the member is no longer live.
        """
        try:
            while member.is_live:
                try:
                    await deadlines.unless(self._beats(member), self._trouble(member))
                except (DeadlineExceeded, WorkerDied) as failure:
                    if not await self._is_of_link(member, failure):
                        raise
                    if member.is_live:  # else it was replaced meanwhile
                        await self._ride_out(member)
        except (WorkerDied, DeadlineExceeded, WeightsMismatch) as failure:
            if not member.is_live:
                return
            if not member.num_running:  # otherwise the callers report it
                self.on_failure(failure)
            self._replace(member, self.on_recovery)
            member.calls.fail(failure)

    async def _is_of_link(self, member: PoolMember[W], failure: WorkerError) -> bool:
        """Return True if the link to a member's node explains a failure: no connection to the node succeeds."""
        return may_live(failure) and await member.worker.is_cut_off(member.raylet)

    async def _ride_out(self, member: PoolMember[W]) -> None:
        """Give no work to a member whose node is cut off, until the member answers again. Its work fails if there are
        others that can do it.

        Waits for a heartbeat. Raises `WorkerDied` once Ray has declared the node dead, or `DeadlineExceeded` if its
        node answers, and the member does not.
        """
        began_s = asyncio.get_running_loop().time()
        detail = "its node is cut off: no connection succeeds, and Ray still waits for it, as this run does"
        cut = DeadlineExceeded(member.name, "answering a heartbeat", detail)
        cut.is_reported, member.is_cut_off = True, True
        self._on_cut(member)
        self.on_failure(cut)
        if self._live():
            member.calls.fail(cut)
        was_cut_off = True
        try:
            while True:
                try:
                    await member.worker.beat(self._supply.silence_s)
                    break
                except (DeadlineExceeded, WorkerDied) as failure:
                    still_is = await self._is_of_link(member, failure)
                    if not (was_cut_off or still_is):  # else the heartbeat may have been lost on its way
                        raise
                    was_cut_off = still_is
        finally:
            member.is_cut_off = False
        self._on_cut(member)
        self._notify()
        self.on_recovery(member.name, asyncio.get_running_loop().time() - began_s)

    async def _beats(self, member: PoolMember[W]) -> None:
        """Check a member as long as it is live. Waits a third of `silence_s` between two heartbeats."""
        while member.is_live:
            await self._check(member)
            await deadlines.sleep(self._supply.silence_s / BEATS)  # silence cannot notify

    async def _trouble(self, member: PoolMember[W]) -> None:
        """Raise the failure of a member that can tell it by itself; by default, none can."""
        await asyncio.Event().wait()

    async def _check(self, member: PoolMember[W]) -> None:
        """Raise `WorkerDied`, or `DeadlineExceeded` if a member is silent."""
        silence_s = self._supply.silence_s
        try:
            await member.worker.beat(silence_s)
        except DeadlineExceeded as late:
            detail = (
                f"none within {silence_s:g} s: its process is stopped, or a computation keeps the interpreter's lock"
            )
            remedy = "see the stacks in its log, or raise limits.silence_s if its machine is overloaded"
            raise DeadlineExceeded(member.name, late.phase, f"{detail}; {remedy}") from late

    def _leave(self, worker: str) -> None:
        """Give no more work to the member called `worker`."""
        if (member := self._find_member(worker)) is not None and member.is_reachable:
            member.is_live = False
            self._on_leave(member)

    def _on_give_up(self, failure: RunAborted) -> None:
        """All places are lost."""

    def _on_join(self, member: PoolMember[W]) -> None:
        """A member is live from now."""

    def _on_cut(self, member: PoolMember[W]) -> None:
        """A member is cut off from now, or no longer."""

    def _on_leave(self, member: PoolMember[W]) -> None:
        """A member is live no more."""

    def _notify(self) -> None:
        """Wake whoever waits for a member to serve."""
        self._changed.set()
        self._changed.clear()

    def _fill(self, place: int, work: Coroutine[Any, Any, None]) -> None:
        """Fill a place in the background, as long as the pool has it."""
        self._fillers[place] = self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _send(self, worker: Remote[W], requests: list) -> Chunks:
        """One streaming call for these requests; see `answer_in_chunks`."""
        raise NotImplementedError(f"{type(self).__name__} sends nothing: implement `_send`")

    async def _do(self, member: PoolMember[W], request: object, phase: str) -> tuple[object, PayloadRef]:
        """Let a member answer one request, within its deadline. A member that fails at it gets no more work."""
        with self._at_work(member):
            return await self._send_call(member, request, phase)

    @contextmanager
    def _at_work(self, member: PoolMember[W]) -> Iterator[None]:
        """Count one more piece of work of a member inside the block. A member that fails in it gets no more work."""
        member.num_running += 1
        try:
            yield
        except (WorkerDied, DeadlineExceeded, WeightsMismatch) as error:
            self._leave(error.worker)
            raise
        finally:
            member.num_running -= 1
            if member in self._leaving:
                self._notify()

    async def _send_call(self, member: PoolMember[W], request: object, phase: str) -> tuple[object, PayloadRef]:
        return await with_deadline(member.calls.call(request), self._supply.deadline_s, member.name, phase)
