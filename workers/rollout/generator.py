"""One policy at one replica: the engine that speaks for it, and weights that change between or under running groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from rlsys.contracts import Busy
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.types import Acknowledged, EngineStats, PolicyVersion, ReplicaLoad, VersionSpan
from rlsys.util.deadlines import remote
from rlsys.weight_sync.sync import Manifest, change_weights
from workers.engines.engine import Completion, Engine, EngineChoice, Request
from workers.rollout.group_route import GroupRoute, PeerReplica, PolicyText, Scored
from workers.rollout.occupancy import Occupancy, Ticket
from workers.rollout.partial_responses import Fits, acknowledged_by
from workers.rollout.partial_stream import PartialStream

if TYPE_CHECKING:
    from torch import Tensor

ACKNOWLEDGEMENTS_KEPT = 64
"""Of the newest versions; those that running groups may have tokens of are kept, however many there are."""
REPLACEABLE = (WorkerDied, DeadlineExceeded, WeightsMismatch)
"""Failures of a worker: it is replaced, and the group issued again."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """How a replica takes in new weights."""

    when: Literal["between", "inflight", "beside"]
    """Once no group is running; or under running groups; or beside the weights that those go on with."""
    tolerance: float
    """Mean |difference| of logprobs to the trainer's own, in nats, above which the engine does not compute with the
    weights it was given."""


Pulled: TypeAlias = "tuple[Manifest, Mapping[str, Tensor]]"
"""One version: what it consists of, and its tensors by name."""


class Puller(Protocol):
    """Where a replica gets weights from."""

    async def pull(self, at_least: PolicyVersion) -> Pulled:
        """The newest published weights, no older than `at_least`. Raises `DeadlineExceeded`."""
        ...


class Generator:
    """Implements `rlsys.weight_sync.sync.Replica` and `PeerReplica`: what a replica generates with for one policy."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        speech: PolicyText,
        puller: Puller | None,
        change: WeightChange,
        recorder: PartialStream | None = None,
        choice: EngineChoice | None = None,
    ) -> None:
        """`name` is the replica's. Without a `puller` it keeps the weights its engine was built with; without a
        `recorder` what it samples is lost with it. `choice` is how the engine was chosen, if it was."""
        self.name, self.choice = name, choice
        self._engine, self._speech, self._puller = engine, speech, puller
        self._change, self._recorder = change, recorder
        self._acknowledged: dict[PolicyVersion, Acknowledged] = {}
        self._changing = asyncio.Lock()
        self._gate_open = True
        self._is_loading = False
        self._why_closed: WorkerError | None = None
        self._here = Occupancy(engine)
        self._groups: dict[Ticket, GroupRoute] = {}
        self._gone: set[str] = set()
        self._pulls: list[Busy] = []
        self._recording: asyncio.Task[None] | None = None

    def begin(self, ticket: Ticket) -> GroupRoute:
        """A group begins to be played here; see `is_ready`."""
        self._here.enter(ticket)
        if self._recorder and self._recording is None:
            work = self._recorder.run(self._engine, self._here, self._acknowledged)
            self._recording = asyncio.create_task(work)
        self._groups[ticket] = GroupRoute(ticket, self._speech, place=self, held=self.acknowledged, score=self.score)
        return self._groups[ticket]

    async def recall(self, policy: GroupRoute, version: PolicyVersion) -> None:
        """Begin with what an earlier attempt at this group sampled, as far as it can be gone on with on the weights
        held here; `version` is that of the assignment."""
        held = self.acknowledged
        if self._recorder is None or held is None:
            return
        fits = Fits(version) if self._change.when == "inflight" else Fits(held.version, held.version)
        policy.recalled = await self._recorder.recall(policy.ticket.group_id, self._acknowledged, fits)

    async def end(self, policy: GroupRoute, *, is_again: bool, keep_partials: bool) -> None:
        """A group is played no more. `is_again`: it may have been noted in an earlier attempt."""
        del self._groups[policy.ticket]
        await _evict(policy.place, policy.ticket)
        if self._recorder and not keep_partials and (is_again or self._recorder.is_due(policy.since_s)):
            await self._recorder.forget(policy.ticket)

    async def vouched(self, policy: GroupRoute, versions: Sequence[VersionSpan]) -> tuple[Acknowledged, ...]:
        """The acknowledgements of these versions, of which a group has tokens. Waits for a change under way, which will
        tell whether its tokens can be vouched for."""
        held = acknowledged_by(policy.recalled.values())
        if any(span.version not in {**held, **self._acknowledged} for span in versions):
            async with self._changing:
                pass
        held |= self._acknowledged
        return tuple(held[span.version] for span in versions if span.version in held)

    def stats(self) -> EngineStats:
        """Of its engine, at this moment."""
        return self._engine.stats()

    # -------------------------------------------------------------------------------------------------- moving groups

    def load(self) -> ReplicaLoad:
        """What runs here now. A group that waits on its tools counts, though its engine has nothing to do for it."""
        held, stats = self.acknowledged, self._engine.stats()
        version = self._engine.version if held is None else held.version
        stats = replace(stats, num_running=max(stats.num_running, len(self._here)))
        return ReplicaLoad(self.name, version, stats, self._is_loading)

    @remote("giving what runs on {source} to {to.name}", patience=3)
    async def give_away(self, source: str, to: PeerReplica) -> tuple[int, ...]:
        """Let `to` go on with all groups of this replica whose tokens are sampled at `source`, here or as guests.

        Returns their group_ids, once nothing of them runs at `source`; none if `to` refuses.
        """
        moving = [policy for policy in self._groups.values() if policy.place.name == source]
        if not moving or not await self._are_hosted(moving, to):
            return ()
        left, ended = [], []
        for policy in moving:
            is_there = policy.ticket in self._groups and policy.place.name == source
            (left if is_there else ended).append(policy)
        places = [policy.place for policy in left]
        for policy in left:
            policy.place = to
        await asyncio.gather(
            *(_evict(place, policy.ticket, keep_cache=True) for place, policy in zip(places, left, strict=True)),
            *(_evict(to, policy.ticket) for policy in ended),
        )
        return tuple(policy.ticket.group_id for policy in left)

    async def _are_hosted(self, moving: Sequence[GroupRoute], to: PeerReplica) -> bool:
        """Does `to` take them? All that is at one place is of one version."""
        if (held := moving[0].held) is None:
            return False
        tickets = [policy.ticket for policy in moving]
        try:
            return await to.host(tickets, held)
        except WorkerError:  # it may have taken them, and only its answer is missing
            await asyncio.gather(*(_evict(to, ticket) for ticket in tickets))
            raise

    @remote("taking guests")
    async def host(self, tickets: Sequence[Ticket], held: Acknowledged) -> bool:
        """See `PeerReplica.host`. Weights change neither while guests are here, nor under them."""
        mine = self.acknowledged
        same = mine is not None and (mine.version, mine.hash) == (held.version, held.hash)
        is_gone = any(ticket.owner in self._gone for ticket in tickets)
        if not same or is_gone or self._is_loading or self._change.when != "between":
            return False
        for ticket in tickets:
            self._here.enter(ticket)
        return True

    @remote("sampling for group {ticket.group_id} of {ticket.owner}", patience=inf)
    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        """See `PeerReplica.serve`."""
        return await self._here.generate(ticket, request)

    async def score(self, token_ids: tuple[int, ...]) -> Scored:
        """How likely these tokens are, at temperature 1; asked again if the weights changed meanwhile."""
        while True:
            version = self._engine.version
            logprobs = await self._engine.score(token_ids)
            if self._engine.version == version:
                return Scored(logprobs, version)

    @remote("letting a group go")
    async def evict(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        """See `PeerReplica.evict`."""
        await self._here.leave(ticket, keep_cache=keep_cache)

    async def forget(self, owner: str) -> None:
        """Replica `owner` is gone for good: nobody waits for its groups any more."""
        self._gone.add(owner)
        await asyncio.gather(*(self._here.leave(stay.ticket) for stay in self._here if stay.ticket.owner == owner))

    # ------------------------------------------------------------------------------------------------ changing weights

    async def ensure_version(self, version: PolicyVersion) -> None:
        """Return once this replica holds weights no older than `version`.

        Waits for a change under way, then, if it still holds older ones, changes them itself. Unblocked by the relay
        getting the version, and (`between`) by running groups ending. Waits for no change that it does not need, but
        `between`, where a group that starts would hold that change back.
        """
        if self._puller is None or (self._is_new_enough(version) and self._change.when != "between"):
            return
        async with self._changing:
            if not self._gate_open:
                detail = f"an earlier weight change failed, restart the replica: {self._why_closed}"
                raise WeightsMismatch(self.name, "starting a group", detail)
            if not self._acknowledged or max(self._acknowledged) < version:
                began_s = time.monotonic()
                manifest, weights = await self._staged(self._puller, version)
                if self._change.when == "between" and len(self._here):
                    await self._here.empty()  # which may take long
                    began_s = time.monotonic()
                    manifest, weights = await self._staged(self._puller, version, before=(manifest, weights))
                held = await change_weights(self, manifest, lambda: self._engine.load(manifest.version, weights))
                self._acknowledged[held.version] = held
                self._pulls.append(Busy(self.name, began_s, time.monotonic()))
                self._forget_acknowledged()

    def take_pulls(self) -> tuple[Busy, ...]:
        """When weights were taken in since this was last asked, from the pull to the open gate.

        Where groups had to end first, from then on: while they ran, the pull held nothing up.
        """
        pulls, self._pulls = tuple(self._pulls), []
        return pulls

    def is_ready(self, version: PolicyVersion) -> bool:
        """May a group that needs `version` or newer begin at this moment? So it is when `ensure_version` returns, and
        until something is awaited."""
        is_changing = self._change.when == "between" and self._changing.locked()
        return self._puller is None or (self._is_new_enough(version) and not is_changing)

    def _is_new_enough(self, version: PolicyVersion) -> bool:
        held = self.acknowledged
        return self._gate_open and held is not None and held.version >= version

    def _forget_acknowledged(self) -> None:
        begun_on = [policy.held.version for policy in self._groups.values() if policy.held]
        for version in sorted(self._acknowledged)[:-ACKNOWLEDGEMENTS_KEPT]:
            if version < min(begun_on, default=version + 1):
                del self._acknowledged[version]

    async def _staged(self, puller: Puller, version: PolicyVersion, before: Pulled | None = None) -> Pulled:
        """The newest weights, ready to be loaded; those of `before`, which are, if there are no newer ones.

        A relay that fails is not the run's end: this replica is named, which can be replaced.
        """
        try:
            manifest, weights = await puller.pull(version)
        except REPLACEABLE as error:
            raise type(error)(self.name, f"pulling version {version} or newer", str(error)) from error
        if manifest.version < version:
            detail = f"asked for version {version} or newer, and got {manifest.version}"
            raise WeightsMismatch(self.name, "pulling weights", detail)
        if before is not None and before[0].version >= manifest.version:
            return before
        await self._engine.stage(weights)
        return manifest, weights

    def close_gate(self) -> None:
        self._gate_open = False

    async def pause(self) -> None:
        if self._change.when == "between":
            await self._here.empty()
        self._is_loading = True  # from here no guest comes in
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def verify_probe(self, manifest: Manifest) -> float | None:
        """The hash says which bytes came; this, that the engine computes with them and not with something far off.

        It cannot tell weights apart whose logprobs differ by less than the tolerance.
        """
        if manifest.probe is None:
            return None
        difference = manifest.probe.difference(await self._engine.score(manifest.probe.token_ids))
        if not difference <= self._change.tolerance:
            before = self.acknowledged
            raise WeightsMismatch(
                self.name,
                f"verifying version {manifest.version}",
                f"its logprobs differ by {difference:.4g} on average from the trainer's own of version "
                f"{manifest.version}, {self._change.tolerance:g} is tolerated (rollout.probe_tolerance); before the "
                f"change it held {'no version' if before is None else f'version {before.version}'}",
            )
        return difference

    async def stop(self, why: WorkerError) -> None:
        """End every request; what was rolled out here so far is not returned."""
        self._why_closed = why
        await self._engine.close()

    def open_gate(self) -> None:
        self._gate_open, self._is_loading = True, False

    @property
    def acknowledged(self) -> Acknowledged | None:
        """What this replica holds now; None before its first pull."""
        return self._acknowledged[max(self._acknowledged)] if self._acknowledged else None

    async def close(self) -> None:
        """Free the engine."""
        if self._recording:
            self._recording.cancel()
        await self._engine.close()


async def _evict(place: PeerReplica, ticket: Ticket, *, keep_cache: bool = False) -> None:
    """A place that is gone has let go of everything; who waits for a group there hears of it from its requests."""
    with suppress(WorkerError):
        await place.evict(ticket, keep_cache=keep_cache)
