"""Evaluation of a policy on separate data sets: the rollouts and rewards of training, without a learner."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from rlsys.config.eval_section import EvalSection, ks_up_to
from rlsys.contracts import PinnedRollouts, Rewards, Rollouts, TrainedGroup
from rlsys.data.task_source import content_hash
from rlsys.errors import PayloadLost, RlsysError, RunAborted, TaskTooLong, WeightsMismatch
from rlsys.loop.checkpoint import DriverState
from rlsys.loop.checkpoint_scores import BestCheckpoints
from rlsys.loop.device_leases import EVALUATION, DeviceLeases
from rlsys.loop.endpoints import Endpoints
from rlsys.loop.failure_policy import FailurePolicy, GivenUp, Retries
from rlsys.loop.rollout_writer import is_written
from rlsys.monitoring.events import CautionRaised, EvalDone, Events, FileSkipped, emit_busy, failures_in
from rlsys.types import Assignment, Group, GroupKey, OutcomeKind, PolicyVersion, Task, is_success
from rlsys.util.files import write_atomically
from rlsys.util.regular_files import read_regular
from rlsys.util.seeds import group_seed
from rlsys.weight_sync.sync import WeightSync

GroupCheck: TypeAlias = Callable[[Group], Awaitable[None]]
"""Called with a rolled-out group; a worker error that it raises counts as that worker's failure."""
Record: TypeAlias = Callable[[Path, PolicyVersion, Sequence[TrainedGroup]], Awaitable[None]]
"""Writes the groups of an evaluation of a version to a file, see `Actor.record_evaluated`."""
EVALUATIONS = "evaluations"
"""Folder of the results in a run directory."""
Z_95 = 1.96
"""Half width in standard errors of the central 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """Metrics of an evaluation on one data set."""

    num_tasks: int
    """Tasks with at least one scored sample."""
    samples: int
    """Samples per task."""
    mean: float
    """Mean over tasks of the mean reward of their samples (mean@k, k being `samples`)."""
    mean_ci95: float | None
    """Half width of the mean's 95 % confidence interval; None for a single task.

    Normal approximation over the means of the tasks. The samples of one task are correlated, so tasks count as
    independent, not samples (clustered standard errors, arXiv:2411.00640).
    """
    pass_at: Mapping[int, float]
    """k -> probability that at least one of k samples of a task passes; mean over tasks with k scored samples."""
    truncated_frac: float
    """Share of scored samples cut at the token limit."""
    failed_frac: float
    """Share of samples that could not be scored; no other metric counts them."""
    length_mean: float
    """Sampled tokens per scored sample, over all agents."""
    num_too_long: int
    """Tasks left out because their prompts exceed the limit."""

    def as_json(self) -> dict[str, float | None]:
        """Return one flat JSON object; `pass_at` becomes `pass@1`, `pass@2`, ..."""
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pass_at"}
        return {**flat, **{f"pass@{k}": share for k, share in self.pass_at.items()}}

    def as_metrics(self, dataset: str) -> dict[str, float]:
        """Return metric name -> value, e.g. `eval/held_out/pass@4`, without metrics that have no value."""
        return {f"eval/{dataset}/{name}": float(value) for name, value in self.as_json().items() if value is not None}


def table_of(results: Mapping[str, EvalMetrics]) -> list[str]:
    """Format the metrics of several data sets as a table: a header line, then a line per data set."""
    rows = {name: _cells(measures) for name, measures in results.items()}
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    lines = [["data set", *heads], *([name, *(cells.get(head, "") for head in heads)] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(measures: EvalMetrics) -> dict[str, str]:
    interval = "" if measures.mean_ci95 is None else f" ± {measures.mean_ci95:.3f}"
    return {
        "tasks": str(measures.num_tasks),
        "too long": str(measures.num_too_long),
        f"mean@{measures.samples}": f"{measures.mean:.3f}{interval}",
        **{f"pass@{k}": f"{share:.3f}" for k, share in measures.pass_at.items()},
        "tokens": f"{measures.length_mean:.1f}",
        "truncated": f"{measures.truncated_frac:.1%}",
        "failed": f"{measures.failed_frac:.1%}",
    }


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of `k` samples passes, if `num_passed` of `num_samples` did.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1), in exact integers up to the division.
    Raises `ValueError` unless 0 <= num_passed <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= num_passed <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_passed} of them passed, is not defined")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_passed, k)) / subsets


def eval_metrics_of(groups: Sequence[Group], samples: int, pass_reward: float, num_too_long: int) -> EvalMetrics:
    """Return the metrics of scored groups, one per task. A sample passes with a reward of at least `pass_reward`.

    Raises `RlsysError` if no sample was scored.
    """
    scored = [[(reward, group.episodes[e]) for e, reward in group.rewards().items()] for group in groups]
    scored = [task for task in scored if task]
    if not scored:
        reasons = [t.outcome.reason for g in groups for e in g.episodes for t in e.trajectories if t.outcome.is_failed]
        why = reasons[0] if reasons else f"{num_too_long} prompts are too long"
        raise RlsysError(f"no sample could be scored: {why}")
    means = [fmean(reward for reward, _ in task) for task in scored]
    counts = [(len(task), sum(is_success(reward, pass_reward) for reward, _ in task)) for task in scored]
    episodes = [episode for task in scored for _, episode in task]
    num_samples = samples * len(groups)
    by_k = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in ks_up_to(samples)}
    return EvalMetrics(
        num_tasks=len(scored),
        samples=samples,
        mean=fmean(means),
        mean_ci95=Z_95 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        pass_at={k: fmean(shares) for k, shares in by_k.items() if shares},
        truncated_frac=fmean(any(t.outcome.kind is OutcomeKind.TRUNCATED for t in e.trajectories) for e in episodes),
        failed_frac=(num_samples - len(episodes)) / num_samples,
        length_mean=fmean(sum(s.num_trained for t in e.trajectories for s in t.samples) for e in episodes),
        num_too_long=num_too_long,
    )


@dataclass
class Evaluator:
    """Samples and scores every task of every data set, on the weights loaded in `rollouts`."""

    rollouts: Rollouts
    rewards: Rewards
    failures: FailurePolicy
    events: Events
    sets: Mapping[str, Sequence[Task]]
    rules: EvalSection
    """Its temperature is that of `rollouts`, and only recorded here."""
    seed: int
    """The same for every evaluation, so that two evaluations differ only by their weights."""
    max_open: int
    """Tasks rolled out or scored concurrently, over all data sets."""
    success: float = 1.0
    """Reward from which a sample passes, for pass@k."""

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.max_open)
        endpoints = Endpoints(self.events, self.failures.limits.max_attempts)
        self._retries = Retries(self.events, self.failures.decide, endpoints)

    async def measure(self, dataset: str) -> EvalMetrics:
        """Evaluate one data set. Raises the errors of `sample` and `metrics_of`."""
        return self.metrics_of(dataset, await self.sample(dataset))

    async def sample(
        self, dataset: str, version: PolicyVersion = 0, check: GroupCheck | None = None
    ) -> list[Group | None]:
        """Return the scored group of every task of a data set, on weights no older than `version`; None for a prompt
        over the limit.

        `check` is called with every group before scoring. The failure policy decides on retries. Raises `RunAborted` if
        it ends the run.
        """
        async with asyncio.TaskGroup() as work:
            scoring = [
                work.create_task(self._score_task(group_id, task, version, check))
                for group_id, task in enumerate(self.sets[dataset])
            ]
        return [done.result() for done in scoring]

    def metrics_of(self, dataset: str, sampled: Sequence[Group | None]) -> EvalMetrics:
        """Return the metrics of what `sample` returned. Raises `RlsysError` if nothing could be scored."""
        groups = [group for group in sampled if group is not None]
        try:
            metrics = eval_metrics_of(groups, self.rules.samples, self.success, len(sampled) - len(groups))
        except RlsysError as error:
            raise RlsysError(f"evaluation on {dataset}: {error}") from error
        if not any(metrics.pass_at.values()):
            self._warn_of_unreached_success(
                dataset, [reward for group in groups for reward in group.rewards().values()]
            )
        return metrics

    def _warn_of_unreached_success(self, dataset: str, rewards: Sequence[float]) -> None:
        """Say so if many samples, of which none passed, have the same greatest reward: there may be no greater."""
        greatest = max(rewards)
        num = sum(is_success(reward, greatest) for reward in rewards)
        if greatest > 0 and num >= len(rewards) / 10:
            self.events.emit(
                CautionRaised(
                    f"eval/{dataset}/pass@k counts no sample: the greatest reward is {greatest:.4g}, of {num} of "
                    f"{len(rewards)} samples, and reward.success is {self.success:g}; lower it if that is a success"
                )
            )

    async def record(
        self, path: Path, dataset: str, version: PolicyVersion, sampled: Sequence[Group | None], record: Record
    ) -> None:
        """Write what `sample` returned with `record`. A failure of the writer costs the file, and is an event."""
        pairs = enumerate(zip(self.sets[dataset], sampled, strict=True))
        groups = [TrainedGroup(place, task, group, ()) for place, (task, group) in pairs if group is not None]
        await is_written(path, record(path, version, groups), self.events)

    def write(
        self, path: Path, dataset: str, version: PolicyVersion, measures: EvalMetrics, weights: Mapping[str, str]
    ) -> None:
        """Write a result with all that determines it, of which `weights` tells the weights. A file that cannot be
        written is an event."""
        row = {"step": version, "dataset": dataset, **weights, **self.conditions(dataset), **measures.as_json()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(row, indent=1) + "\n")
        except OSError as error:
            self.events.emit(FileSkipped(str(path), str(error)))

    def conditions(self, dataset: str) -> dict[str, str | float]:
        """Return all that determines a result but the weights: the tasks (after `eval.limit`) and the rules."""
        return {
            "tasks": content_hash(self.sets[dataset]),
            "samples": self.rules.samples,
            "temperature": self.rules.temperature,
            "seed": self.seed,
            "pass_reward": self.success,
        }

    async def _score_task(
        self, group_id: int, task: Task, version: PolicyVersion, check: GroupCheck | None
    ) -> Group | None:
        """Return the scored group of one task; None if its prompt exceeds the limit."""
        seed = group_seed(self.seed, group_id)
        assignments = (Assignment(GroupKey(group_id, n), task, self.rules.samples, version, seed) for n in count(1))
        async with self._room:
            for attempt in count(1):
                try:
                    return await self._attempt(assignments, task, check)
                except PayloadLost as error:
                    self.failures.decide(error, attempt)
                except GivenUp as given_up:
                    raise RunAborted(f"task {task.id} cannot be evaluated: {given_up.error}") from given_up
        raise AssertionError("unreachable")

    async def _attempt(self, assignments: Iterator[Assignment], task: Task, check: GroupCheck | None) -> Group | None:
        async def roll_out_group() -> Group | None:
            try:
                (group,) = await self.rollouts.run(next(assignments))
            except TaskTooLong:
                return None
            report = group.report
            assert report is not None, f"group {group.group_id} has no report"
            emit_busy(self.events, "pulling", report.pulls, answered_s=report.busy.end_s)
            emit_busy(self.events, "evaluating", [report.busy], answered_s=report.busy.end_s)
            if check is not None:
                await check(group)
            return group

        persist = self._retries.persist
        group = await persist(self.rollouts, roll_out_group)
        if group is None:
            return None
        scored = await persist(self.rewards, lambda: self.rewards.score(task, group), task.source)
        emit_busy(self.events, "scoring", [scored.busy], answered_s=scored.busy.end_s)
        return group.with_scores(scored.scores)


@dataclass
class EvaluationLane:
    """Evaluates every version that is due, in parallel to training, on replicas that keep exactly that version.

    Results are written to `folder/DATASET/step_000010.json` with the rules and the hashes of weights and tasks. A
    resumed run skips an evaluation for which all of these are equal. The samples are beside them, in a Parquet file in
    the form of `rlsys.replay.rollout_parquet`; its groups are numbered by task.
    """

    evaluator: Evaluator
    """Samples from `rollouts`."""
    rollouts: PinnedRollouts
    weights: WeightSync
    last: PolicyVersion
    """Version at which the run ends; evaluated for any value of `eval.every`."""
    folder: Path
    best: BestCheckpoints = field(default_factory=lambda: BestCheckpoints(0))
    """Receives all results."""
    record: Record | None = None
    """Writes the samples; None if none are recorded."""
    devices: DeviceLeases = field(default_factory=DeviceLeases)
    was_given_up: bool = field(default=False, init=False)
    """True if an evaluation that was due did not begin, or was cancelled by `stop`."""
    _under_way: asyncio.Task[None] | None = field(default=None, init=False)
    _is_stopped: bool = field(default=False, init=False)

    def attach(self, loops: asyncio.TaskGroup, on_progress: Callable[[], None]) -> None:
        """Create tasks in `loops`, so that a failure ends all loops; `on_progress` is called on every progress.

        Called once, before all other methods.
        """
        self._loops, self._on_progress = loops, on_progress

    def recall(self, last: PolicyVersion) -> None:
        """Go on from a checkpoint up to `last`. Add the results that earlier sessions wrote for versions with known
        hashes to `best`: one may have ended after the last checkpoint."""
        self.last = last
        for version in self.weights.published:
            for dataset in self.evaluator.sets:
                self._is_done(dataset, version)

    async def begin(self, version: PolicyVersion) -> None:
        """Evaluate `version`, the newest published, if it is due.

        Returns once its weights are pinned; the evaluation goes on meanwhile, unless its replicas share devices: then
        once it has ended. Waits for the previous evaluation to end and for `version` to arrive at the relays; unblocked
        by both, or by `stop`.
        """
        if not (version % self.evaluator.rules.every == 0 or version == self.last):
            return
        self.was_given_up, was_before = True, self.was_given_up
        await self.weights.wait_for_arrival(version)
        datasets = [name for name in self.evaluator.sets if not self._is_done(name, version)]
        if not datasets:
            self.was_given_up = was_before
            return
        await self.end()
        await self.rollouts.pin(version)
        if self._is_stopped:
            return
        self.was_given_up = False
        self.weights.kept.add(version)
        work, name = self._measure_all(datasets, version), f"evaluation of version {version}"
        async with self.devices.lease(EVALUATION):
            self._under_way = self._loops.create_task(work, name=name)
            if EVALUATION in self.devices.tenants:
                await self.end()

    async def end(self) -> None:
        """Return once the running evaluation, if there is one, has ended."""
        if self._under_way:
            await asyncio.wait([self._under_way])

    def stop(self) -> None:
        """Cancel the running evaluation, and start no other."""
        self._is_stopped = True
        self.give_up()

    def give_up(self) -> None:
        """Cancel the running evaluation, because the weights it pins are lost with the actor that owned them."""
        if self._under_way and self._under_way.cancel():
            self.was_given_up = True

    def table(self) -> str:
        """Return one line on the running evaluation; empty if there is none."""
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
            await self.weights.verify(group)
            if others := {span.version for span in group.versions} - {version}:
                detail = f"tokens of version {min(others)} in the evaluation of version {version}"
                raise WeightsMismatch(group.replica, f"rolling out group {group.group_id}", detail)
            self._on_progress()

        sampled = await self.evaluator.sample(dataset, version, check)
        seconds = asyncio.get_running_loop().time() - began
        recorded = asyncio.create_task(self._record(dataset, version, sampled))
        try:
            measures = self.evaluator.metrics_of(dataset, sampled)
            path = result_path(self.folder, dataset, version)
            self.evaluator.write(path, dataset, version, measures, self._weights(version))
            self.best.add(version, _by_name(dataset, measures.as_json()))
            metrics, failures = measures.as_metrics(dataset), failures_in(filter(None, sampled))
            done = EvalDone(version, dataset, self.weights.published[version], seconds, metrics, failures)
            self.evaluator.events.emit(done)
        finally:
            await recorded

    async def _record(self, dataset: str, version: PolicyVersion, sampled: Sequence[Group | None]) -> None:
        """Write the samples, also those of an evaluation without a score: they say why."""
        if self.record is None:
            return
        path = result_path(self.folder, dataset, version).with_suffix(".parquet")
        await self.evaluator.record(path, dataset, version, sampled, self.record)

    def _is_done(self, dataset: str, version: PolicyVersion) -> bool:
        row, measured = _row_in(result_path(self.folder, dataset, version)), self.evaluator.conditions(dataset)
        if not (self._weights(version) | measured).items() <= row.items():
            return False
        self.best.add(version, _by_name(dataset, row))
        return True

    def _weights(self, version: PolicyVersion) -> dict[str, str]:
        return {"hash": self.weights.published[version]}


def recall_scores(folder: Path, checkpoint: DriverState, steps: Iterable[int], best: BestCheckpoints) -> None:
    """Add the results that a run knew at its newest checkpoint to `best`, and for other `steps` those in `folder`, its
    `EVALUATIONS`: its last evaluation ends after its last checkpoint. A result of other weights is passed over."""
    best.restore(checkpoint.scores)
    dataset = best.metric.split("/")[1]
    for step in set(steps) - best.scores.keys():
        row = _row_in(result_path(folder, dataset, step))
        if row and row.get("hash") == checkpoint.published.get(step, row.get("hash")):
            best.add(step, _by_name(dataset, row))


def result_path(folder: Path, dataset: str, version: PolicyVersion) -> Path:
    """Return the file of a result in the folder `EVALUATIONS`; its samples are beside it, as `.parquet`."""
    return folder / dataset / f"step_{version:06d}.json"


def _row_in(path: Path) -> dict[str, Any]:
    """Return a written result; empty if it is not there, or damaged."""
    try:
        row = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _by_name(dataset: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a result by the names of `EvalSection.metrics`."""
    return {f"eval/{dataset}/{name}": value for name, value in row.items()}
