"""Going back to a checkpoint: at the start of a resumed run, and after the death of a rank of actor or critic.

If a rank of actor or critic dies, all ranks are replaced, and the run goes on from its newest checkpoint as a resume
would: the ledger goes back with the weights, so each group of a lost step is rolled out again, with its id and seed.
Rollouts, rewards and relays stay. A version is published once: the restored weights get a new one. From then on
`version - num_lost` steps are behind the weights. Groups in flight were sampled from versions that no longer exist,
further from the restored weights than the staleness bound allows, and are given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlsys.algorithm import Algorithm, version_after
from rlsys.contracts import Workers
from rlsys.errors import WorkerError
from rlsys.loop.checkpoint import DriverState, find_damage, load_models, read_state
from rlsys.loop.checkpoint_files import GROUPS, first_whole, from_on, newest_first
from rlsys.loop.device_leases import ACTOR
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.learner import Learner
from rlsys.loop.run_position import RunPosition
from rlsys.loop.saver import Saver
from rlsys.loop.shared_place import check_shared
from rlsys.monitoring.events import CheckpointPassedOver, DataChanged, Events, RolledBack
from rlsys.types import Group, PolicyVersion
from rlsys.util.any_paths import AnyPath, RemotePath
from rlsys.weight_sync.sync import WeightSync


@dataclass
class Recovery:
    """Loads checkpoints into all parts of a run, as new versions."""

    workers: Workers
    algorithm: Algorithm
    queue: GroupQueue
    weights: WeightSync
    learner: Learner
    saver: Saver
    events: Events
    position: RunPosition
    steps: int
    """Optimizer steps behind the weights at which the run ends."""
    _origin: AnyPath | DriverState | None = field(default=None, init=False)
    """Beginning of this session: its checkpoint, or the state of a new run."""
    _trouble: WorkerError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._num_synchronous = self.queue.bound.synchronous_until
        self._troubled = asyncio.Event()

    @property
    def end(self) -> PolicyVersion:
        """Policy version at which the run ends."""
        return self.steps + self.position.num_lost

    def begin(self, start: PolicyVersion) -> None:
        """Note that the session begins at version `start`: a new run, unless `restore` came before."""
        self.position.version = self.position.restored = start
        if self._origin is None:
            self._origin = DriverState(start, {}, self.queue.ledger.state())

    async def restore(self, checkpoint: AnyPath) -> PolicyVersion:
        """Load the checkpoint that a session begins with; return its version. See `Driver.restore`."""
        whole = await self._first_whole(await asyncio.to_thread(list, from_on(checkpoint)))
        assert whole is not None, "without a whole one it raises"
        state = await asyncio.to_thread(read_state, whole)
        self._origin = whole
        await self._load(whole, state, state.version)
        return state.version

    async def _first_whole(self, candidates: Iterable[AnyPath]) -> AnyPath | None:
        """Return the first of these checkpoints without damage; emit an event for each before it.

        The driver compares names and sizes, the ranks contents. Raises `CheckpointError` if all are damaged.
        """
        checkpoint, problems = await first_whole(candidates, partial(find_damage, self.workers))
        for problem in problems:
            self.events.emit(CheckpointPassedOver(problem))
        return checkpoint

    def is_of_model(self, failure: WorkerError) -> bool:
        """Return True if a worker that failed is a rank of actor or critic."""
        return failure.worker.startswith(tuple(self.workers.models))

    def report_failure(self, failure: WorkerError) -> None:
        """Note the failure of a rank of actor or critic that a producer met."""
        self._trouble = failure
        self._troubled.set()

    async def trouble(self) -> None:
        """Raise the failure that a producer met; wait until there is one."""
        await self._troubled.wait()
        assert self._trouble is not None
        raise self._trouble

    async def replace_models(self) -> RolledBack:
        """Replace all ranks of actor and critic, and publish the newest whole checkpoint as a new version.

        Called with `Learner.is_half_way`, which it ends. Raises `WorkerDied` or `DeadlineExceeded` if that fails, and
        `CheckpointError` if all checkpoints are damaged, and `ConfigError` if a rank is now on a machine that does not
        share the place for checkpoints.
        """
        self._troubled.clear()
        await self.learner.devices.restart(self.workers.models)
        await self.saver.abandon_saving()
        await check_shared(self.workers, self.saver.checkpoints.folder)
        self.position.version = self.position.restored = self.position.version + 1
        checkpoint = await self._roll_back()
        async with self.learner.devices.lease(ACTOR):
            await self.weights.publish(self.position.version)
        self.learner.is_half_way = False
        return RolledBack(self.position.version, checkpoint, self.position.num_lost, self.end)

    async def _roll_back(self) -> PolicyVersion:
        """Load the newest whole checkpoint, or what this session began with; return its own version."""
        checkpoints = await asyncio.to_thread(list, newest_first(self.saver.checkpoints.folder))
        origin = await self._first_whole(checkpoints) or self._origin
        if isinstance(origin, Path | RemotePath):
            state = await asyncio.to_thread(read_state, origin)
            await self._load(origin, state, self.position.version)
        else:
            assert origin is not None, "`begin` sets it"
            state = origin
            self._begin_at(state, self.position.version, self._num_synchronous, ())
        return state.version

    async def _load(self, checkpoint: AnyPath, state: DriverState, version: PolicyVersion) -> None:
        """Load `checkpoint`, whose driver's part is `state`, as `version`: another one than its own if versions were
        published since."""
        num_synchronous = await load_models(self.workers, checkpoint, self.learner.devices)
        step = state.version - state.num_lost
        until = version_after(self.algorithm, num_synchronous, start=step, end=self.steps)
        groups = await self.workers.actor.load_groups(checkpoint / GROUPS)
        self._begin_at(state, version, until - step, groups)
        self.weights.published |= state.published
        self.saver.checkpoints.last_saved = state.version
        self.saver.checkpoints.best.restore(state.scores)

    def _begin_at(
        self, state: DriverState, version: PolicyVersion, num_synchronous: int, groups: Sequence[Group]
    ) -> None:
        """Go on from `state` as `version`; the next `num_synchronous` steps are synchronous. `groups` are finished."""
        queue = self.queue
        self.position.num_lost = state.num_lost + version - state.version
        queue.bound.synchronous_until = version + num_synchronous
        num_groups = max(0, self.end - version) * queue.bound.groups_per_step
        room = min(queue.permits_at(version), num_groups)
        places = {group_id: place for place, group_id in enumerate(state.ledger.pending) if place < room}
        finished = [group for group in groups if group.group_id in places]
        finished = [g for g in finished if g.oldest_version >= queue.bound.oldest_at(places[g.group_id], version)]
        for note in queue.restore(state.ledger, version, num_groups, finished):
            self.events.emit(DataChanged(note))
        self.learner.past = state.past
