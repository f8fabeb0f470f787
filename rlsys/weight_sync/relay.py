"""Relay: published weights in the memory of a node, from which rollouts pull at any time.

Every rank of the actor publishes a `VersionPart`, and all parts are sent at the same time. A part consists of buckets,
each named by the hash of its bytes. A bucket of which few bytes changed comes as a `Delta` to one of the version
before, if the relay has that one, and whole if not. A relay that missed versions, or lost everything, receives the
missing buckets in the same way.

A part goes down a chain or a tree of relays, see `links`: each pulls buckets from a relay before it as they arrive
there. A source that fails is skipped for the rest of that part; the last source is the rank. So skipping a dead relay
does not delay the others.

The class neither interprets bytes nor moves them: it runs on Ray and on simulated links.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from rlsys.contracts import Arrival
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError, first_of
from rlsys.types import PolicyVersion, Ref
from rlsys.util.deadlines import remote, timeout
from rlsys.weight_sync.links import Link, parents
from rlsys.weight_sync.manifest import Bucket, Manifest, VersionPart
from rlsys.weight_sync.sync import with_deadline

T = TypeVar("T")
IN_FLIGHT = 3
"""Buckets a relay pulls concurrently: one being sent, one being stored, one being requested."""
UNAVAILABLE = (WorkerDied, DeadlineExceeded)
"""Errors that may end once a relay has restarted."""
FAILURES = (*UNAVAILABLE, WeightsMismatch)
"""Errors on which a relay, or a reader, tries the next source."""
TRIES = 4
"""Attempts within the deadline of a transfer: a relay that hangs uses up one, and other sources can follow."""
LOOK_S = 0.5
"""Seconds of silence after which a source is pinged, and seconds that it has to answer the ping. A relay that waits for
a source behind a cut link goes on with another one then."""
RESTART_POLL_S = 0.2
"""Seconds between two checks of a restarting relay: Ray does not notify about a restarted process."""


class RelayPeer(Protocol):
    """Source of buckets for a relay: another relay, or a rank. Also raises `WorkerDied`; see `Relay`."""

    @property
    def name(self) -> str: ...

    async def give(self, bucket: str, *, wait: bool) -> Ref: ...

    async def ping(self) -> None: ...


class ChainMember(RelayPeer, Protocol):
    """Interface of a relay for `broadcast`, and for a neighbour that it refills."""

    async def announce(self, announcement: Announcement) -> None: ...

    async def accept(self, version: PolicyVersion, rank: int, sources: Sequence[RelayPeer]) -> None: ...

    async def holding(self) -> Holding: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """A rank's copy of its part: the last source of every relay."""

    name: str
    place: str
    """Place of the copy, see `Relay`. Relays there keep these references instead of a second copy."""
    refs: Mapping[str, Ref]
    """References by hash of the bucket, or name of the delta."""

    async def give(self, bucket: str, *, wait: bool) -> Ref:
        """See `Relay.give`."""
        return self.refs[bucket]

    async def ping(self) -> None:
        """See `Relay.ping`. No process answers for these references."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Difference between two buckets, from which the newer one is made of the older."""

    base: str
    """Hash of the older bucket."""
    bucket: str
    """Hash of the newer bucket."""
    num_bytes: int

    @property
    def name(self) -> str:
        """Name under which relays request it."""
        return f"{self.base}>{self.bucket}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """Announcement of a part to the relays, before its bytes are sent."""

    part: VersionPart
    origin: Origin
    num_sent: int
    """Bytes that a relay is sent which has the previous version: deltas, and buckets without one."""
    seconds: float
    """Seconds from the end of the publish to this announcement."""
    deltas: Mapping[str, Delta] = field(default_factory=dict)
    """Deltas by the hash of the newer bucket; buckets without one are sent whole."""

    @property
    def version(self) -> PolicyVersion:
        return self.part.version

    @property
    def names(self) -> frozenset[str]:
        """Everything that relays request of this part."""
        deltas = (delta.name for delta in self.deltas.values())
        return frozenset((*(bucket.hash for bucket in self.part.buckets), *deltas))


@dataclass(frozen=True, slots=True)
class Holding:
    """Versions of a relay: the parts of complete ones, newest first, then those being received."""

    announcements: tuple[Announcement, ...]
    pinned: PolicyVersion | None
    link: Link = field(default_factory=Link)
    """Measured speed of what this relay received."""


class Store(Protocol):
    """Operations of a relay on bytes."""

    async def fetch(self, ref: Ref, source: str) -> object:
        """Return the bytes of a reference from `source`. Raises `WorkerDied` if they are lost."""

    async def digest(self, data: object) -> str:
        """Return the hash of the bytes, as used in manifests."""

    async def apply_delta(self, base: Ref, delta: object) -> object:
        """Return the bytes of the newer bucket, from a local older one. They are any bytes if either is damaged."""

    async def own(self, data: object) -> Ref:
        """Return a reference to a copy that lives as long as this relay keeps it. Raises `MemoryError`."""

    async def borrow(self, ref: Ref) -> Ref:
        """Return the reference of another process, whose bytes stay as long as this relay keeps it. Raises `WorkerDied`
        if they are lost."""


class Relay:
    """Storage of the newest `keep` complete versions and the pinned one.

    A relay that is slower than publishes skips versions: a queued version is dropped once `keep` newer ones are
    announced. A running pull is completed, so even the slowest relay makes progress.

    Each wait for a peer, a bucket or a version ends after one of `TRIES` parts of `transfer_s`. It then raises a
    `DeadlineExceeded` that names the awaited worker and the phase. `accept` and `refill` wait once for each bucket, and
    for their turn: they may take long while buckets arrive. `watch` has no deadline.
    """

    def __init__(self, name: str, place: str, store: Store, transfer_s: float, keep: int = 2) -> None:
        """`place` is where references of this relay are read without a copy: its node, or its machine."""
        self.name, self.place = name, place
        self._store, self._keep = store, keep
        self._wait_s = transfer_s / TRIES
        self._buckets: dict[str, Ref] = {}
        """Buckets by hash, and deltas by name for relays that come later."""
        self._borrowed: set[str] = set()
        """Buckets of another process: a rank at this place, or a source that lacked memory for a copy."""
        self._known: dict[PolicyVersion, dict[int, Announcement]] = {}
        """Announced parts, by rank."""
        self._expected: dict[tuple[PolicyVersion, int], frozenset[str]] = {}
        """Names of the buckets and deltas of announced parts that are not here."""
        self._complete: dict[PolicyVersion, tuple[Manifest, Arrival]] = {}
        self._announced_s: dict[tuple[PolicyVersion, int], float] = {}
        self._pinned: PolicyVersion | None = None
        self._pulling: dict[int, PolicyVersion] = {}
        """By rank: one of its versions is pulled at a time."""
        self._changed = asyncio.Condition()
        self._repairing = asyncio.Lock()
        self._reports: asyncio.Queue[WorkerError] = asyncio.Queue()
        self._is_short = False
        """True once the lack of memory for local copies was reported."""
        self._link = Link()
        self._received_s = -math.inf
        """Time at which the last bucket arrived."""

    # ------------------------------------------------------------------------------------------------------- broadcast

    @remote("receiving the announcement of version {announcement.version}")
    async def announce(self, announcement: Announcement) -> None:
        """Expect a part: `give` waits for its buckets until `keep` newer versions overtake it.

        A known part is ignored. Raises `WeightsMismatch` if it was published with other bytes.
        """
        part = announcement.part
        version, rank = part.version, part.rank
        async with self._changed:
            parts = self._known.setdefault(version, {})
            if rank in parts:
                if parts[rank].part.buckets != part.buckets:
                    detail = f"{parts[rank].origin.name} published it with other bytes before"
                    raise WeightsMismatch(self.name, f"receiving the announcement of version {version}", detail)
                return
            parts[rank] = announcement
            self._expected[version, rank] = announcement.names
            self._announced_s[version, rank] = asyncio.get_running_loop().time()
            self._evict(self._keep)
            self._changed.notify_all()

    @remote("receiving version {version}", patience=math.inf)
    async def accept(self, version: PolicyVersion, rank: int, sources: Sequence[RelayPeer]) -> None:
        """Receive an announced part: pull the missing buckets, in order, from the first of `sources` that has them.

        The last source is the rank. Returns once the part is here, or dropped because newer versions overtook it.
        Raises `WorkerDied` if this process received no announcement, or the error of the last source. `watch` reports
        the error too, and peers waiting for its buckets try other sources.
        """
        try:
            await self._take_in(version, rank, sources, wait=True)
        except WorkerError as error:
            self._reports.put_nowait(error)
            raise

    @remote("sending bucket {bucket}")
    async def give(self, bucket: str, *, wait: bool) -> Ref:
        """Return the bucket with this hash, or the delta of this name. With `wait`, waits for it if it is expected.

        Raises `WeightsMismatch` if it is missing. In a broadcast, relays wait only for earlier relays, and a relay
        refilling its versions waits for none. So they never wait in a circle.
        """
        phase = f"sending bucket {bucket}"
        if wait:
            await self._until(lambda: bucket in self._buckets or not self._expects(bucket), phase)
        if bucket not in self._buckets:
            raise WeightsMismatch(self.name, phase, f"it is not here; {self._contents()}")
        return self._buckets[bucket]

    @remote("answering")
    async def ping(self) -> None:
        """Answer at once."""

    # --------------------------------------------------------------------------------------------------------- readers

    @remote("serving version {at_least} or newer")
    async def newest(self, at_least: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        """Return the newest complete version, at least `at_least`, and its buckets in order.

        Waits for `accept` to complete such a version.
        """
        phase = f"serving version {at_least} or newer"
        await self._until(lambda: bool(self._complete) and max(self._complete) >= at_least, phase)
        return self._content(max(self._complete))

    @remote("pinning version {version}")
    async def pin(self, version: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        """Return exactly `version`, and keep it until another version is pinned.

        Waits for `accept` to complete it. Raises `WeightsMismatch` if it was evicted or dropped.
        """
        await self._until_settled(version, f"pinning version {version}")
        self._pinned = version
        return self._content(version)

    @remote("receiving version {version}")
    async def arrival(self, version: PolicyVersion) -> tuple[Arrival, tuple[Announcement, ...]]:
        """Return the arrival of `version`, and the announcements from which an empty relay tier can be refilled.

        Waits for `accept` to complete it. Raises `WeightsMismatch` if it was evicted or dropped.
        """
        await self._until_settled(version, f"receiving version {version}")
        return self._complete[version][1], tuple(self._known[version].values())

    # --------------------------------------------------------------------------------------------------------- failure

    @remote("listing its versions")
    async def holding(self) -> Holding:
        """Return the complete versions and those being received."""
        versions = (*sorted(self._complete, reverse=True), *sorted(self._known.keys() - self._complete.keys()))
        return Holding(tuple(a for v in versions for a in self._known[v].values()), self._pinned, self._link)

    @remote("refilling its versions", patience=math.inf)
    async def refill(self, neighbours: Sequence[ChainMember], known: Holding) -> None:
        """Recover a relay that lost everything. Receives, newest first, the versions in `known` and those that any
        neighbour has or expects; pins the pinned version. Raises the error of the last source."""
        holdings = [known, *await asyncio.gather(*map(self._holding, neighbours))]
        if self._pinned is None:
            self._pinned = next((holding.pinned for holding in holdings if holding.pinned is not None), None)
        announcements = {(a.version, a.part.rank): a for holding in holdings for a in holding.announcements}
        newest_first = sorted(announcements, key=lambda key: (-key[0], key[1]))
        for key in newest_first:
            await self.announce(announcements[key])
        for version, rank in newest_first:
            await self._take_in(version, rank, neighbours, wait=False)

    @remote("repairing bucket {bucket}", patience=TRIES)
    async def repair(self, bucket: str, neighbours: Sequence[RelayPeer]) -> None:
        """Look at a bucket that a reader got with other bytes than its hash tells. If it is damaged here, take it again
        from the first of `neighbours`, or else the rank, that has it intact. Raises the error of the last of them."""
        async with self._repairing:
            parts = (announcement for known in self._known.values() for announcement in known.values())
            found = next(((a, b) for a in parts for b in a.part.buckets if b.hash == bucket), None)
            if found is None or bucket not in self._buckets:
                return
            data = await self._from(self, self._store.fetch(self._buckets[bucket], self.name), "reading a bucket")
            if await self._store.digest(data) == bucket:
                return
            announcement = replace(found[0], deltas={})
            detail = f"bucket {bucket} of version {announcement.version} was damaged in memory, and is taken again"
            self._reports.put_nowait(WorkerError(self.name, "keeping weights", detail))
            await self._take(found[1], announcement, [*neighbours, announcement.origin], wait=False)

    @remote("keeping weights", patience=math.inf)
    async def watch(self) -> WorkerError:
        """Wait, without a deadline, for a problem to report to a person; each is returned to one caller. A problem is a
        version that could not be received, a damaged bucket, or (once) a lack of memory."""
        return await self._reports.get()

    # ------------------------------------------------------------------------------------------------------- internals

    async def _holding(self, neighbour: ChainMember) -> Holding:
        """Return the versions of a neighbour; none if it does not answer."""
        try:
            return await with_deadline(neighbour.holding(), self._wait_s, neighbour.name, "listing its versions")
        except FAILURES:
            return Holding((), None)  # its supervisor will notice

    async def _take_in(self, version: PolicyVersion, rank: int, sources: Sequence[RelayPeer], *, wait: bool) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: rank not in self._pulling or self._is_overtaken(version))
            parts = self._known.get(version, {})
            if self._is_overtaken(version) or (rank in parts and (version, rank) not in self._expected):
                return
            if rank not in parts:
                detail = "it was not announced here, or the process was restarted since"
                raise WorkerDied(self.name, f"receiving version {version}", detail)
            self._pulling[rank] = version
        is_here = False
        try:
            await self._pull(parts[rank], list(sources), wait)
            is_here = True
        finally:
            async with self._changed:
                del self._pulling[rank]
                if is_here:
                    del self._expected[version, rank]
                    self._complete_if_whole(version)
                else:
                    self._forget_part(version, rank)
                self._evict(self._keep)
                self._changed.notify_all()

    async def _pull(self, announcement: Announcement, sources: list[RelayPeer], wait: bool) -> None:
        """Pull the missing buckets. Failed sources are removed from `sources`.

        A borrowed bucket is taken again: the rank that owned it may have been replaced.
        """
        part, origin = announcement.part, announcement.origin
        held = self._buckets.keys() - self._borrowed
        missing = {bucket.hash: bucket for bucket in part.buckets if bucket.hash not in held}
        if origin.place == self.place:
            manifests = [manifest for v, (manifest, _) in self._complete.items() if v > part.version]
            newer = {bucket.hash for manifest in manifests for bucket in manifest.buckets}
            for bucket in missing:
                if bucket not in self._buckets or bucket not in newer:
                    delta = announcement.deltas.get(bucket)
                    for name in (bucket, delta.name) if delta else (bucket,):
                        self._borrowed.add(name)
                        await self._put(name, await self._store.borrow(origin.refs[name]))
            return
        sources.append(origin)
        room = asyncio.Semaphore(IN_FLIGHT)
        try:
            async with asyncio.TaskGroup() as pulls:
                for bucket in missing.values():
                    await room.acquire()
                    pull = pulls.create_task(self._take(bucket, announcement, sources, wait))
                    pull.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    async def _take(self, bucket: Bucket, announcement: Announcement, sources: list[RelayPeer], wait: bool) -> None:
        """Pull one bucket from the first source that gives it intact. A failed source is not tried again."""
        version, rank = announcement.version, announcement.part.rank
        phase = f"sending a bucket of version {version} to {self.name}"
        if (delta := announcement.deltas.get(bucket.hash)) is not None:
            if await self._patch(delta, sources[0], wait, phase):
                return
            async with self._changed:  # relays after this one do not wait for it
                self._expected[version, rank] -= {delta.name}
                self._changed.notify_all()
        while True:
            source = sources[0]
            try:
                ref = await self._from(source, source.give(bucket.hash, wait=wait), phase)
                ref = await self._copy_bucket(ref, bucket, source, phase)
            except FAILURES:
                if source is sources[-1]:
                    raise
                if source in sources:
                    sources.remove(source)
            else:
                await self._put(bucket.hash, ref)
                return

    async def _patch(self, delta: Delta, source: RelayPeer, wait: bool, phase: str) -> bool:
        """Make a bucket of an older one and its delta. Returns False if it must be pulled whole: the older one is not
        here, the source does not have the delta, it is damaged, or there is no memory."""
        base = self._buckets.get(delta.base)
        if base is None or delta.base in self._borrowed:
            return False
        try:
            ref = await self._from(source, source.give(delta.name, wait=wait), phase)
            data = await self._from(source, self._store.fetch(ref, source.name), phase)
            whole = await self._store.apply_delta(base, data)
            if await self._store.digest(whole) != delta.bucket:
                return False
            own, kept = await self._store.own(whole), await self._store.own(data)
        except (*FAILURES, MemoryError):
            return False
        await self._put(delta.name, kept)
        await self._put(delta.bucket, own)
        return True

    async def _from(self, source: RelayPeer, work: Awaitable[T], phase: str) -> T:
        """Await what a source does. Raises `DeadlineExceeded` after a part of the deadline, or soon if the source does
        not answer a `ping` meanwhile."""
        asked = asyncio.ensure_future(work)

        async def wait() -> T:
            while not (await asyncio.wait([asked], timeout=LOOK_S))[0]:
                await with_deadline(source.ping(), LOOK_S, source.name, phase)
            return asked.result()

        try:
            return await with_deadline(wait(), self._wait_s, source.name, phase)
        finally:
            asked.cancel()

    async def _copy_bucket(self, ref: Ref, bucket: Bucket, source: RelayPeer, phase: str) -> Ref:
        """Return a reference to a local copy, or `ref` itself if there is no memory for one. Readers then read from the
        source, and the next version with this bucket tries to copy it again. Raises `WeightsMismatch` if the bytes do
        not match the manifest."""
        try:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            data = await self._from(source, self._store.fetch(ref, source.name), phase)
            busy_since_s, self._received_s = max(began_s, self._received_s), loop.time()
            self._link = self._link.after(bucket.num_bytes, self._received_s - busy_since_s)
            came = await self._store.digest(data)
            if came != bucket.hash:
                raise WeightsMismatch(source.name, phase, f"bucket {bucket.hash} arrived as {came}")
            try:
                own = await self._store.own(data)
            except MemoryError:
                self._evict(1)
                own = await self._store.own(data)
            self._borrowed.discard(bucket.hash)
            return own
        except MemoryError as error:
            self._borrowed.add(bucket.hash)
            if not self._is_short:
                self._is_short = True
                detail = f"no memory for copies of its own, its node reads from others: give the node more ({error})"
                self._reports.put_nowait(WorkerError(self.name, phase, detail))
            return ref

    async def _put(self, bucket: str, ref: Ref) -> None:
        async with self._changed:
            self._buckets[bucket] = ref
            self._changed.notify_all()

    def _complete_if_whole(self, version: PolicyVersion) -> None:
        """Make a version available to readers once the parts of all ranks are here."""
        parts = self._known[version]
        num_ranks = next(iter(parts.values())).part.num_ranks
        if len(parts) < num_ranks or any((version, rank) in self._expected for rank in parts):
            return
        announcements = [parts[rank] for rank in range(num_ranks)]
        manifest = Manifest(tuple(a.part for a in announcements))
        now_s = asyncio.get_running_loop().time()
        seconds = max(a.seconds + now_s - self._announced_s[version, a.part.rank] for a in announcements)
        num_sent = sum(a.num_sent for a in announcements)
        self._complete[version] = manifest, Arrival(version, manifest.hash, manifest.num_bytes, num_sent, seconds)

    def _evict(self, keep: int) -> None:
        """Evict old complete versions, queued versions that were overtaken, and unneeded buckets. The newest `keep`
        complete versions and the pinned one stay."""
        old = [version for version in sorted(self._complete)[:-keep] if version != self._pinned]
        busy = {*self._pulling.values()}
        overtaken = [v for v in self._known if v not in self._complete and v not in busy and self._is_overtaken(v)]
        for version in (*old, *overtaken):
            for rank in list(self._known[version]):
                self._forget_part(version, rank)
        needed = {name for parts in self._known.values() for known in parts.values() for name in known.names}
        self._buckets = {bucket: ref for bucket, ref in self._buckets.items() if bucket in needed}
        self._borrowed &= needed

    def _forget_part(self, version: PolicyVersion, rank: int) -> None:
        for table in (self._expected, self._announced_s):
            table.pop((version, rank), None)
        self._complete.pop(version, None)
        if (parts := self._known.get(version)) is not None:
            parts.pop(rank, None)
            if not parts:
                del self._known[version]

    def _is_overtaken(self, version: PolicyVersion) -> bool:
        """Return True if so many newer versions are known that this one would be evicted at once."""
        if version == self._pinned or version in self._pulling.values():
            return False
        return sum(known > version for known in self._known) >= self._keep

    def _expects(self, bucket: str) -> bool:
        return any(bucket in expected for expected in self._expected.values())

    def _content(self, version: PolicyVersion) -> tuple[Manifest, list[Ref]]:
        manifest, _ = self._complete[version]
        return manifest, [self._buckets[bucket.hash] for bucket in manifest.buckets]

    def _contents(self) -> str:
        return f"it holds {', '.join(map(str, sorted(self._complete))) or 'no version'} by this time"

    async def _until_settled(self, version: PolicyVersion, phase: str) -> None:
        """Return once `version` is complete; raise `WeightsMismatch` if that has become impossible."""

        def is_settled() -> bool:
            is_past = self._is_overtaken(version) or (bool(self._complete) and max(self._complete) >= version)
            return version in self._complete or (is_past and version not in self._known)

        await self._until(is_settled, phase)
        if version not in self._complete:
            raise WeightsMismatch(self.name, phase, self._contents())

    async def _until(self, condition: Callable[[], bool], phase: str) -> None:
        async with self._changed:
            await with_deadline(self._changed.wait_for(condition), self._wait_s, self.name, phase)


async def broadcast(
    relays: Sequence[ChainMember],
    announcement: Announcement,
    transfer_s: float,
    link: Link | None = None,
    num_chunks: int | None = None,
) -> list[asyncio.Task[None]]:
    """Start sending a part to `relays`, the first of which is on the rank's node, over links like `link`, in so many
    chunks: None for its buckets.

    Returns a task for each relay at once. It ends when that relay has the part, or newer versions overtook it (see
    `Relay.accept`), or with the relay's error. A relay is a source for later ones once it has answered the
    announcement. Those that pull from it wait `LOOK_S` for that, and then have other sources.
    """
    part = announcement.part
    phase = f"receiving the announcement of version {part.version}"
    parent_of = parents(len(relays), announcement.num_sent, num_chunks or len(part.buckets), link or Link())
    announcements = [
        asyncio.ensure_future(with_deadline(relay.announce(announcement), transfer_s / TRIES, relay.name, phase))
        for relay in relays
    ]

    async def announce_to(i: int) -> None:
        await announcements[i]
        parent = parent_of[i]
        if i:
            await asyncio.wait([announcements[parent]], timeout=LOOK_S)  # it is asked only after its announcement
        is_there = [future.done() and future.exception() is None for future in announcements]
        others = [j for j in range(i - 1, -1, -1) if j != parent]
        sources = [relays[j] for j in ([parent, *others] if i else []) if is_there[j]]
        await relays[i].accept(part.version, part.rank, sources)

    tasks = [asyncio.create_task(announce_to(i)) for i in range(len(relays))]
    for task in tasks:  # relays report errors by `watch`: no caller has to await these
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return tasks


async def first_success(tasks: Sequence[asyncio.Task[T]]) -> T:
    """Return the result of the first task to succeed; the others go on. If none succeeds, raises an error, preferably
    one that is not in `UNAVAILABLE`."""
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task.result()
    errors = [error for task in tasks if (error := task.exception()) is not None]
    raise next((error for error in errors if not isinstance(error, UNAVAILABLE)), errors[0])


async def first_answers(tasks: Sequence[asyncio.Task[T]]) -> list[T | None]:
    """Return the result of each task that ends within `LOOK_S` of the first to succeed, and None for all others, which
    are cancelled. Waits for that success, or for the failure of all."""
    waiting = set(tasks)
    try:
        while waiting and not any(task.done() and task.exception() is None for task in tasks):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=LOOK_S)
    finally:
        for task in waiting:
            task.cancel()
    return [task.result() if task not in waiting and task.exception() is None else None for task in tasks]


def passing(errors: Sequence[BaseException]) -> BaseException:
    """Return an error in `UNAVAILABLE`, after which a new attempt may succeed; if there is none, the last error."""
    return next((error for error in errors if isinstance(error, UNAVAILABLE)), errors[-1])


async def patiently(ask: Callable[[], Awaitable[T]], seconds: float | None, phase: str) -> T:
    """Return the result of `ask`, repeated while the relays it needs are restarting or do not answer.

    Raises `DeadlineExceeded` with the last failure in its text after `seconds` (None: never). Other errors of `ask` are
    raised at once.
    """
    last = "none of them answered"
    try:
        async with timeout(seconds):
            while True:
                try:
                    return await ask()
                except UNAVAILABLE as error:
                    last = str(error)
                await asyncio.sleep(RESTART_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded("relays", phase, f"no answer within {seconds:g} s; at last: {last}") from error
