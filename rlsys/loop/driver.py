"""The driver of one training job: many producers, one learner, and a queue of groups between them.

    loop       consumes            produces           waits for                      unblocked by
    produce    permits, tasks      episodes, rewards  a free permit                  learn releasing a step's permits
    annotate   episodes            a signal's column  a rolled-out group             produce
    learn      groups that have    weights, metrics   the oldest groups to have all  produce and annotate, or a group
               all their columns                      their columns                  being dropped; the death of a rank
    evaluate   pinned weights      eval metrics       its replicas and rewards       their results
    supervise  dead relays         filled relays      a relay to die                 never; cancelled at the end
    repack     loads of replicas   moves              a publish, or `repack_s`       never; cancelled at the end
    look       loads, placements   events             `look_s`                       never; cancelled at the end
    watch      idle time           NoProgress         the no-progress limit          never; cancelled at the end

The driver decides and never touches the payload of a group. Synchronous RL is this loop with `max_staleness: 0`.

If a rank of actor or critic dies, all ranks are replaced, and the run goes on from its newest checkpoint as a resume
would: the ledger goes back with the weights, so each group of a lost step is rolled out again, with its id and seed.
Rollouts, rewards and relays stay. A version is published once: the restored weights get a new one. From then on
`version - num_lost` steps are behind the weights. Groups in flight were sampled from versions that no longer exist,
further from the restored weights than the staleness bound allows, and are given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlsys.algorithm import Algorithm, Signal, version_after
from rlsys.contracts import Files, Graft, Workers
from rlsys.errors import (
    CheckpointError,
    DeadlineExceeded,
    GroupExpired,
    NoProgress,
    NoSignal,
    PayloadLost,
    RlsysError,
    RunAborted,
    TrainingError,
    WorkerDied,
    WorkerError,
    first_of,
)
from rlsys.loop.checkpoint import (
    GROUPS,
    STEP,
    Checkpoints,
    DriverState,
    load_models,
    newest_whole,
    read_state,
    save_models,
)
from rlsys.loop.evaluation import EvaluationLane
from rlsys.loop.failure_policy import DroppedGroups, FailurePolicy, GivenUp, Retries
from rlsys.loop.group_queue import LEARNER, GroupQueue, InFlightGroup, Permit
from rlsys.loop.learner import REFERENCE, BatchShape, Learner, StepResult
from rlsys.loop.population import Meetings, Switch
from rlsys.loop.remote_checkpoints import CheckpointCopies
from rlsys.loop.repack import Repacker
from rlsys.loop.replica_watcher import ReplicaWatcher
from rlsys.loop.rollout_records import RolloutRecords
from rlsys.loop.step_metrics import StepClock, step_metrics
from rlsys.loop.task_ledger import Curriculum
from rlsys.monitoring.events import (
    CheckpointPassedOver,
    CheckpointSaved,
    DataChanged,
    EpisodeGrafted,
    Events,
    FileSkipped,
    GroupReissued,
    RolledBack,
    StepDone,
    WorkerFailed,
    WorkerRestarted,
    emit_busy,
)
from rlsys.types import Busy, Group, PolicyVersion, Task
from rlsys.util import deadlines
from rlsys.util.files import free_gb
from rlsys.weight_sync.sync import WeightSync

ANNOTATED_AT_ONCE = 8
"""Micro-batches of tokens per call of an annotator: enough for full utilisation, few enough to stream."""
STOP_S = 30.0
"""Seconds that a step under way may take once the run is to end; more if an earlier step of the session took more."""
SAVE_S = 300.0
"""Seconds for the last checkpoint once the run is to end: generous, because giving up loses the steps in it."""
_UNSAVED = (
    f"the checkpoint of step {{}} was not written within {SAVE_S:g} s; go on from the one before with run.resume=auto"
)


@dataclass
class Driver:
    """Coordinator of the loops; each decision belongs to one of its parts."""

    workers: Workers
    algorithm: Algorithm
    queue: GroupQueue
    """Emits its transitions to the same `events`."""
    weights: WeightSync
    failures: FailurePolicy
    checkpoints: Checkpoints
    events: Events
    shape: BatchShape
    steps: int
    """Optimizer steps behind the weights at which the run ends."""
    no_progress_s: float
    run_dir: Path
    config: Callable[[], str]
    """Returns the run's configuration as YAML; it is saved with a failed step."""
    records: RolloutRecords
    evaluation: EvaluationLane | None = None
    """None in a run without evaluation."""
    copies: CheckpointCopies | None = None
    """None in a run whose checkpoints are not copied."""
    repacker: Repacker | None = None
    """None if moving trajectories gains nothing."""
    look_s: float = 0
    """Seconds between two observations of replicas and queue, for events; 0 disables them."""
    machines: Callable[[], Mapping[str, float]] = dict
    """Returns the newest metrics of the run's machines, at once; by default none."""
    meetings: Meetings | None = None
    """Meetings with the other runs of a population; None for a run of its own."""
    _stopping: bool = field(default=False, init=False)
    _waits: dict[asyncio.Timeout, float] = field(default_factory=dict, init=False)
    """What the learner waits for, and the seconds that each may last after `stop`."""
    _longest_s: float = field(default=STOP_S, init=False)
    """Seconds of the longest step of this session, at least `STOP_S`."""
    num_lost: int = field(default=0, init=False)
    """Versions whose steps were lost with the actor."""
    _version: PolicyVersion = field(default=0, init=False)
    """The last finished step, or that of the restored weights."""
    _restored: PolicyVersion = field(default=0, init=False)
    """Version of the weights that this session began with, or went back to."""
    _origin: Path | DriverState | None = field(default=None, init=False)
    """Beginning of this session: its checkpoint, or the state of a new run."""
    _saving: asyncio.Task[None] | None = field(default=None, init=False)
    """Writing of the newest checkpoint."""
    _filling: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    """The loops of producers and annotators."""
    _num_deaths: int = field(default=0, init=False)
    """Deaths of actor or critic since the last finished step."""
    _trouble: WorkerError | None = field(default=None, init=False)
    """Failure of actor or critic that a producer met."""
    _sent_home: str = field(default="", init=False)
    """Reason for which a meeting ended the run."""

    def __post_init__(self) -> None:
        self._clock = StepClock(self.events)
        self._dropped_groups = DroppedGroups(self.queue, self.failures)
        self._retries = Retries(self.events, self._dropped_groups.decide)
        self._troubled = asyncio.Event()
        self._num_synchronous = self.queue.synchronous_until
        self._learner = Learner(
            self.workers,
            self.algorithm,
            self.shape,
            self._clock.span,
            self.run_dir / "failed",
            self.config,
            self._retries,
        )

    @property
    def end(self) -> PolicyVersion:
        """Policy version at which the run ends, unless there is an `early_stop`."""
        return self.steps + self.num_lost

    @property
    def early_stop(self) -> str:
        """Reason for which the run ends before `end`; empty if it does not."""
        return self.checkpoints.best.early_stop or self._sent_home

    @property
    def num_steps(self) -> int:
        """Optimizer steps behind the weights."""
        return self._version - self.num_lost

    async def run(self, start: PolicyVersion) -> PolicyVersion:
        """Train from version `start` to `end`; return the version reached, which is lower only after `stop` or with an
        `early_stop`.

        Raises the `RlsysError` that ended the run, once the last finished step is saved: a note of the error names the
        checkpoint to go on from. The same holds if the caller cancels this. Any other exception is a bug, and
        propagates without a save.
        """
        self._version = self._restored = start
        if self._origin is None:
            self._origin = DriverState(start, {}, self.queue.ledger.state())
        async with self._until_stopped():
            await self.weights.publish(start)
        learning = asyncio.create_task(self._learn())
        patience_s = SAVE_S
        try:
            await self._loop(learning)
            await asyncio.wait([learning])  # after `stop` it may still be in a step
            learning.result()
            await self._save_rest()
        except (RlsysError, asyncio.CancelledError) as error:
            patience_s = 0.0 if isinstance(error, asyncio.CancelledError) else STOP_S
            await asyncio.gather(learning, return_exceptions=True)
            if not isinstance(error, TrainingError | CheckpointError):  # these tell themselves what is saved
                await self._save_after(error)
            raise
        finally:
            learning.cancel()
            await asyncio.gather(learning, return_exceptions=True)
            if self._saving is not None:
                await asyncio.wait([self._saving], timeout=SAVE_S)
                self._saving.cancel()
            await self.records.end(patience_s)
            if self.copies:
                await self.copies.end(SAVE_S)
            self.weights.give_up()
        return self._version

    async def _loop(self, learning: asyncio.Task[None]) -> None:
        """Run all other loops until the learner ends, or `stop`. Raises the first error; then the learner ends too."""
        self._clock.start()
        try:
            async with asyncio.TaskGroup() as loops:
                if self.evaluation:
                    self.evaluation.attach(loops, self.queue.progress.moved)
                self._loops = loops
                self._fill_queue()
                others = [loops.create_task(self._watch()), loops.create_task(self.supervise())]
                if self.repacker:
                    self.repacker.published(self._version)
                    others.append(loops.create_task(self.repacker.run()))
                if self.look_s:
                    watcher = ReplicaWatcher(self.workers.rollouts, self.queue, self.events, self.look_s)
                    others.append(loops.create_task(watcher.run()))
                try:
                    async with self._until_stopped():
                        await asyncio.wait([learning])
                        learning.result()
                        await self.weights.settled()
                finally:
                    self.stop()
                for loop in (*others, *self._filling):
                    loop.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    async def restore(self, checkpoint: Path) -> PolicyVersion:
        """Load a checkpoint into all parts; return its version, which `run` publishes before it admits any group.

        Finished groups are rolled out again if they do not fit a smaller queue or shorter run, or would be too stale at
        their turn. Steps are synchronous as long as the restored stabilizer needs it. Raises `CheckpointError`, or
        `DataError` if the tasks have changed.
        """
        state = read_state(checkpoint)
        self._origin = checkpoint
        await self._restore(checkpoint, state, state.version)
        return state.version

    async def _restore(self, checkpoint: Path, state: DriverState, version: PolicyVersion) -> None:
        """Load `checkpoint`, whose driver's part is `state`, as `version`: another one than its own if versions were
        published since."""
        num_synchronous = await load_models(self.workers, checkpoint)
        step = state.version - state.num_lost
        until = version_after(self.algorithm, num_synchronous, start=step, end=self.steps)
        groups = await self.workers.actor.load_groups(checkpoint / GROUPS)
        self._begin_at(state, version, until - step, groups)
        self.weights.published |= state.published
        self.checkpoints.last_saved = state.version
        self.checkpoints.best.restore(state.scores)
        if self.evaluation:
            self.evaluation.recall()

    def _begin_at(
        self, state: DriverState, version: PolicyVersion, num_synchronous: int, groups: Sequence[Group]
    ) -> None:
        """Go on from `state` as `version`; the next `num_synchronous` steps are synchronous. `groups` are finished."""
        queue = self.queue
        self.num_lost = state.num_lost + version - state.version
        queue.synchronous_until = version + num_synchronous
        num_groups = max(0, self.end - version) * queue.groups_per_step
        room = min(queue.permits_at(version), num_groups)
        places = {group_id: place for place, group_id in enumerate(state.ledger.pending) if place < room}
        finished = [group for group in groups if group.group_id in places]
        finished = [g for g in finished if g.oldest_version >= queue.oldest_at(places[g.group_id], version)]
        for note in queue.restore(state.ledger, version, num_groups, finished):
            self.events.emit(DataChanged(note))
        self._learner.past = state.past
        if self.evaluation:
            self.evaluation.last = self.end

    def stop(self) -> None:
        """Finish the current step, save, and return from `run`. All other work ends at once; its groups are rolled out
        again after a resume, and a running evaluation is cancelled."""
        if self._stopping:
            return
        self._stopping = True
        for wait, grace_s in self._waits.items():
            wait.reschedule(asyncio.get_running_loop().time() + grace_s)
        if self.evaluation:
            self.evaluation.stop()

    @asynccontextmanager
    async def _until_stopped(self, grace_s: float = 0.0) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the block `grace_s` seconds after `stop`, and go on behind it; the yielded timeout has expired then.

        Every wait of the learner is in such a block.
        """
        wait = asyncio.timeout(grace_s if self._stopping else None)
        try:
            async with wait:
                self._waits[wait] = grace_s
                try:
                    yield wait
                finally:
                    del self._waits[wait]
        except TimeoutError:
            if not wait.expired():
                raise

    # --------------------------------------------------------------------------------------------------------- produce

    def _fill_queue(self) -> None:
        """Start the loops of producers and annotators."""
        self._filling = [self._loops.create_task(self._produce()) for _ in range(self.queue.capacity)]
        self._filling += [self._loops.create_task(self._annotate(signal)) for signal in sorted(self.queue.signals)]

    async def _produce(self) -> None:
        """Roll out and score one group after the other.

        Consumes permits and tasks, produces episodes and rewards. Waits for a free permit; unblocked by `_learn`
        releasing a step's permits, or by another group being dropped or lost.
        """
        while True:
            async with self.queue.permit() as permit:
                with self._clock.producing():
                    await self._fill(permit)

    async def _fill(self, permit: Permit) -> None:
        """Roll out and score the group of a permit, or give it up if the failure policy decides so."""
        persist, workers = self._retries.persist, self.workers
        try:
            await persist(workers.rollouts, lambda: self._roll_out(permit))
            scored = await persist(workers.rewards, lambda: self._score(permit.group))
            graft = None
            if not permit.group.is_over:
                self._curation.scored(scored)
                graft = self._curation.graft_for(scored, self.queue.oldest_in_time)
            if graft is not None:
                scored = await persist(workers.rewards, lambda: self._graft(graft))
            await persist(workers.rewards, lambda: self._hand_in(permit, scored, graft))
        except PayloadLost as error:
            self._dropped_groups.reissue_lost(error, [permit.group])
        except GivenUp as given_up:
            self._dropped_groups.give_up(permit.group, given_up)

    async def _roll_out(self, permit: Permit) -> None:
        group = self.queue.start_rollout(permit)
        try:
            (rolled_out,) = await self.workers.rollouts.run(group.assignment)
        except GroupExpired as expired:
            self.events.emit(GroupReissued(group.group_id, group.assignment.task.id, str(expired)))
            raise
        report = rolled_out.report
        assert report is not None, f"group {group.group_id} has no report"
        self._clock.add("rollout", report.busy)  # at once: events align its end with the present
        emit_busy(self.events, "pulling", report.pulls, answered_s=report.busy.end_s)
        try:
            await self.weights.verify(rolled_out)
        except (WorkerDied, DeadlineExceeded) as failure:
            if not self._is_of_model(failure):
                raise
            self._trouble = failure
            self._troubled.set()
            await asyncio.Event().wait()  # the learner cancels this loop: its version will never arrive
        self._clock.offer(rolled_out, report.waited_s)
        self.queue.finish_rollout(group, rolled_out)

    async def _score(self, group: InFlightGroup) -> Group:
        scored = await self.workers.rewards.score(group.assignment.task, group.group)
        self._clock.add("reward", scored.busy)
        group.scoring = scored.busy
        return group.group.with_scores(scored.scores)

    async def _graft(self, graft: Graft) -> Group:
        """Attempt a graft once; return the unchanged group if the stored success is lost."""
        try:
            return await self.workers.rewards.graft(graft)
        except PayloadLost as error:
            donor = graft.donor
            if donor.group_id not in error.group_ids:
                raise
            self._curation.forget(donor.group_id, donor.task_id)
            return graft.group

    async def _hand_in(self, permit: Permit, scored: Group, graft: Graft | None) -> None:
        """Offer a scored group to the learner. Raises `NothingToTrain` or `NoSignal` if it cannot be trained."""
        is_grafted = graft is not None and scored is not graft.group and not permit.group.is_over
        if is_grafted:
            self.queue.renew(permit, scored)
        if not self.queue.score(permit.group, scored):
            return
        self._learner.check(scored)
        if graft is not None and is_grafted:
            self._curation.num_grafted += 1
            self.events.emit(EpisodeGrafted(scored.group_id, scored.task_id, graft.episode, graft.donor.group_id))
        self.queue.offer(permit.group)
        self._dropped_groups.scored()

    @property
    def _curation(self) -> Curriculum:
        return self.queue.ledger.curation

    # -------------------------------------------------------------------------------------------------------- annotate

    async def _annotate(self, signal: Signal) -> None:
        """Add one column to each group as it arrives, while others are still being rolled out.

        Consumes episodes, produces the column `signal`. Waits for a rolled-out group; unblocked by `_produce`.
        """
        loop = asyncio.get_running_loop()
        while True:
            taken = await self.queue.take_for(signal, ANNOTATED_AT_ONCE * self.shape.max_tokens)
            began = loop.time()
            maker = self.workers.annotators[signal]
            groups = [each.group for each in taken]
            try:
                annotated = await self._retries.persist(maker, lambda: maker.annotate(groups, signal))  # noqa: B023
            except PayloadLost as error:
                self.queue.put_back(signal, self._dropped_groups.reissue_lost(error, taken))
                continue
            self._clock.add("annotate", Busy(REFERENCE, began, loop.time()))
            for group, answer in zip(taken, annotated, strict=True):
                self.queue.put(group, signal, answer.columns[signal])

    # ----------------------------------------------------------------------------------------------------------- learn

    async def _learn(self) -> None:
        """Train until the end, or `stop`. If a rank of actor or critic dies or freezes, replace all and go on.

        Raises `RunAborted` if that happens `limits.max_attempts` times without a finished step, or after `stop`.
        """
        failure: WorkerError | None = None
        while True:
            try:
                if failure is not None:
                    await self._replace_models(failure)
                watches = [model.watch() for model in self.workers.models.values()]
                await deadlines.unless(self._train(), *watches, self._meet_trouble())
            except (WorkerDied, DeadlineExceeded) as error:
                self._num_deaths += 1
                if not self._is_of_model(error):
                    raise
                if self._stopping or self._num_deaths >= self.failures.limits.max_attempts:
                    raise RunAborted(str(error)) from error
                failure = error
            else:
                return

    async def _meet_trouble(self) -> None:
        """Raise the failure of actor or critic that a producer met; wait until there is one."""
        await self._troubled.wait()
        assert self._trouble is not None
        raise self._trouble

    def _is_of_model(self, failure: WorkerError) -> bool:
        return failure.worker.startswith(tuple(self.workers.models))

    async def _replace_models(self, failure: WorkerError) -> None:
        """Replace all ranks of actor and critic, and go on from the newest whole checkpoint, as a new version.

        Raises `WorkerDied` or `DeadlineExceeded` if that fails, and `CheckpointError` if all checkpoints are damaged.
        """
        began = asyncio.get_running_loop().time()
        self.events.emit(WorkerFailed(failure.worker, failure.phase, str(failure)))
        await self._give_up_groups()
        self._troubled.clear()
        async with self._until_stopped():
            await asyncio.gather(*(model.restart() for model in self.workers.models.values()))
            if self._saving is not None:  # it failed with the ranks, unless it was all but written
                await asyncio.gather(self._saving, return_exceptions=True)
                self._saving = None
            self._version = self._restored = self._version + 1
            checkpoint = await self._roll_back()
            await self.weights.publish(self._version)
            self._learner.is_half_way = False
        if self._learner.is_half_way:
            return  # by `stop`
        self._go_on()
        self.events.emit(RolledBack(self._version, checkpoint, self.num_lost, self.end))
        self.events.emit(WorkerRestarted(failure.worker, asyncio.get_running_loop().time() - began))

    async def _give_up_groups(self) -> None:
        """End producers and annotators, and a running evaluation: the weights will be others."""
        self._learner.is_half_way = True  # nothing can be saved until a checkpoint is loaded
        for loop in self._filling:
            loop.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)
        if self.evaluation:
            self.evaluation.give_up()
        self.weights.give_up()

    def _go_on(self) -> None:
        """Start producers and annotators on the restored weights."""
        if self.repacker:
            self.repacker.published(self._version)
        self._fill_queue()

    async def _roll_back(self) -> PolicyVersion:
        """Load the newest whole checkpoint, or what this session began with, as `_version`; return its own version."""
        checkpoint, problems = await asyncio.to_thread(newest_whole, self.checkpoints.folder)
        for problem in problems:
            self.events.emit(CheckpointPassedOver(problem))
        origin = checkpoint or self._origin
        if isinstance(origin, Path):
            state = read_state(origin)
            await self._restore(origin, state, self._version)
        else:
            assert origin is not None, "`run` sets it"
            state = origin
            self._begin_at(state, self._version, self._num_synchronous, ())
        return state.version

    async def _meet(self, meetings: Meetings) -> None:
        """Meet the other runs of the population, and do as the meeting decides.

        Waits for the checkpoint of this step, and for the others, see `Meetings.meet`; unblocked by `stop` too.
        """
        await self._saved()
        folder = self.checkpoints.folder / STEP.format(self._version)
        async with self._until_stopped():
            with self._clock.span("meet"):
                change = await meetings.meet(self.num_steps, self._version, folder)
            if change is None:
                return
            self._sent_home = change.end
            if change.checkpoint is not None and not change.end:
                await self._adopt(change, change.checkpoint)

    async def _adopt(self, change: Switch, checkpoint: Path) -> None:
        """Go on from another run's checkpoint as a new version, later than any in it, and save that at once."""
        await self._give_up_groups()
        if change.config is not None:
            self.algorithm = self._learner.algorithm = change.config.algorithm
            await asyncio.gather(*(model.retune(change.config) for model in self.workers.models.values()))
        state = read_state(checkpoint)
        self._version = self._restored = max(self._version, state.version) + 1
        await self._restore(checkpoint, state, self._version)
        await self.weights.publish(self._version)
        self._learner.is_half_way = False
        self._go_on()
        back = RolledBack(self._version, state.version, self.num_lost, self.end, change.parent, dict(change.values))
        self.events.emit(back)
        await self._save(self._version)
        await self._saved()

    async def _train(self) -> None:
        """Run one optimizer step after the other.

        Consumes groups that have all their columns, produces weights and metrics. Waits for the oldest groups to be
        complete; unblocked by `_produce` and `_annotate`, or a group being dropped. Waits for a running evaluation only
        when the next one is due, and at the end. In a population it waits before some steps for the other runs, see
        `_meet`. `stop` unblocks every wait. An evaluation that is the last of too many without a better value ends the
        loop before its next step.
        """
        await self._evaluate(self._version)
        while self._version < self.end and not self._stopping and not self.early_stop:
            if self.meetings and self.meetings.is_due(self.num_steps):
                await self._meet(self.meetings)
                continue
            groups: list[InFlightGroup] = []
            async with self._until_stopped():
                with self._clock.span("wait_batch"):
                    groups = await self.queue.take(self._version)
            if self._stopping:
                self.queue.put_back(LEARNER, groups)
                break
            if (result := await self._train_step(groups, self._version)) is None:
                continue
            try:
                async with self._until_stopped():
                    with self._clock.span("publish"):
                        await self.weights.publish(self._version + 1)
            finally:
                tasks = self._finish(groups, result)
            await self._maybe_save(self._version)
            await self._record(self._version, tasks, result)
            await self._evaluate(self._version)
        if self.evaluation:
            async with self._until_stopped():
                await self.evaluation.end()
        await self._saved()

    def _finish(self, groups: Sequence[InFlightGroup], result: StepResult) -> list[Task]:
        """Count a trained step, whether or not its weights could be published; return its tasks."""
        version = self._version
        if self.repacker:
            self.repacker.published(version + 1)
        tasks = self.queue.release(groups, version + 1)
        metrics = step_metrics(result, version, self.queue, self._clock)
        if self.repacker:
            metrics["async/moved"] = self.repacker.num_moved
        metrics |= {**self.queue.ledger.metrics(), **self.weights.metrics, **self.machines()}
        if (free := free_gb(self.records.folder)) is not None:
            metrics["driver/disk_free"] = free
        self._version, self._num_deaths = version + 1, 0
        self.events.emit(StepDone(version + 1, metrics, tuple(group.group_id for group in groups)))
        return tasks

    async def _evaluate(self, version: PolicyVersion) -> None:
        with self._clock.span("eval_wait"):
            if self.evaluation:
                async with self._until_stopped():
                    await self.evaluation.begin(version)

    async def _train_step(self, groups: Sequence[InFlightGroup], version: PolicyVersion) -> StepResult | None:
        """Train one step; return None if it fails and its groups are put back, reissued or dropped, or if it does not
        end in time after `stop`.
        """
        result, began = None, asyncio.get_running_loop().time()
        try:
            async with self._until_stopped(self._longest_s):
                result = await self._learner.step([each.group for each in groups], version)
        except PayloadLost as error:
            self.queue.put_back(LEARNER, self._dropped_groups.reissue_lost(error, groups))
        except NoSignal as error:
            self._dropped_groups.drop_step(groups, error)
        else:
            self._longest_s = max(self._longest_s, asyncio.get_running_loop().time() - began)
            if result is None:
                self.queue.put_back(LEARNER, groups)
            else:
                self._dropped_groups.trained()
        return result

    async def _record(self, step: int, tasks: Sequence[Task], result: StepResult) -> None:
        if self.records.is_due(step):
            async with self._until_stopped(STOP_S) as wait:
                with self._clock.span("record"):
                    await self.records.begin(step, tasks, result)
            if wait.expired():
                self.events.emit(FileSkipped(str(self.records.path(step)), "the run ended before it was written"))

    async def _maybe_save(self, step: int) -> None:
        is_last = step >= self.end or self._stopping
        is_last = is_last or (self.meetings is not None and self.meetings.is_due(self.num_steps))
        if self._saving is not None and self._saving.done():
            await self._saving  # raises why the last one failed
        if not self.checkpoints.is_due(step, asyncio.get_running_loop().time(), is_last=is_last):
            return
        await self._save(step)

    async def _save(self, step: int) -> None:
        """Begin to save `step`, once the checkpoint before is written."""
        await self._saved()
        began = asyncio.get_running_loop().time()
        writing = None
        async with self._until_stopped(SAVE_S):
            with self._clock.span("checkpoint"):
                writing = await self._begin_save(step)
        if writing is None:
            raise CheckpointError(_UNSAVED.format(step))
        self._saving = asyncio.create_task(self._finish_save(step, began, writing))

    async def _saved(self) -> None:
        """Wait until the checkpoint that is being written, if there is one, is on disk. Raises `CheckpointError`."""
        if self._saving is None:
            return
        async with self._until_stopped(SAVE_S) as wait:
            await self._saving
        if wait.expired():
            raise CheckpointError(_UNSAVED.format(self._version))

    async def _save_rest(self) -> None:
        """Save the last finished step, unless that is done, or a later step changed the weights and did not end."""
        if self._version > self._restored and not self._learner.is_half_way:
            await self._maybe_save(self._version)
        await self._saved()

    async def _save_after(self, error: BaseException) -> None:
        """Save what there is before `error` ends the run, and note in it what can be resumed."""
        reason = "" if not self._learner.is_half_way else "a later step did not end"
        try:
            await self._save_rest()
        except RlsysError as problem:
            reason = str(problem)
        saved = self.checkpoints.last_saved
        if saved != self._version and self._version > self._restored:
            error.add_note(f"step {self._version} could not be saved: {reason}")
        kept = "no step is saved; begin anew" if saved is None else f"step {saved} is saved; go on"
        error.add_note(f"{kept} with run.resume=auto")

    async def _begin_save(self, step: int) -> Awaitable[Path]:
        """Copy all state of `step`; the result is awaited until it is on disk. Leaves out finished groups whose payload
        is lost."""
        finished = self.queue.finished  # the hashes of all their versions have arrived: they were verified
        past = dict(self._learner.past)
        published, scores = dict(self.weights.published), self.checkpoints.best.state()
        state = DriverState(step, published, self.queue.ledger.state(), past, self.num_lost, scores)

        async def begin(folder: Path) -> Awaitable[Files]:
            models = await save_models(self.workers, folder)

            async def finish() -> Files:
                num_bytes, files = await asyncio.gather(self._save_groups(folder / GROUPS, finished), models)
                return {**files, GROUPS: num_bytes}

            return finish()

        return await self.checkpoints.save(step, state, begin)

    async def _finish_save(self, step: int, began: float, writing: Awaitable[Path]) -> None:
        path = await writing
        self.events.emit(CheckpointSaved(step, str(path), asyncio.get_running_loop().time() - began))
        if self.copies:
            self.copies.begin()

    async def _save_groups(self, path: Path, groups: Sequence[InFlightGroup]) -> int:
        """Write the groups; return the size of the file. Leave out groups whose payload is lost, and reissue them
        unless they are in training now."""
        try:
            return await self.workers.actor.save_groups(path, [each.group for each in groups])
        except PayloadLost as error:
            lost = [each for each in groups if each.group_id in error.group_ids]
            if not lost:
                raise
            if waiting := [each for each in lost if each in self.queue.finished]:
                self._dropped_groups.reissue_lost(error, waiting)
            return await self._save_groups(path, [each for each in groups if each not in lost])

    # --------------------------------------------------------------------------------------------------------- relays

    async def supervise(self) -> None:
        """Replace dead relays and emit an event for each. Waits for one to die; cancelled at the end.

        `run` runs this loop. After `run`, the caller runs it as long as the weights of this policy are needed.
        """
        await self.workers.relays.supervise(
            lambda error: self.events.emit(WorkerFailed(error.worker, error.phase, str(error))),
            lambda worker, seconds: self.events.emit(WorkerRestarted(worker, seconds)),
        )

    # ----------------------------------------------------------------------------------------------------------- watch

    async def _watch(self) -> None:
        """End the run if nothing moves for `no_progress_s`.

        Waits for that long after the last group or step; only the end of the run unblocks it.
        """
        while (left_s := self.no_progress_s - self.queue.progress.idle_s()) > deadlines.ROUNDING_S:
            await deadlines.sleep(left_s)  # the absence of progress cannot notify
        pending = self.queue.table(self.workers.rollouts.placements())
        pending += self.evaluation.table() if self.evaluation else ""
        raise NoProgress(f"nothing moved for {self.no_progress_s:g} s; pending:\n{pending}")
