"""The driver's view of the rollout replicas: implements `Rollouts` and `PinnedRollouts`.

A group's payload is a return value of the rollout's call, so the driver owns it (it survives the replica's process);
but the driver holds only a reference, and reads only the other return value, the metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray._private.object_ref_generator import ObjectRefGenerator

from rlsys.contracts import RolledOut
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerDied, WorkerError
from rlsys.schedule.router import Router, request_weight
from rlsys.types import Acknowledged, Assignment, PolicyVersion, Prompt, ReplicaLoad
from workers.cluster import RayActor, call
from workers.peers import ANSWER_S, RayPartials, RayPeer
from workers.pools import Member, Pool, Supply
from workers.relays import RayRelays

CHARACTERS_PER_TOKEN = 4
"""Estimate of a prompt's tokens where there is no tokenizer; it only weighs groups against each other."""


@dataclass(eq=False)
class _Journey:
    """One group on its way: given to `owner`, its tokens sampled at `place`."""

    serial: int
    owner: Member
    place: Member
    weight: int


class RolloutPool(Pool):
    """Implements `Rollouts`. Which replica plays a group is the `Router`'s choice."""

    def __init__(self, supply: Supply, kind: str = "rollout", partials: RayPartials | None = None) -> None:
        """`partials` is where replicas keep what groups have sampled, if they do."""
        self._router = Router(supply.size)
        self._partials = partials
        self._journeys: set[_Journey] = set()
        self._failed: set[int] = set()
        """Serials of groups whose last attempt failed: the next goes on with what is kept of it."""
        super().__init__(kind, "rolling out", supply)

    async def run(self, assignment: Assignment) -> RolledOut:
        serial, text = assignment.serial, _text(assignment.task.prompt)
        is_again = serial in self._failed
        await self._serving()
        among = await self._holders(serial) if is_again else None
        weight = assignment.size * request_weight(len(text) // CHARACTERS_PER_TOKEN)
        # Groups of one task on the same weights find its prompt cached: a task evaluated again, a group retried.
        owner = self.members[self._router.route(weight, session=hash((assignment.version, text)), among=among)]
        journey = _Journey(serial, owner, owner, weight)
        self._journeys.add(journey)
        try:
            done, payload = await self._do(owner, (assignment, is_again), f"rolling out group {serial}")
        except (WorkerDied, DeadlineExceeded, WeightsMismatch):
            self._failed.add(serial)
            raise
        finally:
            self._journeys.discard(journey)
            self._router.release(journey.place.index, weight)
        assert isinstance(done, RolledOut)
        self._failed.discard(serial)
        self._router.report(owner.index, done.stats)
        return replace(done, group=replace(done.group, payload=payload))

    async def _holders(self, serial: int) -> set[int] | None:
        """Places whose replica holds the version that an earlier attempt at this group came to; None if any will do."""
        version = None
        if self._partials is not None:
            with suppress(WorkerError):  # without the pool the group begins from scratch, anywhere
                version = await self._partials.version(serial)
        if version is None:
            return None
        return {member.index for member, held in await self._held() if held.version == version}

    async def versions(self) -> Sequence[Acknowledged]:
        return [held for _, held in await self._held()]

    async def _held(self) -> list[tuple[Member, Acknowledged]]:
        told = await self._ask_all("telling its version", lambda m: m.actor.held.remote())
        return [(member, held) for member, held in told if held is not None]

    async def loads(self) -> Sequence[ReplicaLoad]:
        return [load for _, load in await self._ask_all("telling its load", lambda m: m.actor.load.remote())]

    async def move(self, source: str, to: str) -> int:
        giver, taker = self._called(source), self._called(to)
        if giver is None or taker is None or giver is taker or not taker.is_live:
            return 0
        owners = {journey.owner for journey in self._journeys if journey.place is giver}
        peer = RayPeer(taker.name, taker.actor)
        phase = f"giving what runs on {source} to {to}"
        asked = [m for m in self.members if m in owners and m.is_live]
        told = await self._ask(asked, phase, lambda m: m.actor.give_away.remote(source, peer))
        moved = {(owner, serial) for owner, serials in told for serial in serials}
        for journey in self._journeys:
            if journey.place is giver and (journey.owner, journey.serial) in moved:
                self._router.transfer(giver.index, taker.index, journey.weight)
                journey.place = taker
        return len(moved)

    def whereabouts(self) -> Mapping[int, str]:
        return {journey.serial: journey.owner.name for journey in self._journeys}

    async def _ask_all(self, phase: str, ask: Callable[[Member], Any]) -> list[tuple[Member, Any]]:
        return await self._ask([member for member in self.members if member.is_live], phase, ask)

    async def _ask(
        self, members: Sequence[Member], phase: str, ask: Callable[[Member], Any]
    ) -> list[tuple[Member, Any]]:
        """What each member answers. One that does not is left out: whoever waits for its groups finds out."""
        calls = [call(ask(member), member.name, phase, 3 * ANSWER_S) for member in members]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied | DeadlineExceeded):
                raise answer
        return [(m, a) for m, a in zip(members, answers, strict=True) if not isinstance(a, BaseException)]

    def _joined(self, member: Member) -> None:
        self._router.join(member.index)

    def _left(self, member: Member) -> None:
        self._router.leave(member.index)

    def _succeeded(self, member: Member) -> Member:
        successor = super()._succeeded(member)
        self._spawn(self._forgotten(member))
        return successor

    async def _forgotten(self, dead: Member) -> None:
        """Have the others let go of what they host for a dead replica."""
        await self._ask_all(f"forgetting {dead.name}", lambda m: m.actor.forget.remote(dead.name))

    def _send(self, actor: RayActor, requests: list[tuple[Assignment, bool]]) -> ObjectRefGenerator:
        return actor.run.remote(requests)


class PinnedRolloutPool(RolloutPool):
    """Implements `PinnedRollouts`: its replicas pull from the relays, but exactly the version that is pinned there."""

    def __init__(self, supply: Supply, relays: RayRelays) -> None:
        super().__init__(supply, kind="eval")
        self._relays = relays

    async def hold(self, version: PolicyVersion) -> None:
        await self._relays.pin(version)


def _text(prompt: Prompt) -> str:
    """All that a prompt says."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
