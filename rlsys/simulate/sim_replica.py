"""Simulated rollout replica: an engine, its groups, and weight changes that follow `RolloutWorker`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from rlsys.contracts import Busy, RolledOut
from rlsys.errors import WorkerDied
from rlsys.simulate.fake_pools import now
from rlsys.simulate.sim_cluster import SimCluster
from rlsys.simulate.sim_engine import SimEngine
from rlsys.simulate.sim_session import Environments, Rounds, SimPlay, TurnRouter
from rlsys.simulate.workload import Workload
from rlsys.types import Acknowledged, Assignment, Group, PolicyVersion, ReplicaLoad


class SimReplica:
    """Replica that plays groups and pulls weights when a group requires newer ones."""

    def __init__(
        self, name: str, cluster: SimCluster, node: int, workload: Workload, environments: Environments | None = None
    ) -> None:
        """Pull from the relay of `node`. `environments` are shared by all replicas; None: one for every episode."""
        profile = cluster.profile
        self.name, self.engine, self.environments = name, SimEngine(profile), environments
        self.rounds = Rounds(self.engine.used, together=profile.tools == "together")
        self.observation_tokens = profile.observation_tokens
        self.cache_age = 0
        """Number of times the cache was cleared."""
        self.version: PolicyVersion = -1
        """Loaded version; -1 before the first pull."""
        self._cluster, self._node, self._profile, self._workload = cluster, node, profile, workload
        self._changing = asyncio.Lock()
        self._is_loading = False
        self._is_dead = False
        self._plays: dict[SimPlay, None] = {}
        """Groups sampled here, including groups moved in and excluding groups moved away."""
        self._homed: dict[SimPlay, None] = {}
        """Groups whose sessions run here."""
        self._freed = asyncio.Event()

    async def run(self, assignment: Assignment, turns: TurnRouter | None = None) -> RolledOut:
        """Play one group on weights no older than it requires; with `turns`, route its turns one by one.

        Raises `WorkerDied`.
        """
        await self.ensure_version(assignment.version)
        start_s = now()
        fixed = self.version if self._profile.weight_change == "beside" else None
        play = SimPlay(assignment, self._workload, self, fixed, turns)
        self._plays[play] = self._homed[play] = None
        self.engine.share(len(self._resident()))
        try:
            play.begin()
            await play.done
        finally:
            del self._homed[play]
            play.host.evict(play)
        return RolledOut(self._group(play), Busy(self.name, start_s, now()), self.engine.stats())

    def load(self) -> ReplicaLoad:
        """Return the current load. A group that waits for its tools counts, as with `RolloutWorker`."""
        stats = self.engine.stats()
        stats = replace(stats, num_running=max(stats.num_running, len(self._plays)))
        return ReplicaLoad(self.name, self.version, stats, self._is_loading)

    @property
    def is_dead(self) -> bool:
        """True after the replica died."""
        return self._is_dead

    def evict(self, play: SimPlay) -> None:
        """Remove a group that ended."""
        self._plays.pop(play, None)
        self.engine.share(len(self._resident()))
        self._freed.set()

    def move_to(self, other: SimReplica) -> list[int]:
        """Move all groups sampled here to `other`; none if its version differs or it is loading weights.

        Returns the ids of the groups that moved.
        """
        if self._is_loading or other._is_loading or other.version != self.version:
            return []
        plays, self._plays = self._plays, {}
        requests = self.engine.abort(plays)
        for play in plays:
            play.host = other
        other._plays |= plays
        other.engine.submit(requests)
        self._freed.set()
        return [play.assignment.group_id for play in plays]

    def die(self) -> None:
        """Die: all groups sampled here, and all whose sessions run here, end with `WorkerDied`."""
        self._is_dead = True
        self._freed.set()
        for play in {**self._plays, **self._homed}:
            play.host.engine.abort((play,))
            play.fail(self._death(f"rolling out group {play.assignment.group_id}"))
        others = self.engine.owners()  # with turns routed here
        self.engine.abort(others)
        for play in others:
            play.fail(self._death(f"rolling out group {play.assignment.group_id}"))

    # ------------------------------------------------------------------------------------------------ changing weights

    async def ensure_version(self, version: PolicyVersion) -> None:
        """Load weights no older than `version`, as `RolloutWorker` does."""
        async with self._changing:
            self._check_alive()
            if self.version >= version:
                return
            if self._profile.weight_change == "between":
                await self._until(lambda: not self._plays)
                self._is_loading = True  # from here on no group moves in
            elif self._profile.weight_change == "beside":
                await self._until(lambda: len(self._resident()) < self._profile.resident_versions)
            began_s, busy_s = now(), self.engine.used_now().busy_s
            newest = await self._cluster.pull(self._node, version)
            self._check_alive()
            await self._take_in(newest)
            self.engine.used.exposed_s += now() - began_s - (self.engine.used_now().busy_s - busy_s)

    async def _take_in(self, version: PolicyVersion) -> None:
        load_s, when = self._profile.weights.load_s, self._profile.weight_change
        if when == "inflight" and self.engine.is_busy:
            throws_away = self._profile.kv_cache == "recompute"
            self.engine.used.exposed_s += self.engine.change(version, load_s, recompute=throws_away)
            self.cache_age += throws_away
        else:
            await asyncio.sleep(load_s)
            self._is_loading = False
            self._check_alive()
            self.engine.change(version)
            self.cache_age += 1
        self.version = version

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for groups to end or to move away; unblocked by `evict`, `move_to` and `die`."""
        while not is_so():
            self._freed.clear()
            await self._freed.wait()
            self._check_alive()

    def _resident(self) -> set[PolicyVersion]:
        """Versions to which groups here are pinned."""
        return {play.version for play in self._plays if play.version is not None}

    # ------------------------------------------------------------------------------------------------------------ group

    def _group(self, play: SimPlay) -> Group:
        assignment, versions = play.assignment, play.versions()
        return Group(
            group_id=assignment.group_id,
            task_id=assignment.task.id,
            permit_version=assignment.version,
            replica=self.name,
            episodes=play.episodes(),
            versions=versions,
            weights=tuple(Acknowledged(self.name, s.version, self._cluster.hash(s.version)) for s in versions),
            payload=None,
        )

    def _check_alive(self) -> None:
        if self._is_dead:
            raise self._death("taking in weights")

    def _death(self, phase: str) -> WorkerDied:
        return WorkerDied(self.name, phase, "the process is gone")
