"""Measuring a policy on data sets of its own: the same rollouts and rewards as in training, without a learner.

`Evaluator` measures what its replicas hold. `EvaluationLane` measures the policy while it is trained: each version that
is due is pinned, then measured beside training, whatever the learner publishes meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from rlsys.contracts import PinnedRollouts, Rewards, Rollouts
from rlsys.data.task_source import content_hash
from rlsys.errors import PayloadLost, RlsysError, RunAborted, TaskTooLong, WeightsMismatch
from rlsys.loop.eval_metrics import EvalMetrics, eval_metrics_of
from rlsys.loop.failure_policy import Abort, Decision, FailurePolicy
from rlsys.loop.retry import Retries
from rlsys.monitoring.event_builders import emit_busy
from rlsys.monitoring.events import EvalDone, Events
from rlsys.types import Assignment, Group, PolicyVersion, Task
from rlsys.util.files import write_atomically
from rlsys.util.seeds import group_seed
from rlsys.weight_sync.sync import WeightSync


@dataclass(frozen=True, slots=True)
class EvalRules:
    """How a data set is sampled and counted."""

    samples: int
    """Samples per task."""
    temperature: float
    """What `rollouts` samples with; it is only written down here."""
    seed: int
    """Every evaluation samples with the same seeds, so that two differ by their weights alone."""
    pass_reward: float
    """A sample with this reward or more passes."""
    max_open: int
    """Tasks rolled out or scored at once, over all data sets."""


@dataclass
class Evaluator:
    """Samples and judges every task of every data set, on whatever weights `rollouts` holds."""

    rollouts: Rollouts
    rewards: Rewards
    failures: FailurePolicy
    events: Events
    sets: Mapping[str, Sequence[Task]]
    rules: EvalRules

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.rules.max_open)
        self._persistence = Retries(self.events, self._decide)

    async def measure(
        self, dataset: str, version: PolicyVersion = 0, check: Callable[[Group], Awaitable[None]] | None = None
    ) -> EvalMetrics:
        """The measures of one data set, sampled from weights no older than `version`.

        `check` sees every group before it is scored; what it raises of a worker is treated as that worker's failure.
        Work a machine broke is done again, by the failure policy. Raises `RunAborted` where that gives up, and
        `RlsysError` if nothing could be scored. A prompt over the limit is counted, and ends nothing.
        """
        async with asyncio.TaskGroup() as work:
            scoring = [
                work.create_task(self._scored(group_id, task, version, check))
                for group_id, task in enumerate(self.sets[dataset])
            ]
        scored = [done.result() for done in scoring]
        groups = [group for group in scored if group is not None]
        rules, num_too_long = self.rules, len(scored) - len(groups)
        try:
            return eval_metrics_of(
                groups, samples=rules.samples, pass_reward=rules.pass_reward, num_too_long=num_too_long
            )
        except RlsysError as error:
            raise RlsysError(f"evaluation on {dataset}: {error}") from error

    async def _scored(
        self, group_id: int, task: Task, version: PolicyVersion, check: Callable[[Group], Awaitable[None]] | None
    ) -> Group | None:
        """One task's group with its scores; None if its prompt is over the limit."""
        assignment = Assignment(group_id, task, self.rules.samples, version, group_seed(self.rules.seed, group_id))
        async with self._room:
            for attempt in count(1):
                try:
                    return await self._attempt(assignment, check)
                except PayloadLost as error:
                    if isinstance(decision := self._decide(error, attempt), Abort):
                        raise RunAborted(decision.message) from error
        raise AssertionError("unreachable")

    async def _attempt(self, assignment: Assignment, check: Callable[[Group], Awaitable[None]] | None) -> Group | None:
        async def rolled_out() -> Group | None:
            try:
                done = await self.rollouts.run(assignment)
            except TaskTooLong:
                return None
            group, busy = done.group, done.busy
            emit_busy(self.events, "pulling", done.pulls, answered_s=busy.end_s)
            emit_busy(self.events, "evaluating", [busy], answered_s=busy.end_s)
            if check is not None:
                await check(group)
            return group

        persist, task = self._persistence.persist, assignment.task
        group = await persist(self.rollouts, rolled_out)
        if group is None:
            return None
        scored = await persist(self.rewards, lambda: self.rewards.score(task, group))
        emit_busy(self.events, "scoring", [scored.busy], answered_s=scored.busy.end_s)
        return group.with_scores(scored.scores)

    def _decide(self, error: RlsysError, attempt: int) -> Decision:
        return self.failures.decide(error, attempt=attempt, dropped_in_a_row=0)


class Evaluation:
    """What the driver asks of whoever measures the policy in training. This one measures nothing."""

    was_given_up = False
    """Was `stop` the end of an evaluation that was due?"""

    def attach(self, loops: asyncio.TaskGroup, on_progress: Callable[[], None]) -> None:
        """Work in `loops` from now, so that a failure ends them all; `on_progress` is called when something moved."""

    async def begin(self, version: PolicyVersion) -> None:
        """Measure `version`, the newest published, if it is due.

        Returns once its weights cannot be lost; measuring goes on meanwhile. Waits for the previous evaluation to end.
        """

    async def end(self) -> None:
        """Return once the evaluation under way, if there is one, has ended."""

    def stop(self) -> None:
        """Give up the evaluation under way, and begin no other."""

    def table(self) -> str:
        """What is under way, a line; empty if nothing is."""
        return ""


@dataclass
class EvaluationLane(Evaluation):
    """Measures every version that is due on replicas of its own, which hold exactly that version meanwhile.

    What was measured is written to `folder/DATASET/step_000010.json` with hashes of the weights and the tasks and with
    the rules; a resumed run does not measure again what is the same in all of them.
    """

    evaluator: Evaluator
    """Samples from `rollouts`."""
    rollouts: PinnedRollouts
    weights: WeightSync
    every: int
    """Steps between two evaluations; version 0 is measured too."""
    last: PolicyVersion
    """Version at which the run is done; measured whatever `every` says."""
    folder: Path
    _under_way: asyncio.Task[None] | None = field(default=None, init=False)
    _is_stopped: bool = field(default=False, init=False)

    def attach(self, loops: asyncio.TaskGroup, on_progress: Callable[[], None]) -> None:
        """See `Evaluation.attach`. Called once, before anything else."""
        self._loops, self._on_progress = loops, on_progress

    async def begin(self, version: PolicyVersion) -> None:
        """See `Evaluation.begin`.

        Unblocked by the previous evaluation ending or `stop`, and by the relays getting `version`.
        """
        if not (version % self.every == 0 or version == self.last):
            return
        await self.weights.arrived(version)
        datasets = [name for name in self.evaluator.sets if not self._is_done(name, version)]
        if not datasets:
            return
        await self.end()
        await self.rollouts.pin(version)
        if self._is_stopped:
            self.was_given_up = True
            return
        self.weights.kept.add(version)
        work, name = self._measure_all(datasets, version), f"evaluation of version {version}"
        self._under_way = self._loops.create_task(work, name=name)

    async def end(self) -> None:
        """See `Evaluation.end`."""
        if self._under_way:
            await asyncio.wait([self._under_way])

    def stop(self) -> None:
        """See `Evaluation.stop`."""
        self._is_stopped = True
        if self._under_way and self._under_way.cancel():
            self.was_given_up = True

    def table(self) -> str:
        """See `Evaluation.table`."""
        return f"\n  {self._under_way.get_name()}" if self._under_way and not self._under_way.done() else ""

    async def _measure_all(self, datasets: Sequence[str], version: PolicyVersion) -> None:
        try:
            async with asyncio.TaskGroup() as work:
                for dataset in datasets:
                    work.create_task(self._measure(dataset, version))
        finally:
            self.weights.kept.discard(version)

    async def _measure(self, dataset: str, version: PolicyVersion) -> None:
        began = asyncio.get_running_loop().time()

        async def check(group: Group) -> None:
            await self._verify(group, version)
            self._on_progress()

        measures = await self.evaluator.measure(dataset, version, check)
        seconds = asyncio.get_running_loop().time() - began
        self._write(dataset, version, measures)
        metrics = measures.as_metrics(dataset)
        self.evaluator.events.emit(EvalDone(version, dataset, self.weights.published[version], seconds, metrics))

    async def _verify(self, group: Group, version: PolicyVersion) -> None:
        """Raise `WeightsMismatch` unless every token is of `version`, acknowledged with the published hash."""
        await self.weights.verify(group)
        if others := {span.version for span in group.versions} - {version}:
            detail = f"tokens of version {min(others)} in the evaluation of version {version}"
            raise WeightsMismatch(group.replica, f"rolling out group {group.group_id}", detail)

    def _path(self, dataset: str, version: PolicyVersion) -> Path:
        return self.folder / dataset / f"step_{version:06d}.json"

    def _is_done(self, dataset: str, version: PolicyVersion) -> bool:
        path = self._path(dataset, version)
        if not path.is_file():
            return False
        row = json.loads(path.read_bytes())
        return all(row.get(key) == value for key, value in self._measured(dataset, version).items())

    def _measured(self, dataset: str, version: PolicyVersion) -> dict[str, str | float]:
        """All that decides a result: the weights, the tasks (after `eval.limit`) and the rules."""
        rules = self.evaluator.rules
        return {
            "hash": self.weights.published[version],
            "tasks": content_hash(self.evaluator.sets[dataset]),
            "samples": rules.samples,
            "temperature": rules.temperature,
            "seed": rules.seed,
            "pass_reward": rules.pass_reward,
        }

    def _write(self, dataset: str, version: PolicyVersion, measures: EvalMetrics) -> None:
        path = self._path(dataset, version)
        row = {"step": version, "dataset": dataset, **self._measured(dataset, version), **measures.as_json()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(row, indent=1) + "\n")
        except OSError as error:
            raise RlsysError(f"the evaluation of step {version} cannot be written to {path}: {error}") from error
