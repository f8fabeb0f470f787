"""The driver's view of the rollout replicas: implements `Rollouts` and `PinnedRollouts`.

The payload of a group is a return value of the rollout call, so the driver owns it and it survives the replica. The
driver keeps only a reference to the payload, and reads only the metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from rlsys.errors import DeadlineExceeded, RlsysError, WeightsMismatch, WorkerDied, WorkerError
from rlsys.loop.router import Router, request_weight
from rlsys.types import POLICY, Assignment, Group, PolicyVersion, Prompt, ReplicaLoad
from rlsys.util.deadlines import timeout
from workers.ray.call_stream import PayloadRef
from workers.ray.pool import Pool, PoolMember, PoolSpec
from workers.ray.remote_proxy import Chunks, Remote
from workers.relay.relay_pool import RayRelays
from workers.rollout.generator import Generator
from workers.rollout.partial_responses import Partials
from workers.rollout.rollout_worker import RolloutWorker

T = TypeVar("T")
ANSWER_S = 30.0
"""Deadline of a call that does not sample."""
QUESTION_S = 2.0
"""Deadline of a call whose answer only improves a choice."""
STUCK_S = 5.0
"""Age of a step from which other replicas are preferred."""
CHARACTERS_PER_TOKEN = 4
"""Estimate for a prompt where there is no tokenizer. It only weighs groups against each other."""


@dataclass(eq=False)
class _Journey:
    """A group in flight, assigned to `owner`."""

    group_id: int
    owner: PoolMember[RolloutWorker]
    places: dict[str, PoolMember[RolloutWorker]]
    """Replicas that sample its tokens, by policy."""
    weight: int
    routed: PoolMember[RolloutWorker]
    """Replica to which the router charges its weight: the place of the first policy."""


class RolloutPool(Pool[RolloutWorker]):
    """Implements `Rollouts`. The `Router` chooses the replica of a group."""

    def __init__(
        self,
        supply: PoolSpec[RolloutWorker],
        kind: str = "rollout",
        partials: Mapping[str, Remote[Partials]] | None = None,
        policies: Sequence[str] = (POLICY,),
    ) -> None:
        """`partials` are the pools of partial responses, by policy, if there are any. `policies` are those of the
        replicas' engines, in their order."""
        self._router = Router(supply.size)
        for place in range(supply.size):
            self._router.leave(place)  # until it is set up
        self._partials, self._policies = partials or {}, tuple(policies)
        self._journeys: set[_Journey] = set()
        self._failed: set[int] = set()
        """Ids of groups whose last attempt failed. The next attempt continues from the kept tokens."""
        super().__init__(kind, "rolling out", supply)

    async def run(self, assignment: Assignment) -> tuple[Group, ...]:
        group_id, text = assignment.group_id, _text(assignment.task.prompt)
        weight = assignment.size * request_weight(len(text) // CHARACTERS_PER_TOKEN)
        is_again = group_id in self._failed
        self._failed.discard(group_id)
        among = await self._holders(group_id) if is_again else None
        await self._serving()  # nothing is awaited between this and the choice
        # Groups of one task on the same weights share a cached prompt, for example in a repeated evaluation or a retry.
        owner = self.members[self._router.route(weight, session=hash((assignment.version, text)), among=among)]
        journey = _Journey(group_id, owner, dict.fromkeys(self._policies, owner), weight, owner)
        self._journeys.add(journey)
        try:
            views, payload = await self._do(owner, (assignment, is_again), f"rolling out group {group_id}")
        except (WorkerDied, DeadlineExceeded, WeightsMismatch):
            self._failed.add(group_id)
            raise
        finally:
            self._journeys.discard(journey)
            self._router.release(journey.routed.index, weight)
        assert isinstance(views, tuple)
        report = views[0].report
        self._router.report(owner.index, report.stats if report else None)
        return tuple(replace(view, payload=payload) for view in views)

    async def _sent(self, member: PoolMember[RolloutWorker], request: object, phase: str) -> tuple[object, PayloadRef]:
        """Await the answer within the lease, which starts when the group starts.

        Before that, the group waits for weights. That wait depends only on groups that have leases too. The replica
        returns the age of the group only once the lease might be over.
        """
        assert isinstance(request, tuple)
        group_id, lease_s = request[0].group_id, self._supply.lease_s
        answer, left_s = asyncio.ensure_future(member.calls.call(request)), lease_s
        try:
            while left_s > 0:
                with suppress(TimeoutError):
                    async with timeout(left_s):
                        return await asyncio.shield(answer)
                age_s = await member.worker.call(RolloutWorker.age_s, group_id)
                left_s = 0.0 if age_s is None else lease_s - age_s
            raise DeadlineExceeded(member.name, phase, f"no answer within {lease_s:g} s of its start")
        finally:
            answer.cancel()

    async def _holders(self, group_id: int) -> set[int]:
        """Indices of replicas that answer and have the versions that an earlier attempt reached, of each policy that
        has sampled in it. All that answer if none has them."""
        reached: dict[str, PolicyVersion] = {}
        for policy, partials in self._partials.items():
            with suppress(WorkerError):  # without the pool, the group starts from scratch on any replica
                version = await partials.within(QUESTION_S).call(Partials.version, group_id)
                reached |= {} if version is None else {policy: version}
        live = self._live()
        told = await self._heard(live, [m.worker.within(QUESTION_S).call(RolloutWorker.held) for m in live])
        fitting = {
            member.index
            for member, held in told
            if reached and all(policy in held and held[policy].version == v for policy, v in reached.items())
        }
        return fitting or {member.index for member, _ in told}

    async def loads(self, policy: str = POLICY) -> Sequence[ReplicaLoad]:
        """See `Rollouts.loads`; `policy` selects one of several."""
        asked = [member.worker.within(QUESTION_S).call(RolloutWorker.load, policy) for member in self._live()]
        return [answer for answer in await _outcomes(asked) if not isinstance(answer, RlsysError)]

    async def move(self, source: str, to: str, policy: str = POLICY) -> int:
        """See `Rollouts.move`; only what one of several policies samples is moved."""
        giver, taker = self._called(source), self._called(to)
        if giver is None or taker is None or giver is taker or not taker.is_live:
            return 0
        owners = {journey.owner for journey in self._journeys if journey.places[policy] is giver}
        peer = self._generator(taker, policy).proxy
        asked = [member for member in self._live() if member in owners]
        calls = [self._generator(member, policy).call(Generator.give_away, source, peer) for member in asked]
        told = await self._heard(asked, calls)
        moved = {(owner, group_id) for owner, group_ids in told for group_id in group_ids}
        for journey in self._journeys:
            if journey.places[policy] is giver and (journey.owner, journey.group_id) in moved:
                journey.places[policy] = taker
                if policy == self._policies[0]:
                    self._router.transfer(giver.index, taker.index, journey.weight)
                    journey.routed = taker
        return len(moved)

    def _generator(self, member: PoolMember[RolloutWorker], policy: str) -> Remote[Generator]:
        return member.worker.at(Generator, f"places.{self._policies.index(policy)}")

    def placements(self) -> Mapping[int, str]:
        return {journey.group_id: journey.owner.name for journey in self._journeys}

    async def _heard(
        self, members: Sequence[PoolMember[RolloutWorker]], calls: Sequence[Awaitable[T]]
    ) -> list[tuple[PoolMember[RolloutWorker], T]]:
        """Answers of the members. Members that do not answer are left out, and dead ones are replaced."""
        answers = await _outcomes(calls)
        for answer in answers:
            if isinstance(answer, WorkerDied):
                self._notice(answer)
            elif isinstance(answer, RlsysError) and not isinstance(answer, DeadlineExceeded):
                raise answer
        return [(m, a) for m, a in zip(members, answers, strict=True) if not isinstance(a, RlsysError)]

    def _notice(self, death: WorkerDied) -> None:
        """Replace a dead replica now, before a group loses an attempt to it."""
        if (dead := self._called(death.worker)) is not None and dead.is_live:
            self.on_failure(death)
            self._replace(dead, self.on_recovery)

    async def _check(self, member: PoolMember[RolloutWorker]) -> None:
        """See `Pool._check`. A replica in a long step, or too busy to tell, is passed over until it goes on."""
        await super()._check(member)
        try:
            stats = await member.worker.within(QUESTION_S).call(RolloutWorker.stats)
        except DeadlineExceeded:
            is_stuck = True
        else:
            is_stuck = stats.step_age_s > STUCK_S
        if member.is_live:
            self._router.set_stuck(member.index, is_stuck)

    def _joined(self, member: PoolMember[RolloutWorker]) -> None:
        self._router.join(member.index)
        if len(live := self._live()) > 1:
            self._spawn(self._introduced(live))

    def _left(self, member: PoolMember[RolloutWorker]) -> None:
        self._router.leave(member.index)

    def _succeeded(self, member: PoolMember[RolloutWorker]) -> PoolMember[RolloutWorker]:
        successor = super()._succeeded(member)
        self._spawn(self._forgotten(member))
        return successor

    async def _introduced(self, live: Sequence[PoolMember[RolloutWorker]]) -> None:
        """Let all live replicas sample turns of each other's groups."""
        peers = [[other.worker for other in live if other is not member] for member in live]
        meetings = [m.worker.call(RolloutWorker.meet, others) for m, others in zip(live, peers, strict=True)]
        await self._heard(live, meetings)

    async def _forgotten(self, dead: PoolMember) -> None:
        """Evict the groups of a dead replica from all others."""
        live = self._live()
        await self._heard(live, [member.worker.call(RolloutWorker.forget, dead.name) for member in live])

    def _send(self, worker: Remote[RolloutWorker], requests: list[tuple[Assignment, bool]]) -> Chunks:
        return worker.stream(RolloutWorker.run_each, requests)


class PinnedRolloutPool(RolloutPool):
    """Implements `PinnedRollouts`: its replicas pull exactly the version that is pinned at the relays."""

    def __init__(self, supply: PoolSpec[RolloutWorker], relays: RayRelays) -> None:
        super().__init__(supply, kind="eval")
        self._relays = relays

    async def pin(self, version: PolicyVersion) -> None:
        await self._relays.pin(version)


def _text(prompt: Prompt) -> str:
    """Text of a prompt, without roles."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


async def _outcomes(calls: Sequence[Awaitable[T]]) -> list[T | RlsysError]:
    """Result of each call, or the `RlsysError` that it raises."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, RlsysError):
            raise outcome
    return cast("list[T | RlsysError]", outcomes)
