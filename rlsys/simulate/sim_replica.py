"""Rollout replicas of a profile: the model of an engine, and weight changes that follow `RolloutWorker`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

from rlsys.errors import WorkerDied
from rlsys.routing.request_router import PREFIX_TOKENS, ReplicaWork, cheapest, request_weight
from rlsys.simulate.sim_cluster import SimCluster
from rlsys.simulate.sim_engine import SimEngine, SimRequest, Used
from rlsys.simulate.sim_session import Environments, Rounds, Wait, Workload, WorkloadTurn
from rlsys.testing.fake_pools import FakePlay, FakeReplica, FakeRollouts, now
from rlsys.types import (
    OK,
    Assignment,
    Busy,
    EpisodeMeta,
    Group,
    PolicyVersion,
    Pull,
    ReplicaLoad,
    RolloutReport,
    SampleMeta,
    TrajectoryMeta,
    VersionSpan,
)


class SimPlay(FakePlay):
    """Group whose turns are sampled by engines."""

    def __init__(self, assignment: Assignment, home: SimReplica) -> None:
        super().__init__(assignment, home)
        workload, group_id = home.pool.workload, assignment.group_id
        self.num_prompt = workload.prompt_tokens(group_id)
        self.sampled: Counter[PolicyVersion] = Counter()
        """Sampled tokens, by version."""
        self._turns = [workload.episode(group_id, e) for e in range(assignment.size)]
        self._episodes = [self._episode(e, turns) for e, turns in enumerate(self._turns)]
        self._num_open = assignment.size
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Play all episodes. Raises the error of `fail`."""
        for episode in self._episodes:
            self._go_on(episode)
        await self._done

    def fail(self, error: WorkerDied) -> None:
        """End all episodes with an error."""
        if not self._done.done():
            self._done.set_exception(error)
            for episode in self._episodes:
                with suppress(StopIteration, WorkerDied):
                    episode.throw(error)

    def _go_on(self, episode: Generator[Wait]) -> bool:
        """Run an episode until it waits again; return false if it has ended."""
        if self._done.done() or (wait := next(episode, None)) is None:
            return False
        wait(partial(self._go_on, episode))
        return True

    def _episode(self, index: int, turns: Sequence[WorkloadTurn]) -> Generator[Wait]:
        """Play one episode, once it has an environment."""
        pool, rounds = self.home.pool, self.home.rounds
        profile = pool.profile
        yield pool.environments.take
        rounds.enter()
        num_context, num_cached = self.num_prompt, 0
        # Replica with `num_cached` tokens in its cache, and the age of the cache then: at another age they are gone.
        at: tuple[SimReplica | None, int] = (None, 0)
        if index > 0 and not pool.routes_turns and profile.environments is None:  # the first has prefilled the prompt
            at, num_cached = (self.host, self.host.cache_age), num_context
        with suppress(WorkerDied):
            for number, turn in enumerate(turns, 1):
                place, weight, chosen = self.host, request_weight(num_context), None
                if pool.routes_turns:
                    home = at[0].turns if at[0] is not None and profile.routing == "prefix" else None
                    chosen = cheapest(pool.live_turns(), weight, home, num_cached // PREFIX_TOKENS)
                    assert chosen is not None, "a simulated replica has room for all"
                    chosen.add(weight)
                    place = chosen.replica
                    if number > 1:
                        pool.returned[at[0] is place] += 1
                is_cached = at == (place, place.cache_age)
                try:
                    yield partial(self._submit, place, num_context, turn.num_tokens, num_cached if is_cached else 0)
                finally:
                    if chosen is not None:
                        chosen.remove(weight)
                place = place if pool.routes_turns else self.host  # the group may have moved
                at, num_cached = (place, place.cache_age), num_context + turn.num_tokens
                if number < len(turns):
                    num_context = num_cached + profile.observation_tokens
                    yield partial(rounds.rest, turn.environment_s)
        rounds.leave()
        pool.environments.give_back()
        self._num_open -= 1
        if not self._num_open and not self._done.done():
            self._done.set_result(None)

    def _submit(
        self, place: SimReplica, num_context: int, num_tokens: int, num_cached: int, go_on: Callable[[], object]
    ) -> None:
        request = SimRequest(num_context, num_tokens, go_on, self, self.sampled, self.version, num_cached)
        place.engine.submit([request])

    def versions(self) -> tuple[VersionSpan, ...]:
        return tuple(VersionSpan(v, self.sampled[v]) for v in sorted(self.sampled))

    def episodes(self) -> tuple[EpisodeMeta, ...]:
        """Return the driver's metadata of each episode."""
        return tuple(map(self._meta, self._turns))

    def _meta(self, turns: Sequence[WorkloadTurn]) -> EpisodeMeta:
        num_tokens = sum(turn.num_tokens for turn in turns)
        observed = (len(turns) - 1) * self.home.profile.observation_tokens
        sample = SampleMeta(self.num_prompt, num_tokens + observed, num_tokens, prompt_key=self.assignment.group_id)
        return EpisodeMeta((TrajectoryMeta("policy", None, OK, None, (sample,)),))


class SimReplica(FakeReplica):
    """Replica that plays groups and pulls weights when a group requires newer ones."""

    pool: SimRollouts  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, pool: SimRollouts, place: int, name: str) -> None:
        super().__init__(pool, place, name)
        self.profile = pool.profile
        self.engine = SimEngine(self.profile)
        self.rounds = Rounds(self.engine.used, together=self.profile.tools == "together")
        self.turns = SimTurns(self)
        """Single turns that are routed here, unless all turns of a group go to its replica."""
        self.cache_age = 0
        """Number of times the cache was cleared."""
        self._loaded: PolicyVersion = -1
        self._pulls: list[Pull] = []
        """Weight changes that no group has reported yet."""
        self._changing = asyncio.Lock()
        self._is_loading = False
        self._homed: dict[SimPlay, None] = {}
        """Groups whose sessions run here."""
        self._freed = asyncio.Event()

    @property
    def version(self) -> PolicyVersion:
        return self._loaded

    def new_play(self, assignment: Assignment) -> SimPlay:
        return SimPlay(assignment, self)

    async def run(self, play: FakePlay) -> tuple[Group, ...]:
        """Play one group on weights no older than it requires. Raises `WorkerDied`."""
        assert isinstance(play, SimPlay)
        pool, assignment = self.pool, play.assignment
        if pool.routes_turns:  # its turns may go to any replica: all need the version
            await asyncio.gather(*(r.ensure_version(assignment.version) for r in pool.replicas if not r.is_dead))
        await self.ensure_version(assignment.version)
        start_s = now()
        self._plays[play] = self._homed[play] = None
        play.version = self.version if self.profile.weight_change == "beside" else None
        self.engine.share(len(self._resident()))
        try:
            await play.run()
        finally:
            del self._homed[play]
            play.host.evict(play)
        versions = play.versions()
        group = self._view(assignment, play.episodes(), versions, versions, None)
        pulls, self._pulls = tuple(self._pulls), []
        report = RolloutReport(Busy(self.name, start_s, now()), self.engine.stats(), pulls=pulls)
        return (replace(group, report=report),)

    def load(self) -> ReplicaLoad:
        """Return the current load. A group that waits for its tools counts, as with `RolloutWorker`."""
        return ReplicaLoad(self.name, self.version, self.engine.stats(), self._is_loading, len(self._plays))

    def evict(self, play: SimPlay) -> None:
        """Remove a group that ended."""
        self._plays.pop(play, None)
        self.engine.share(len(self._resident()))
        self._freed.set()

    def move_to(self, other: FakeReplica) -> list[SimPlay]:
        assert isinstance(other, SimReplica)
        if plays := super().move_to(other):
            other.engine.submit(self.engine.abort(dict.fromkeys(plays)))
            self._freed.set()
        return plays

    def die(self) -> None:
        """Die: all groups that have a turn sampled here, or whose sessions run here, end with `WorkerDied`."""
        self.is_dead = True
        self._freed.set()
        for play in dict.fromkeys((*self._plays, *self._homed, *self.engine.owners())):
            assert isinstance(play, SimPlay)
            play.host.engine.abort((play,))
            self.engine.abort((play,))
            play.fail(self._death(f"rolling out group {play.assignment.group_id}"))

    # ------------------------------------------------------------------------------------------------ changing weights

    async def ensure_version(self, version: PolicyVersion) -> None:
        """Load weights no older than `version`, as `RolloutWorker` does."""
        async with self._changing:
            self._check_alive()
            if self.version >= version:
                return
            if self.profile.weight_change == "between":
                await self._until(lambda: not self._plays)
                self._is_loading = True  # from here on no group moves in
            elif self.profile.weight_change == "beside":
                await self._until(lambda: len(self._resident()) < self.profile.resident_versions)
            began_s, busy_s = now(), self.engine.current_use().busy_s
            newest = await self.pool.world.pull(self.place // self.profile.replicas_per_node, version)
            self._check_alive()
            end_s = await self._take_in(newest)
            self._pulls.append(Pull(self.name, began_s, end_s, newest))
            self.engine.used.exposed_s += now() - began_s - (self.engine.current_use().busy_s - busy_s)

    async def _take_in(self, version: PolicyVersion) -> float:
        """Load a version; return the time from which it samples."""
        load_s, when = self.profile.weights.load_s, self.profile.weight_change
        halted_s = 0.0
        if when == "inflight" and self.engine.is_busy:
            throws_away = self.profile.kv_cache == "recompute"
            halted_s = self.engine.change(version, load_s, recompute=throws_away)
            self.engine.used.exposed_s += halted_s
            self.cache_age += throws_away
        else:
            await self.pool.compute(load_s)
            self._is_loading = False
            self._check_alive()
            self.engine.change(version)
            self.cache_age += 1
        self._loaded = version
        return now() + halted_s

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for groups to end or to move away; unblocked by `evict`, `move_to` and `die`."""
        while not is_so():
            self._freed.clear()
            await self._freed.wait()
            self._check_alive()

    def _resident(self) -> set[PolicyVersion]:
        """Versions to which groups here are pinned."""
        return {play.version for play in self._plays if play.version is not None}

    def _check_alive(self) -> None:
        if self.is_dead:
            raise self._death("pulling weights")

    def _death(self, phase: str) -> WorkerDied:
        return WorkerDied(self.name, phase, "the process is gone")


class SimTurns(ReplicaWork):
    """Single turns at one replica."""

    def __init__(self, replica: SimReplica) -> None:
        super().__init__()
        self.replica = replica


class SimRollouts(FakeRollouts):
    """Replicas of one profile."""

    world: SimCluster  # pyrefly: ignore[bad-override-mutable-attribute]
    replicas: list[SimReplica]  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, cluster: SimCluster) -> None:
        self.profile = profile = cluster.profile
        self.workload = Workload(profile)
        self.environments = Environments(profile.environments or inf)
        self.returned: Counter[bool] = Counter()
        """Number of routed turns after the first, by whether they returned to the previous turn's replica."""
        self.routes_turns = profile.routing != "group"
        """True if every turn goes to a replica of its own; else all turns of a group go to its replica."""
        super().__init__(cluster)

    async def sleep(self) -> None:
        for replica in self.replicas:
            replica.engine.sleep()
            replica.cache_age += 1
        await super().sleep()

    async def wake(self) -> None:
        await super().wake()
        for replica in self.replicas:
            replica.engine.wake()

    def live_turns(self) -> list[SimTurns]:
        """Return what the live replicas have to do for single turns; of all, if none is live."""
        live = [replica for replica in self.replicas if replica.name in self.members and not replica.is_dead]
        return [replica.turns for replica in live or self.replicas]

    def total_use(self) -> Used:
        """Return the use of time of all replicas up to this moment, dead ones included."""
        return sum((replica.engine.current_use() for replica in (*self.replicas, *self.ended)), Used())

    def _weight(self, assignment: Assignment) -> int:
        return assignment.size * request_weight(self.workload.prompt_tokens(assignment.group_id))

    def _replica(self, place: int, name: str) -> SimReplica:
        replica = SimReplica(self, place, name)
        if self._is_asleep.is_set():
            replica.engine.sleep()
        return replica
