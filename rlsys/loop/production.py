"""Work on groups beside the learner: from a permit to a scored group in the queue, and columns of annotators."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from rlsys.algorithm import Column
from rlsys.contracts import Replacement, Workers
from rlsys.errors import DeadlineExceeded, GroupExpired, PayloadLost, WorkerDied
from rlsys.loop.curation import Curation, check_teaches
from rlsys.loop.failure_policy import DroppedGroups, GivenUp, Retries
from rlsys.loop.group_queue import GroupQueue, InFlightGroup, Permit
from rlsys.loop.learner import REFERENCE, Learner
from rlsys.loop.recovery import Recovery
from rlsys.loop.step_metrics import StepClock
from rlsys.monitoring.events import Events, GroupReissued, emit_busy
from rlsys.types import Busy, Group
from rlsys.weight_sync.sync import WeightSync

ANNOTATED_AT_ONCE = 8
"""Micro-batches of tokens per call of an annotator: enough for full utilisation, few enough to stream."""


@dataclass
class Production:
    """Producers and annotators of a run."""

    workers: Workers
    queue: GroupQueue
    weights: WeightSync
    learner: Learner
    recovery: Recovery
    retries: Retries
    dropped_groups: DroppedGroups
    events: Events
    clock: StepClock

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return one loop of `produce` for each permit, and one of `annotate` for each column."""
        producers = [self.produce() for _ in range(self.queue.bound.capacity)]
        return [*producers, *(self.annotate(column) for column in sorted(self.queue.columns))]

    async def produce(self) -> None:
        """Roll out and score one group after the other.

        Consumes permits and tasks, produces episodes and rewards. Waits for a free permit; unblocked by the learner
        releasing a step's permits, or by another group being dropped or lost.
        """
        while True:
            async with self.queue.permit() as permit:
                with self.clock.producing():
                    await self._fill(permit)

    async def _fill(self, permit: Permit) -> None:
        """Roll out and score the group of a permit, or give it up if the failure policy decides so."""
        persist, workers = self.retries.persist, self.workers
        try:
            await persist(workers.rollouts, lambda: self._roll_out(permit))
            source = permit.group.assignment.task.source
            scored = await persist(workers.rewards, lambda: self._score(permit.group), source)
            if not permit.group.is_over:
                scored = await self._curation.on_scored(scored, self.queue.oldest_in_time, self._replace)
            await persist(workers.rewards, lambda: self._hand_in(permit.group, scored))
        except PayloadLost as error:
            self.dropped_groups.reissue_lost(error, [permit.group])
        except GivenUp as given_up:
            self.dropped_groups.give_up(permit.group, given_up)

    async def _roll_out(self, permit: Permit) -> None:
        group = self.queue.start_rollout(permit)
        try:
            (rolled_out,) = await self.workers.rollouts.run(group.assignment)
        except GroupExpired as expired:
            self.events.emit(GroupReissued(group.group_id, group.assignment.task.id, str(expired)))
            raise
        report = rolled_out.report
        assert report is not None, f"group {group.group_id} has no report"
        self.clock.add("rollout", report.busy)  # at once: events align its end with the present
        emit_busy(self.events, "pulling", report.pulls, answered_s=report.busy.end_s)
        self.weights.note_pulls(rolled_out)
        try:
            await self.weights.verify(rolled_out)
        except (WorkerDied, DeadlineExceeded) as failure:
            if not self.recovery.is_of_model(failure):
                raise
            self.recovery.report_failure(failure)
            await asyncio.Event().wait()  # the learner cancels this loop: its version will never arrive
        self.clock.offer(rolled_out, report.waited_s)
        self.queue.finish_rollout(group, rolled_out)

    async def _score(self, group: InFlightGroup) -> Group:
        scored = await self.workers.rewards.score(group.assignment.task, group.group)
        self.clock.add("reward", scored.busy)
        group.scoring = scored.busy
        return group.group.with_scores(scored.scores)

    async def _replace(self, replacement: Replacement) -> Group:
        composer = self.workers.composer
        assert composer is not None, "a run that stores successes has one"
        return await self.retries.persist(composer, lambda: composer.replace_episode(replacement))

    async def _hand_in(self, group: InFlightGroup, scored: Group) -> None:
        """Offer a scored group to the learner. Raises `NothingToTrain` or `ZeroAdvantage` if it cannot be trained."""
        if not self.queue.score(group, scored):
            return
        check_teaches(scored, self.learner.algorithm)
        self.queue.offer(group)
        self.dropped_groups.on_group_scored()

    @property
    def _curation(self) -> Curation:
        return self.queue.ledger.curation

    async def annotate(self, column: Column) -> None:
        """Add one column to each group as it arrives, while others are still being rolled out.

        Consumes episodes, produces the column `column`. Waits for a rolled-out group; unblocked by `produce`.
        """
        loop = asyncio.get_running_loop()
        while True:
            taken = await self.queue.take_for(column, ANNOTATED_AT_ONCE * self.learner.shape.max_tokens)
            began = loop.time()
            maker = self.workers.annotators[column]
            groups = [each.group for each in taken]
            try:
                annotated = await self.retries.persist(maker, lambda: maker.annotate(groups, column))  # noqa: B023
            except PayloadLost as error:
                self.queue.put_back(column, self.dropped_groups.reissue_lost(error, taken))
                continue
            self.clock.add("annotate", Busy(REFERENCE, began, loop.time()))
            for group, answer in zip(taken, annotated, strict=True):
                self.queue.put(group, column, answer.columns[column])
