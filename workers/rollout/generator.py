"""One policy at one replica: its engine, and weight changes between groups or under running groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.loop.router import request_weight
from rlsys.types import Acknowledged, Busy, EngineStats, PolicyVersion, ReplicaLoad, VersionSpan
from rlsys.util.deadlines import remote
from rlsys.weight_sync.manifest import Manifest
from rlsys.weight_sync.sync import change_weights
from workers.engines.engine import Completion, Engine, EngineChoice, Request
from workers.rollout.group_route import EngineStay, GroupRoute, PolicyText, Ticket
from workers.rollout.partial_responses import PartialStream, usable
from workers.rollout.turn_router import TurnLoad, TurnRouter

if TYPE_CHECKING:
    from torch import Tensor

ACKNOWLEDGEMENTS_KEPT = 64
"""Newest versions whose acknowledgement is kept. Older ones are kept while running groups may have their tokens."""
NAMED = 3
"""Tensors that an error names; it counts the others."""
REPLACEABLE = (WorkerDied, DeadlineExceeded, WeightsMismatch)
"""Failures that replace the worker and reissue the group."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Settings of a replica's weight changes."""

    when: Literal["between", "inflight", "beside"]
    """`between`: once no group runs. `inflight`: under running groups. `beside`: those finish on their weights."""
    tolerance: float
    """Largest allowed mean |difference| between the engine's logprobs and the trainer's, in nats. A larger one means
    that the engine does not compute with the published weights."""


Pulled: TypeAlias = "tuple[Manifest, Mapping[str, Tensor]]"
"""One version: its manifest, and its tensors by name."""


class Puller(Protocol):
    """Source of a replica's weights."""

    async def pull(self, at_least: PolicyVersion) -> Pulled:
        """Return the newest published weights, no older than `at_least`. Raises `DeadlineExceeded`."""


class Generator:
    """Implements `rlsys.weight_sync.sync.Replica`: samples at one replica for one policy.

    A weight change between groups waits for the replica's own groups and for guests from other replicas.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        speech: PolicyText,
        puller: Puller | None,
        change: WeightChange,
        recorder: PartialStream | None = None,
        choice: EngineChoice | None = None,
        base: str | None = None,
        turns: TurnRouter | None = None,
    ) -> None:
        """`name` is that of the replica. Without a `puller` the engine keeps its initial weights. Without a `recorder`,
        sampled tokens are lost with the replica. `choice` is the reason for this engine, if there was a choice. `base`
        is the hash of the base to which the engine applies adapters, None if it loads whole weights. Without `turns`,
        every turn of a group is sampled where the group is."""
        self.name, self.choice, self._base = name, choice, base
        self._engine, self._speech, self._puller = engine, speech, puller
        self._change, self._recorder, self.turns = change, recorder, turns
        self._acknowledged: dict[PolicyVersion, Acknowledged] = {}
        self._changing = asyncio.Lock()
        self._settled = asyncio.Event()
        """Not set during a weight change."""
        self._settled.set()
        self._gate_open = True
        self._is_loading = False
        self._why_closed: WorkerError | None = None
        self._groups: dict[Ticket, GroupRoute] = {}
        """The groups whose sessions are here."""
        self._stays: dict[Ticket, EngineStay] = {}
        """The groups on this engine: those of this replica that have not moved, and guests."""
        self._num_running = self._weight_running = 0
        """Requests at the engine, and their total `request_weight`."""
        self._left = asyncio.Event()
        """Set when a group leaves the engine."""
        self._gone: set[str] = set()
        self._pulls: list[Busy] = []
        self._recording: asyncio.Task[None] | None = None

    def begin(self, ticket: Ticket) -> GroupRoute:
        """Register a group that starts here; see `is_ready`."""
        self._stays[ticket] = EngineStay(ticket)
        if self._recorder and self._recording is None:
            work = self._recorder.run(self._engine, self._stays, self._acknowledged)
            self._recording = asyncio.create_task(work)
        self._groups[ticket] = GroupRoute(
            ticket, self._speech, place=self, home=self, held=self.acknowledged, turns=self.turns
        )
        return self._groups[ticket]

    async def recall(self, policy: GroupRoute, version: PolicyVersion) -> None:
        """Load what an earlier attempt at this group sampled, if the loaded weights can continue it. `version` is that
        of the assignment."""
        held = self.acknowledged
        if self._recorder is None or held is None:
            return
        oldest, newest = (version, None) if self._change.when == "inflight" else (held.version, held.version)
        with suppress(WorkerError):  # without the pool, the group starts from scratch
            kept = await self._recorder.store.recall(policy.ticket.group_id)
            policy.recalled = usable(kept, self._acknowledged, oldest, newest)

    async def end(self, policy: GroupRoute, *, is_again: bool, keep_partials: bool) -> None:
        """Remove a group that has ended. `is_again`: an earlier attempt may have left partial responses in the pool."""
        del self._groups[policy.ticket]
        for place in {place.name: place for place in (policy.place, *policy.away.values())}.values():
            await _evict(place, policy.ticket)
        if self._recorder and not keep_partials and (is_again or self._recorder.is_due(policy.since_s)):
            with suppress(WorkerError):
                await self._recorder.store.forget(policy.ticket)

    async def vouched(self, policy: GroupRoute, versions: Sequence[VersionSpan]) -> tuple[Acknowledged, ...]:
        """The acknowledgements of these versions of the group's tokens. Waits for a weight change under way; unblocked
        by its end, which acknowledges the version or fails."""
        recalled = (a for partial in policy.recalled.values() for a in partial.weights)
        held = {a.version: a for a in (*recalled, *policy.vouched)}
        if any(span.version not in {**held, **self._acknowledged} for span in versions):
            await self._settled.wait()
        held |= self._acknowledged
        own = [held[span.version] for span in versions if span.version in held]
        return tuple(dict.fromkeys([*own, *policy.vouched]))

    def stats(self) -> EngineStats:
        """Current statistics of the engine."""
        return self._engine.stats()

    # -------------------------------------------------------------------------------------------------- moving groups

    def load(self) -> ReplicaLoad:
        """The current load. A group that waits for its tools counts, although it has no request at the engine."""
        held, stats = self.acknowledged, self._engine.stats()
        version = self._engine.version if held is None else held.version
        return ReplicaLoad(self.name, version, stats, self._is_loading, len(self._stays))

    @remote("giving what runs on {source} to {to.name}", patience=3)
    async def give_away(self, source: str, to: Generator) -> tuple[int, ...]:
        """Move all groups of this replica whose tokens are sampled at `source` to `to`.

        Returns their group ids once none of their requests runs at `source`; returns none if `to` refuses.
        """
        moving = [policy for policy in self._groups.values() if policy.place.name == source]
        if not moving or (held := moving[0].held) is None:  # all of them have the same version
            return ()
        tickets = [policy.ticket for policy in moving]
        try:
            if not await to.host(tickets, held):
                return ()
        except WorkerError:  # the groups may be there: only the answer is missing
            await asyncio.gather(*(_evict(to, ticket) for ticket in tickets))
            raise
        moved, evictions = [], []
        for policy in moving:
            if policy.ticket in self._groups and policy.place.name == source:
                evictions.append(_evict(policy.place, policy.ticket, keep_cache=True))
                policy.place = to
                moved.append(policy.ticket.group_id)
            else:  # it has ended meanwhile
                evictions.append(_evict(to, policy.ticket))
        await asyncio.gather(*evictions)
        return tuple(moved)

    @remote("taking guests")
    async def host(self, tickets: Sequence[Ticket], held: Acknowledged) -> bool:
        """Accept groups of another replica; False if this replica does not have exactly the weights `held`, or soon
        changes them. The weights do not change while these groups are here."""
        mine = self.acknowledged
        same = mine is not None and (mine.version, mine.hash) == (held.version, held.hash)
        is_gone = any(ticket.owner in self._gone for ticket in tickets)
        if not same or is_gone or self._is_loading or self._change.when != "between":
            return False
        for ticket in tickets:
            stay = self._stays.get(ticket)
            if stay is None or stay.is_over:
                stay = self._stays[ticket] = EngineStay(ticket)
            stay.is_visit = False
        return True

    @remote("telling how busy it is")
    async def turn_load(self) -> TurnLoad:
        """The current load for other replicas that have more turns than slots. There is no room for them while weights
        change or, `between` groups, a change waits for the groups here."""
        is_changing = self._is_loading or (self._change.when == "between" and not self._settled.is_set())
        has_room = self.has_slot and self._gate_open and not is_changing
        return TurnLoad(self._weight_running, has_room, self.acknowledged)

    @property
    def has_slot(self) -> bool:
        """True if the engine would start another request at once. Turns of the groups here need no more, because a
        change of weights may wait for them."""
        return self.turns is not None and self._num_running < self.turns.num_slots

    @remote("sampling a turn for group {ticket.group_id} of {ticket.owner}", patience=inf)
    async def visit(
        self, ticket: Ticket, request: Request, held: Acknowledged | None
    ) -> tuple[Completion, tuple[Acknowledged, ...]]:
        """Sample a single turn of another replica's group. Returns it with the acknowledgements of its versions.

        Finish `abort` if this replica does not, or no longer, sample from `held`, or has no room: then with its tokens
        so far. Raises the errors of the engine.
        """
        load = await self.turn_load()
        if not load.fits(held) or ticket.owner in self._gone:
            return replace(request.begun or Completion((), (), (), None), finish="abort"), ()
        stay = self._stays.setdefault(ticket, EngineStay(ticket, is_visit=True))
        try:
            done = await self.serve(ticket, request)
        finally:
            if stay.is_visit and not stay.running and self._stays.get(ticket) is stay:
                del self._stays[ticket]
                self._left.set()
        new = done.since(request.num_begun).versions
        if any(span.version not in self._acknowledged for span in new):
            await self._settled.wait()
        return done, tuple(self._acknowledged[span.version] for span in new if span.version in self._acknowledged)

    @remote("sampling for group {ticket.group_id} of {ticket.owner}", patience=inf)
    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        """Sample a request of a group on this engine.

        Finish `abort` if the group has left, before or during the call: then with its tokens so far, to continue
        elsewhere. Raises the errors of the engine.
        """
        stay = self._stays.get(ticket)
        if stay is None or stay.is_over:
            return replace(request.begun or Completion((), (), (), None), finish="abort")
        weight = request_weight(len(request.prompt_ids) + request.num_begun)
        stay.running[request.id] = request
        self._num_running, self._weight_running = self._num_running + 1, self._weight_running + weight
        try:
            done = await self._engine.generate(request)
        finally:
            del stay.running[request.id]
            self._num_running, self._weight_running = self._num_running - 1, self._weight_running - weight
            stay.quiet.set()
        if done.finish != "abort":
            stay.finished.append((request, done))
        return done

    @remote("reporting what is sampled")
    async def sampled_so_far(self, request_id: str) -> tuple[int, ...]:
        """Tokens of a running request on this engine; none if it does not run here."""
        done = (await self._engine.progress({request_id: 0})).get(request_id)
        return done.output_ids if done else ()

    async def score(self, token_ids: tuple[int, ...]) -> tuple[tuple[float, ...], PolicyVersion]:
        """Logprobs of `token_ids[1:]` at temperature 1, and their version. Scores again if the weights changed
        meanwhile."""
        while True:
            version = self._engine.version
            logprobs = await self._engine.score(token_ids)
            if self._engine.version == version:
                return logprobs, version

    @remote("letting a group go")
    async def evict(self, ticket: Ticket, *, keep_cache: bool = False) -> None:
        """Abort the requests of a group, and return once they have ended. Does nothing if the group is not here.

        `keep_cache`: the tokens come with their keys and values, if the engine supports it.
        """
        if (stay := self._stays.get(ticket)) is None:
            return
        stay.is_over = True
        for request_id in stay.running:
            self._engine.abort(request_id, keep_cache=keep_cache)
        while stay.running:
            stay.quiet.clear()
            await stay.quiet.wait()
        self._stays.pop(ticket, None)
        self._left.set()

    async def forget(self, owner: str) -> None:
        """Abort the requests for replica `owner`, which has died."""
        self._gone.add(owner)
        await asyncio.gather(*(self.evict(ticket) for ticket in self._stays if ticket.owner == owner))

    async def _emptied(self) -> None:
        """Return once no group is on the engine; unblocked by the last group leaving."""
        while self._stays:
            self._left.clear()
            await self._left.wait()

    # ------------------------------------------------------------------------------------------------ changing weights

    async def ensure_version(self, version: PolicyVersion) -> None:
        """Return once this replica has weights no older than `version`.

        Waits for a change under way, then pulls weights itself if they are still older. Unblocked by the relay
        receiving the version, and (`between`) by running groups ending. Waits for a change that it does not need only
        with `between`, where a group that starts would delay that change.
        """
        if self._puller is None or (self._is_new_enough(version) and self._change.when != "between"):
            return
        while not self._settled.is_set():
            await self._settled.wait()  # an event: all groups that wait go on at once, and are sampled together
        if not self._is_new_enough(version):
            async with self._changing:
                await self._change_to(self._puller, version)

    async def _change_to(self, puller: Puller, version: PolicyVersion) -> None:
        """Change to `version` or newer, unless that has been done meanwhile; the caller holds `_changing`."""
        if not self._gate_open:
            detail = f"an earlier weight change failed, restart the replica: {self._why_closed}"
            raise WeightsMismatch(self.name, "starting a group", detail)
        if self._is_new_enough(version):
            return
        self._settled.clear()
        try:
            began_s = time.monotonic()
            manifest, weights = await self._staged(puller, version)
            if self._change.when == "between" and self._stays:
                await self._emptied()  # may take long
                began_s = time.monotonic()
                manifest, weights = await self._staged(puller, version, before=(manifest, weights))
            held = await change_weights(self, manifest, lambda: self._engine.load(manifest.version, weights))
            self._acknowledged[held.version] = held
            self._pulls.append(Busy(self.name, began_s, time.monotonic()))
            self._forget_acknowledged()
        finally:
            self._settled.set()

    def take_pulls(self) -> tuple[Busy, ...]:
        """Periods of the weight changes since the last call, from the pull to the open gate.

        With `between`, a period starts when the running groups have ended: before that, the pull delays no group.
        """
        pulls, self._pulls = tuple(self._pulls), []
        return pulls

    def is_ready(self, version: PolicyVersion) -> bool:
        """True if a group that needs `version` or newer may begin now. True when `ensure_version` returns, and until
        the next `await`."""
        is_changing = self._change.when == "between" and not self._settled.is_set()
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
        """Pull and stage the newest weights. Returns `before`, which is already staged, if there are no newer weights.

        A failure of the relay is raised with this replica's name, because a replica can be replaced.
        """
        try:
            manifest, weights = await puller.pull(version)
        except REPLACEABLE as error:
            raise type(error)(self.name, f"pulling version {version} or newer", str(error)) from error
        if manifest.version < version:
            detail = f"asked for version {version} or newer, and got {manifest.version}"
            raise WeightsMismatch(self.name, "pulling weights", detail)
        if manifest.base != self._base:
            detail = (
                f"version {manifest.version} is {_kind(manifest.base)}, and this replica loads {_kind(self._base)}: "
                "give every machine the same files at model.path"
            )
            raise WeightsMismatch(self.name, "pulling weights", detail)
        if before is not None and before[0].version >= manifest.version:
            return before
        await self._engine.stage(weights)
        return manifest, weights

    def close_gate(self) -> None:
        self._gate_open = False

    async def pause(self) -> None:
        if self._change.when == "between":
            await self._emptied()
        self._is_loading = True  # from here, no guest is accepted
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def verify_weights(self, manifest: Manifest) -> str:
        """Check every tensor that the engine computes with. A step changes few of the rounded weights, and logprobs so
        little that the probe's tolerance would let a stale tensor pass."""
        held = await self._engine.checksums()
        if manifest.checksums and not held:
            detail = (
                "the engine cannot tell which of the published tensors it computes with; use another rollout.engine"
            )
            raise WeightsMismatch(self.name, f"verifying version {manifest.version}", detail)
        wrong = sorted(spec.name for spec, value in held.items() if manifest.checksums.get(spec) != value)
        if wrong:
            detail = (
                f"the engine computes with other values than those published of {_first(wrong)}; the bytes were "
                "damaged on their way, or the engine left a tensor as it was: restart the replica"
            )
            raise WeightsMismatch(self.name, f"verifying version {manifest.version}", detail)
        return manifest.hash

    async def verify_probe(self, manifest: Manifest) -> float | None:
        """Check that the engine computes as the trainer does: also what is no weight, and weights left out by
        `Engine.checksums`.

        Returns the mean difference of logprobs. Cannot detect weights whose logprobs differ by less than the tolerance.
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
        """End every request; unfinished rollouts are not returned."""
        self._why_closed = why
        await self._engine.close()

    def open_gate(self) -> None:
        self._gate_open, self._is_loading = True, False

    @property
    def acknowledged(self) -> Acknowledged | None:
        """The acknowledgement of the loaded weights; None before the first pull."""
        return self._acknowledged[max(self._acknowledged)] if self._acknowledged else None

    async def close(self) -> None:
        if self._recording:
            self._recording.cancel()
        await self._engine.close()


def _first(names: Sequence[str]) -> str:
    """The first names, and how many there are: `a, b, c and 7 more of 10 tensors`."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more} ({len(names)} tensors)"


def _kind(base: str | None) -> str:
    return "whole weights" if base is None else f"an adapter of the base {base}"


async def _evict(place: Generator, ticket: Ticket, *, keep_cache: bool = False) -> None:
    """Evict a group. A replica that has died is ignored: the requests of the group raise its error."""
    with suppress(WorkerError):
        await place.evict(ticket, keep_cache=keep_cache)
