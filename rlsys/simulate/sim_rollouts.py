"""Pool of simulated replicas: implements `rlsys.contracts.Rollouts`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.contracts import RolledOut
from rlsys.errors import WorkerDied
from rlsys.loop.router import Router, request_weight
from rlsys.simulate.fake_pools import FakePool
from rlsys.simulate.sim_cluster import SimCluster
from rlsys.simulate.sim_replica import SimReplica
from rlsys.simulate.sim_session import Environments, TurnRouter
from rlsys.simulate.workload import Workload
from rlsys.types import Acknowledged, Assignment, ReplicaLoad


@dataclass(slots=True)
class _Routed:
    """Running group, whose tokens are sampled at `place`."""

    place: int
    weight: int


class SimRollouts(FakePool):
    """Replicas of one profile behind the `Router` that runs use."""

    def __init__(self, cluster: SimCluster) -> None:
        profile = cluster.profile
        super().__init__(cluster, "rollout", profile.num_replicas, {})
        self._cluster, self._workload = cluster, Workload(profile)
        self._environments = Environments(profile.environments) if profile.environments else None
        self._router = Router(profile.num_replicas)
        self.replicas = [self._replica(place, name) for place, name in enumerate(self.members)]
        self.turns: TurnRouter | None = None
        if profile.routing != "group":
            self.turns = TurnRouter(self.replicas, by_prefix=profile.routing == "prefix")
        self._routers = [self._router, *([self.turns.router] if self.turns else [])]
        self.ended: list[SimReplica] = []
        """Dead replicas, with their use of time."""
        self.num_moved = 0
        """Number of moved groups."""
        self._routed: dict[int, _Routed] = {}

    async def run(self, assignment: Assignment) -> RolledOut:
        weight = assignment.size * request_weight(self._workload.prompt_tokens(assignment.group_id))
        routed = _Routed(self._router.route(weight, session=assignment.group_id), weight)
        replica = self.replicas[routed.place]
        self._given[assignment.group_id], self._routed[assignment.group_id] = replica.name, routed
        try:
            if self.turns is not None:  # its turns may go to any replica: all need the version
                await asyncio.gather(*(r.ensure_version(assignment.version) for r in self.replicas if not r.is_dead))
            done = await replica.run(assignment, self.turns)
        except WorkerDied as error:
            self._leave(error.worker)
            raise
        finally:
            del self._given[assignment.group_id], self._routed[assignment.group_id]
            self._router.release(routed.place, weight)
        self._router.report(routed.place, done.stats)
        return done

    async def versions(self) -> Sequence[Acknowledged]:
        live = [r for r in self.replicas if r.version >= 0 and not r.is_dead]
        return [Acknowledged(r.name, r.version, self.world.hash(r.version)) for r in live]

    async def loads(self) -> Sequence[ReplicaLoad]:
        return [replica.load() for replica in self.replicas if not replica.is_dead]

    async def move(self, source: str, to: str) -> int:
        places = {replica.name: place for place, replica in enumerate(self.replicas) if not replica.is_dead}
        giver, taker = places.get(source), places.get(to)
        if giver is None or taker is None or giver == taker:
            return 0
        group_ids = self.replicas[giver].move_to(self.replicas[taker])
        for routed in (self._routed[group_id] for group_id in group_ids):
            self._router.transfer(giver, taker, routed.weight)
            routed.place = taker
        self.num_moved += len(group_ids)
        return len(group_ids)

    def kill(self, place: int) -> str:
        """Kill the replica at this place; return its name."""
        self.replicas[place].die()
        return self.replicas[place].name

    # ------------------------------------------------------------------------------------------------------- replacing

    def _replica(self, place: int, name: str) -> SimReplica:
        node = place // self._cluster.profile.replicas_per_node
        return SimReplica(name, self._cluster, node, self._workload, self._environments)

    def _leave(self, worker: str) -> None:
        for place, replica in enumerate(self.replicas):
            if replica.name == worker:
                for router in self._routers:
                    router.leave(place)

    async def _install(self, worker: str, successor: str) -> None:
        place = next(place for place, replica in enumerate(self.replicas) if replica.name == worker)
        replica = self._replica(place, successor)
        await replica.ensure_version(max(r.version for r in self.replicas))
        self.ended.append(self.replicas[place])
        self.replicas[place] = replica
        for router in self._routers:
            router.join(place)
