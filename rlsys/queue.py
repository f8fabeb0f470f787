"""The streaming queue between producers and the learner: permits, window, and the staleness bound.

With P groups a step, S = max_staleness and window W there are B = (S + 1) * P permits, and

    staleness  <=  (B + W - 2) // P          (exactly S for W = 1)

provided a group starts on weights no older than its permit. Proof for W = 1: groups are taken in serial order, so
when the
step of version v takes a group, at most B - 1 older groups held permits when that group was admitted; those are at
most S full steps plus the P - 1 groups beside it in its own step. Permits alone bound nothing if finished groups may
overtake slow ones without limit: each place of overtaking costs one more, hence W - 1.

`take` checks the bound again on version stamps. Its `stale` drop counter should read 0.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rlsys.types import Group, PolicyVersion


@dataclass(slots=True)
class Permit:
    """The right to have one group in the pipe, from admission until its step is published."""

    version: PolicyVersion
    """Version it was released at: its group must start on weights no older."""
    _queue: StreamingQueue
    serial: int | None = None
    reason: str = "failed"
    """Why the group is dropped if nothing is ever submitted."""
    is_submitted: bool = False

    def open(self, serial: int) -> None:
        """Take a place in the order of groups."""
        self.serial = serial
        self._queue._open[serial] = None

    def submit(self, group: Group) -> None:
        """Hand in the finished group; it now waits to be taken."""
        if group.serial != self.serial:
            raise ValueError(f"permit of group {self.serial} was handed group {group.serial}")
        self.is_submitted = True
        self._queue._finish(group)


@dataclass
class StreamingQueue:
    """Groups in flight, in serial order. Lives in the driver's event loop; not thread-safe, by design."""

    groups_per_step: int
    max_staleness: int
    window: int
    version: PolicyVersion
    """Version of the newest published weights; `release` moves it on."""
    num_groups: int
    """Groups the rest of the run will consume: no more are admitted, so the last step leaves nothing unused."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Drops by reason: `stale`, `failed`, `too_long`, ..."""

    def __post_init__(self) -> None:
        self._free = deque([self.version] * self.capacity)
        self._open: dict[int, Group | None] = {}
        self._num_admitted = 0
        self._arrival = asyncio.Event()
        self._vacancy = asyncio.Event()

    @property
    def capacity(self) -> int:
        """Permits in existence: (max_staleness + 1) * groups_per_step."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def staleness_bound(self) -> int:
        """Versions that no trained token can be behind."""
        return (self.capacity + self.window - 2) // self.groups_per_step

    @property
    def num_finished(self) -> int:
        """Groups that wait to be taken."""
        return sum(group is not None for group in self._open.values())

    @property
    def finished(self) -> list[Group]:
        """Finished groups that were not taken yet, oldest first: what a checkpoint keeps."""
        return [group for _, group in sorted(self._open.items(), key=lambda item: item[0]) if group is not None]

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[Permit]:
        """Hold a permit; leaving the block without a submit drops the group and gives the permit back.

        Waits for a free permit (and for the run to need another group). Unblocked by `release` and by drops.
        """
        while not (self._free and self._num_admitted < self.num_groups):
            self._vacancy.clear()
            await self._vacancy.wait()
        permit = Permit(self._free.popleft(), self)
        self._num_admitted += 1
        try:
            yield permit
        finally:
            if not permit.is_submitted:
                if permit.serial is not None:
                    del self._open[permit.serial]
                self._give_back(permit.reason)

    def restore(
        self, version: PolicyVersion, num_groups: int, finished: Sequence[Group], pending: Iterable[int]
    ) -> None:
        """Start over at `version` with `num_groups` left to consume, the `finished` of an earlier session among them.

        `pending` are serials that session had issued and not finished: they keep their place in the order, so that
        nothing younger is taken before they are issued again.
        """
        self.version, self.num_groups = version, num_groups
        self._free = deque([version] * (self.capacity - len(finished)))
        self._num_admitted = len(finished)
        self._open = {**dict.fromkeys(pending), **{group.serial: group for group in finished}}

    async def take(self, *, version: PolicyVersion, on_stale: Callable[[Group], None]) -> list[Group]:
        """The next step's groups, oldest first.

        Waits for a finished group less than `window` serials past the oldest open one. Unblocked by producers
        submitting or dropping.
        A group with a token more than `staleness_bound` versions behind `version` is dropped as `stale`, and handed to
        `on_stale`.
        """
        taken: list[Group] = []
        while len(taken) < self.groups_per_step:
            if (group := self._ready()) is None:
                self._arrival.clear()
                await self._arrival.wait()
                continue
            del self._open[group.serial]
            if version - group.oldest_version > self.staleness_bound:
                self._give_back("stale")
                on_stale(group)
            else:
                taken.append(group)
        return taken

    def release(self, groups: Sequence[Group], version: PolicyVersion) -> None:
        """Free the permits of a step whose weights are published as `version`: the next groups are born on them."""
        self.version = version
        self._free.extend([version] * len(groups))
        self._vacancy.set()

    def _ready(self) -> Group | None:
        """The oldest finished group whose serial is less than `window` past that of the oldest open one."""
        oldest = min(self._open, default=0)
        for serial in range(oldest, oldest + self.window):
            if (group := self._open.get(serial)) is not None:
                return group
        return None

    def _finish(self, group: Group) -> None:
        self._open[group.serial] = group
        self._arrival.set()

    def _give_back(self, reason: str) -> None:
        self.dropped[reason] += 1
        self._num_admitted -= 1
        self._free.append(self.version)
        self._vacancy.set()
        self._arrival.set()
