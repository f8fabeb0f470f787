"""The driver of one training job: many producers, one learner, and a queue of groups between them.

    loop       consumes            produces           waits for                      unblocked by
    produce    permits, tasks      episodes, rewards  a free permit                  learn releasing a step's permits
    annotate   episodes            a column           a rolled-out group             produce
    learn      groups that have    weights, metrics   the next groups in order to    produce and annotate, or a group
               all their columns                      have all their columns         being dropped; the death of a rank
    evaluate   pinned weights      eval metrics       its replicas and rewards       their results
    supervise  dead relays         filled relays      a relay to die                 never; cancelled at the end
    repack     loads of replicas   moves              learn's publish, or 5 s        learn; cancelled at the end
    look       loads, placements   events             `look_s`                       never; cancelled at the end
    watch      idle time           NoProgress         the no-progress limit          never; cancelled at the end

Beside them, what a step began goes on: its weights arrive, its checkpoint and its rollout file are written. The next of
its kind waits for it, and raises its failure.

The driver decides and never touches the payload of a group. The number of permits bounds staleness
(`rlsys.loop.admission`); `queue.take` checks it again. Synchronous RL is this loop with `max_staleness: 0`. `produce`
and `annotate` are in `rlsys.loop.production`, which issues a group again if its worker dies; `repack` and `look` are
companions, which a run can do without. `rlsys.loop.recovery` replaces all ranks after the death of one. Numbers that
are not finite end the run, with the step kept for a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlsys.contracts import Workers
from rlsys.errors import (
    CheckpointError,
    DeadlineExceeded,
    NoProgress,
    PayloadLost,
    RlsysError,
    WorkerDied,
    WorkerError,
    ZeroAdvantage,
    first_of,
)
from rlsys.loop.companion import Companion
from rlsys.loop.device_leases import ACTOR, ROLLOUT
from rlsys.loop.evaluation import EvaluationLane
from rlsys.loop.failure_policy import DroppedGroups
from rlsys.loop.group_queue import LEARNER, GroupQueue, InFlightGroup
from rlsys.loop.learner import Learner, StepResult
from rlsys.loop.production import Production
from rlsys.loop.recovery import Recovery
from rlsys.loop.rollout_writer import RolloutWriter
from rlsys.loop.run_position import RunPosition
from rlsys.loop.saver import SAVE_S, Saver
from rlsys.loop.step_metrics import StepClock, step_metrics
from rlsys.loop.stop_request import StopRequest
from rlsys.monitoring.events import Events, FileSkipped, StepDone, WorkerFailed, WorkerRestarted
from rlsys.types import PolicyVersion, Task
from rlsys.util import deadlines
from rlsys.util.any_paths import AnyPath
from rlsys.util.files import free_gb
from rlsys.weight_sync.sync import WeightSync

STOP_S = 30.0
"""Seconds that a step under way may take once the run is to end, or as many as the longest step took; saving has
`SAVE_S` besides."""


@dataclass
class Driver:
    """Coordinator of the loops; each decision belongs to one of its parts."""

    workers: Workers
    queue: GroupQueue
    """Emits its transitions to the same `events`. Its ledger draws the tasks."""
    weights: WeightSync
    learner: Learner
    saver: Saver
    recovery: Recovery
    production: Production
    dropped_groups: DroppedGroups
    records: RolloutWriter
    events: Events
    clock: StepClock
    stop_request: StopRequest
    """Its `cuts(s)` cancels a block s seconds after `stop`, and goes on behind it."""
    position: RunPosition
    """Shared with saver and recovery."""
    no_progress_s: float
    evaluation: EvaluationLane | None = None
    companions: Sequence[Companion] = ()
    machines: Callable[[], Mapping[str, float]] = dict
    """Returns the newest metrics of the run's machines, at once."""
    _longest_s: float = field(default=STOP_S, init=False)
    """Seconds of the longest step of this session, at least `STOP_S`."""
    _filling: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    """The loops of producers and annotators."""
    _loops: asyncio.TaskGroup = field(init=False)
    _failures: list[WorkerError] = field(default_factory=list, init=False)
    """Those of actor or critic since the last finished step."""

    @property
    def end(self) -> PolicyVersion:
        """Policy version at which the run ends, unless there is an `early_stop`; later by what recoveries lost."""
        return self.recovery.end

    @property
    def early_stop(self) -> str:
        """Reason for which the run ends before `end`; empty if it does not."""
        return self.saver.checkpoints.best.early_stop

    async def restore(self, checkpoint: AnyPath) -> PolicyVersion:
        """Load a checkpoint, or for a damaged one the next older one, into all parts; return its version, which `run`
        publishes before it admits any group.

        Finished groups are rolled out again if they do not fit a smaller queue or shorter run, or would be too stale.
        Raises `CheckpointError`, or `DataError` if the tasks have changed.
        """
        version = await self.recovery.restore(checkpoint)
        if self.evaluation:
            self.evaluation.recall(self.end)
        return version

    async def run(self, start: PolicyVersion) -> PolicyVersion:
        """Train from version `start` to `end`; return the version reached, which is lower only after `stop` or with an
        `early_stop`.

        Raises the `RlsysError` that ended the run, once the last finished step is saved: a note of the error names the
        checkpoint to go on from. The same holds if the caller cancels this, since another policy failed or the cluster
        is lost. Any other exception is a bug, and propagates without a save.
        """
        self.recovery.begin(start)
        async with self.stop_request.cuts(), self.learner.devices.lease(ACTOR):
            await self.weights.publish(start)
        learning = asyncio.create_task(self._learn())
        patience_s = SAVE_S
        try:
            await self._loop(learning)
            await asyncio.wait([learning])  # after `stop` it may still be in a step
            learning.result()
            await self.saver.save_rest()
        except (RlsysError, asyncio.CancelledError) as error:
            patience_s = 0.0 if isinstance(error, asyncio.CancelledError) else STOP_S
            await asyncio.gather(learning, return_exceptions=True)
            if not isinstance(error, CheckpointError):  # it says itself what is saved
                await self.saver.save_before(error)
            raise
        finally:
            learning.cancel()
            await asyncio.gather(learning, return_exceptions=True)
            await self.saver.end_saving()
            await self.records.end(patience_s)
            self.weights.give_up()
        return self.position.version

    async def _loop(self, learning: asyncio.Task[None]) -> None:
        """Run all other loops until the learner ends, or `stop`. Raises the first error; then the learner ends too."""
        self.clock.start()
        try:
            async with asyncio.TaskGroup() as loops:
                if self.evaluation:
                    self.evaluation.attach(loops, self.queue.progress.mark_progress)
                self._loops = loops
                self._fill_queue()
                others = [loops.create_task(self._watch()), loops.create_task(self.supervise())]
                others += [loops.create_task(companion.run()) for companion in self.companions]
                try:
                    async with self.stop_request.cuts():
                        await asyncio.wait([learning])
                        learning.result()
                        await self.weights.wait_for_arrivals()
                finally:
                    self.stop()
                for loop in (*others, *self._filling):
                    loop.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None

    def stop(self) -> None:
        """Finish the step, save, and return from `run`. The first Ctrl-C calls this; the second ends the process.

        A step that does not end in time is given up; if its models had begun to train, nothing more is saved. All other
        work ends at once; its groups are rolled out again after a resume, and a running evaluation is cancelled.
        """
        if self.stop_request.is_made:
            return
        self.stop_request.make()
        if self.evaluation:
            self.evaluation.stop()

    # ----------------------------------------------------------------------------------------------------------- learn

    def _fill_queue(self) -> None:
        """Start the loops of producers and annotators, on the weights of `position`."""
        for companion in self.companions:
            companion.on_publish(self.position.version)
        self._filling = [self._loops.create_task(loop) for loop in self.production.loops()]

    async def _learn(self) -> None:
        """Train until the end, or `stop`. If a rank of actor or critic dies or freezes, or a producer meets that
        (`Recovery.trouble`), replace all and go on; after `stop`, end with what is saved. Raises `RunAborted` if that
        happens too often without a finished step."""
        failure: WorkerError | None = None
        while True:
            try:
                if failure is not None:
                    await self._recover(failure)
                watches = [m.watch(self.queue.progress.mark_progress) for m in self.workers.models.values()]
                await deadlines.unless(self._train(), *watches, self.recovery.trouble())
            except (WorkerDied, DeadlineExceeded) as error:
                if not self.recovery.is_of_model(error):
                    raise
                if self.stop_request.is_made:
                    self.saver.lose_models(error)
                    return
                failure = error
                self._failures.append(error)
                self.dropped_groups.failures.check_replaceable(self._failures)
            else:
                return

    async def _recover(self, failure: WorkerError) -> None:
        """Give up all groups, and a running evaluation, and go on from the newest whole checkpoint, or else from the
        beginning of the session, as a new version."""
        began = asyncio.get_running_loop().time()
        self.events.emit(WorkerFailed(failure.worker, failure.phase, str(failure)))
        self.learner.is_half_way = True  # the weights belong to no version until a checkpoint is loaded
        for loop in self._filling:
            loop.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)
        if self.evaluation:
            self.evaluation.give_up()
        self.weights.give_up()
        rolled_back = None
        async with self.stop_request.cuts():
            rolled_back = await self.recovery.replace_models()
        if rolled_back is None:  # by `stop`
            return
        if self.evaluation:
            self.evaluation.recall(self.end)
        self._fill_queue()
        self.events.emit(rolled_back)
        self.events.emit(WorkerRestarted(failure.worker, asyncio.get_running_loop().time() - began))

    async def _train(self) -> None:
        """Run one optimizer step after the other.

        Consumes groups that have all their columns, produces weights and metrics. Waits for the next groups to be
        complete; unblocked by `Production`, or a group being dropped. Waits for a running evaluation only when the next
        one is due, and at the end; one of too many without a better value ends the loop. `stop` unblocks every wait.
        """
        await self._evaluate()
        while self.position.version < self.end and not self.stop_request.is_made and not self.early_stop:
            groups: list[InFlightGroup] = []
            async with self.stop_request.cuts(), self.learner.devices.lease(ROLLOUT):
                with self.clock.span("wait_batch"):
                    groups = await self.queue.take(self.position.version)
            if self.stop_request.is_made:
                self.queue.put_back(LEARNER, groups)
                break
            if (result := await self._train_step(groups)) is None:
                continue
            try:
                async with self.stop_request.cuts(), self.learner.devices.lease(ACTOR):
                    with self.clock.span("publish"):
                        await self.weights.publish(self.position.version + 1)
            finally:
                tasks = self._finish_step(groups, result)
            await self.saver.save_if_due(is_last=self.position.version >= self.end)
            await self._record(tasks, result)
            await self._evaluate()
        if self.evaluation:
            async with self.stop_request.cuts():
                await self.evaluation.end()
        await self.saver.finish_saving()

    async def _train_step(self, groups: Sequence[InFlightGroup]) -> StepResult | None:
        """Train one step; return None if it fails, or does not end in time after `stop`.

        Lost groups are issued again, the others put back; if nothing is left to train, all are dropped. Raises
        `RunAborted` if either happens too often.
        """
        result, began = None, asyncio.get_running_loop().time()
        try:
            async with self.stop_request.cuts(self._longest_s):
                result = await self.learner.step([each.group for each in groups], self.position.version)
        except PayloadLost as error:
            self.queue.put_back(LEARNER, self.dropped_groups.reissue_lost(error, groups))
        except ZeroAdvantage as error:
            self.dropped_groups.drop_step(groups, error)
        else:
            self._longest_s = max(self._longest_s, asyncio.get_running_loop().time() - began)
            if result is None:
                self.queue.put_back(LEARNER, groups)
            else:
                self.dropped_groups.on_step_trained()
        return result

    def _finish_step(self, groups: Sequence[InFlightGroup], result: StepResult) -> list[Task]:
        """Count a trained step, whether or not its weights could be published; return its tasks."""
        version = self.position.version
        for companion in self.companions:
            companion.on_publish(version + 1)
        tasks = self.queue.release(groups, version + 1)
        metrics = step_metrics(result, version, self.queue, self.clock)
        for companion in self.companions:
            metrics |= companion.metrics()
        metrics |= {**self.queue.ledger.metrics(), **self.weights.metrics, **self.machines()}
        if (free := free_gb(self.records.folder)) is not None:
            metrics["driver/disk_free"] = free
        self.position.version, self._failures = version + 1, []
        self.events.emit(StepDone(version + 1, metrics, tuple(group.group_id for group in groups)))
        return tasks

    async def _evaluate(self) -> None:
        """Begin the evaluation of this version, if due, once the one before is over and replicas have the weights."""
        with self.clock.span("eval_wait"):
            if self.evaluation:
                async with self.stop_request.cuts():
                    await self.evaluation.begin(self.position.version)

    async def _record(self, tasks: Sequence[Task], result: StepResult) -> None:
        step = self.position.version
        if self.records.is_due(step):
            async with self.stop_request.cuts(STOP_S) as wait:
                with self.clock.span("record"):
                    await self.records.begin(step, tasks, result)
            if wait.expired():
                self.events.emit(FileSkipped(str(self.records.path(step)), "the run ended before it was written"))

    # ------------------------------------------------------------------------------------------------ relays and watch

    async def supervise(self) -> None:
        """Replace dead relays and emit an event for each. Waits for one to die; cancelled at the end.

        `run` runs this loop. After `run`, the caller runs it as long as the weights of this policy are needed.
        """
        await self.workers.relays.supervise(
            lambda error: self.events.emit(WorkerFailed(error.worker, error.phase, str(error))),
            lambda worker, seconds: self.events.emit(WorkerRestarted(worker, seconds)),
        )

    async def _watch(self) -> None:
        """End the run if nothing moves for `no_progress_s`.

        Waits for that long after the last move of a group, step or evaluation; only the end of the run unblocks it.
        """
        while (left_s := self.no_progress_s - self.queue.progress.idle_s()) > deadlines.ROUNDING_S:
            await deadlines.sleep(left_s)  # the absence of progress cannot notify
        pending = self.queue.table(self.workers.rollouts.placements())
        pending += self.evaluation.table() if self.evaluation else ""
        raise NoProgress(f"nothing moved for {self.no_progress_s:g} s; pending:\n{pending}")
