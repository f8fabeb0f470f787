"""The pool of simulated replicas: implements `rlsys.contracts.Rollouts`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rlsys.contracts import RolledOut
from rlsys.errors import WorkerDied
from rlsys.schedule.router import Router, request_weight
from rlsys.simulate.playing import Environments, TurnRouter
from rlsys.simulate.profile import Profile
from rlsys.simulate.relays import SimRelays
from rlsys.simulate.replica import SimReplica
from rlsys.simulate.work import Workload
from rlsys.types import Acknowledged, Assignment, PolicyVersion, ReplicaLoad


@dataclass(slots=True)
class _Journey:
    """One group on its way: given to `owner`, its tokens sampled at `place`."""

    owner: str
    place: int
    weight: int


class SimRollouts:
    """Replicas of one profile, the `Router` of runs before them."""

    def __init__(self, profile: Profile, relays: SimRelays) -> None:
        self._profile, self._relays = profile, relays
        self._workload = Workload(profile)
        self._hashes: dict[PolicyVersion, str] = {}
        self._environments = Environments(profile.environments) if profile.environments else None
        self._router = Router(profile.num_replicas)
        self._generations: Counter[int] = Counter()
        """Replicas that had each place so far."""
        self.replicas = [self._replica(place) for place in range(profile.num_replicas)]
        self.turns: TurnRouter | None = None
        if profile.routing != "group":
            self.turns = TurnRouter(self.replicas, by_prefix=profile.routing == "prefix")
        self.ended: list[SimReplica] = []
        """Those that died, with what they did."""
        self.num_moved = 0
        """Groups moved, so far."""
        self._journeys: dict[int, _Journey] = {}
        """Groups under way, by serial."""
        self._recovering: dict[str, asyncio.Task[None]] = {}

    async def run(self, assignment: Assignment) -> RolledOut:
        weight = assignment.size * request_weight(self._workload.prompt_tokens(assignment.serial))
        place = self._router.route(weight, session=assignment.serial)
        replica = self.replicas[place]
        journey = self._journeys[assignment.serial] = _Journey(replica.name, place, weight)
        try:
            if self.turns is not None:  # its turns may go anywhere: no replica may hold less than it asks for
                await asyncio.gather(*(r.hold(assignment.version) for r in self.replicas if not r.is_dead))
            done = await replica.run(assignment, self.turns)
        except WorkerDied as error:
            self._leave(error.worker)
            raise
        finally:
            del self._journeys[assignment.serial]
            self._router.release(journey.place, weight)
        self._router.report(journey.place, done.stats)
        return done

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        """Replace a dead replica in the background; waits only if none lives."""
        places = self._leave(worker) if worker not in self._recovering else []
        for place in places:
            dead = self.replicas[place]
            self._recovering[worker] = asyncio.create_task(self._replace(dead, place, on_recovery))
        if all(replica.is_dead for replica in self.replicas):
            await asyncio.wait(self._recovering.values(), return_when=asyncio.FIRST_COMPLETED)

    async def versions(self) -> Sequence[Acknowledged]:
        live = [r for r in self.replicas if r.version >= 0 and not r.is_dead]
        return [Acknowledged(r.name, r.version, self._hashes[r.version]) for r in live]

    async def loads(self) -> Sequence[ReplicaLoad]:
        return [replica.load() for replica in self.replicas if not replica.is_dead]

    async def move(self, source: str, to: str) -> int:
        places = {replica.name: place for place, replica in enumerate(self.replicas) if not replica.is_dead}
        giver, taker = places.get(source), places.get(to)
        if giver is None or taker is None or giver == taker:
            return 0
        serials = self.replicas[giver].move_to(self.replicas[taker])
        for journey in (self._journeys[serial] for serial in serials):
            self._router.transfer(giver, taker, journey.weight)
            journey.place = taker
        self.num_moved += len(serials)
        return len(serials)

    def whereabouts(self) -> Mapping[int, str]:
        return {serial: journey.owner for serial, journey in self._journeys.items()}

    def kill(self, place: int) -> str:
        """The replica at this place dies; returns its name."""
        self.replicas[place].die()
        return self.replicas[place].name

    # ------------------------------------------------------------------------------------------------------- replacing

    def _replica(self, place: int) -> SimReplica:
        generation = self._generations[place]
        self._generations[place] += 1
        name = f"rollout-{place}" + (f".{generation}" if generation else "")
        node = place // self._profile.replicas_per_node
        pull = partial(self._relays.pull, node)
        return SimReplica(name, self._profile, self._workload, pull, self._hashes, self._environments)

    def _leave(self, worker: str) -> list[int]:
        places = [place for place, replica in enumerate(self.replicas) if replica.name == worker]
        for place in places:
            self._router.leave(place)
            if self.turns is not None:
                self.turns.leave(place)
        return places

    async def _replace(self, dead: SimReplica, place: int, on_recovery: Callable[[str, float], None]) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(self._profile.restart_s)
        replica = self._replica(place)
        await replica.hold(max(r.version for r in self.replicas))
        self.ended.append(dead)
        self.replicas[place] = replica
        self._router.join(place)
        if self.turns is not None:
            self.turns.join(place)
        on_recovery(dead.name, asyncio.get_running_loop().time() - began)
