"""One optimizer step, from scored groups to trained weights.

    finalize advantages -> plan -> fetch -> step columns -> train the policy -> train the critic

No model is stepped until actor and critic have fetched, in parallel, and every column exists. `PayloadLost` is raised
only before that point, so the step can be built again from other groups. The critic trains after the policy: if the
policy's numbers are not finite, the whole step can be saved unchanged.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from rlsys.algorithm import Algorithm, Assigned, Column
from rlsys.batch.packing import BatchPlan, num_trained, plan_batch
from rlsys.contracts import TrainStats, Workers
from rlsys.errors import ConfigError, OutOfMemory, PayloadLost, RlsysError, TrainingError, ZeroAdvantage
from rlsys.loop.checkpoint import FailedStep, SavedModels, check_seen, copy_and_write
from rlsys.loop.checkpoint_files import GROUPS, STEP
from rlsys.loop.device_leases import REFERENCE, DeviceLeases
from rlsys.loop.failure_policy import Retries
from rlsys.types import Group, PolicyVersion, Ref
from rlsys.util.files import CONFIG, write_atomically

T = TypeVar("T")
_Model: TypeAlias = Literal["actor", "critic"]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Layout of a step's groups over the actor's ranks."""

    num_ranks: int
    """Ranks with batches of their own."""
    max_tokens: int
    """Maximum tokens of one micro-batch."""
    num_updates: int = 1
    """Optimizer updates of one step."""
    budget: int | None = None
    """Divisor, in tokens, of a sample's loss sum for an algorithm that averages over a budget and sets none."""

    def plan(
        self,
        groups: Sequence[Group],
        assigned: Assigned,
        algorithm: Algorithm,
        version: PolicyVersion,
        pair_cost: float = 0.0,
    ) -> BatchPlan:
        """Plan the micro-batches of a step from `version`, given the advantages `assigned` to its groups: see
        `plan_batch`."""
        return plan_batch(
            groups,
            assigned,
            algorithm.aggregation.with_budget(self.budget),
            num_ranks=self.num_ranks,
            max_tokens=self.max_tokens,
            num_updates=self.num_updates,
            has_pairs=any(column.is_paired for column in algorithm.columns),
            pair_cost=pair_cost,
            version=version,
            skips_zeros=algorithm.skips_zero_advantages,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Groups and advantages of a trained step, with the metrics of actor, critic and `finalize_advantages`."""

    groups: Sequence[Group]
    assigned: Assigned
    stats: TrainStats

    @property
    def num_tokens(self) -> int:
        """Trained tokens: those of trajectories with an advantage after `finalize_advantages`."""
        return sum(num_trained(group, tuple(of)) for group, of in zip(self.groups, self.assigned, strict=True))

    @property
    def num_episodes(self) -> int:
        """Episodes with such a trajectory."""
        return sum(len({assigned.episode for assigned in of_group}) for of_group in self.assigned)


@dataclass
class Learner:
    """Runs optimizer steps on the actor, and on the critic if there is one.

    Raises `ConfigError` on creation if the algorithm needs a column that no worker computes.
    """

    workers: Workers
    algorithm: Algorithm
    shape: BatchShape
    span: Callable[[str, Collection[str]], AbstractContextManager[None]]
    """Times the waiting for actor and critic; see `StepClock.span`."""
    failed_folder: Path
    """Folder for steps with non-finite numbers."""
    config: Callable[[], str]
    """Returns the run's configuration as YAML; it is saved with such a step."""
    retries: Retries
    devices: DeviceLeases = field(default_factory=DeviceLeases)
    past: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the previous step, from actor, critic and `Algorithm.finalize_advantages`; saved in checkpoints."""
    is_half_way: bool = False
    """True while models train, and after a step that failed there: the weights then belong to no version."""

    def __post_init__(self) -> None:
        made = {*self.workers.annotators, *self.workers.step_annotators, *(s for s in Column if s.is_made_in_training)}
        if self.workers.critic is None:
            made.discard(Column.VALUES)
        if missing := sorted(self.algorithm.columns - made):
            raise ConfigError(
                f"{type(self.algorithm).__name__} asks for {', '.join(missing)}, and this run has no worker that makes "
                "it: start a reference for reference_*, a critic for values"
            )

    async def step(self, groups: Sequence[Group], version: PolicyVersion) -> StepResult:
        """Train the step that starts from `version`.

        Raises `ZeroAdvantage` if no advantage is left to train, and `PayloadLost`; both before any model is stepped.
        Raises `TrainingError` if numbers are not finite, with the step saved for `rlsys replay`, or its `OutOfMemory`,
        with nothing saved. Raises `ConfigError` if the algorithm reports a metric under a name already in use.
        """
        settled = self.algorithm.finalize_advantages(groups, self.past)
        if not any(num_trained(*pair) for pair in zip(groups, settled.groups, strict=True)):
            raise ZeroAdvantage(
                f"of a step of {len(groups)} groups nothing is left to train once advantages are settled"
            )
        plan = self.shape.plan(groups, settled.groups, self.algorithm, version, self.workers.actor.pair_cost)
        models = self.workers.models
        with self.span("fetch", models):
            await _all(model.fetch(groups, plan) for model in models.values())
        kinds = sorted(self.algorithm.columns & self.workers.step_annotators.keys())
        with self.span("columns", {self._maker_of(kind) for kind in kinds}):
            made = await _all(self._annotate_step(groups, plan, kind) for kind in kinds)
        columns = dict(zip(kinds, made, strict=True))
        stats: list[TrainStats] = []
        self.is_half_way = True
        for name, model in models.items():
            try:
                async with self.devices.lease(name):
                    with self.span("train", [name]):
                        stats.append(await model.train_step(plan, columns))
            except OutOfMemory:
                raise
            except TrainingError as error:
                kept = await self._keep(groups, settled.groups, version, name, error)
                raise TrainingError(f"{error}\n{kept}", error.update) from error
        self.past = metrics = merge_metrics(*(of_model.metrics for of_model in stats), settled.metrics)
        self.is_half_way = False
        return StepResult(groups, settled.groups, TrainStats(metrics, sum(of_model.train_s for of_model in stats)))

    async def _annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        """Return the column of a step. A reference that fails is replaced, and attempts it again."""
        maker, reference = self.workers.step_annotators[column], self.workers.reference

        async def annotate() -> list[Ref]:
            async with self.devices.lease(self._maker_of(column)):
                return await maker.annotate_step(groups, plan, column)

        if reference is None or maker is not reference:
            return await annotate()
        return await self.retries.persist(reference, annotate)

    def _maker_of(self, column: Column) -> str:
        """Return the name of the worker that computes a column of a step."""
        maker = self.workers.step_annotators[column]
        return next((name for name, model in self.workers.models.items() if model is maker), REFERENCE)

    async def _keep(
        self, groups: Sequence[Group], assigned: Assigned, version: PolicyVersion, failed: _Model, error: TrainingError
    ) -> str:
        """Save the step to `failed_folder` (see `FailedStep`); return the message for the user."""
        folder = self.failed_folder / STEP.format(version + 1)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            files = await copy_and_write(SavedModels(self.workers, folder, self.devices))
            check_seen(folder, {**files, GROUPS: await self.workers.actor.save_groups(folder / GROUPS, groups)})
            write_atomically(folder / CONFIG, self.config(), is_private=True)
            FailedStep(
                version=version,
                columns=tuple(sorted(self.algorithm.columns)),
                assigned=tuple(map(tuple, assigned)),
                num_updates=self.shape.num_updates,
                error=str(error),
                model=failed,
                update=error.update,
            ).write(folder)
        except (RlsysError, OSError) as problem:
            return f"the step could not be kept for `rlsys replay`: {problem}"
        return f"the step is kept; to compute it again, sample by sample: rlsys replay {folder}"


def merge_metrics(*parts: Mapping[str, float]) -> dict[str, float]:
    """All metrics of a step. Raises `ConfigError` if two parts report one by the same name: none may hide another."""
    names = Counter(name for part in parts for name in part)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ConfigError(
            f"the metrics {', '.join(twice)} are reported twice in one step; what an algorithm or stabilizer reports "
            "needs names of its own"
        )
    return {name: value for part in parts for name, value in part.items()}


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all calls, once all have ended: no call of a step runs into the next step.

    Raises one `PayloadLost` for all lost groups, or the first other error.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    lost: set[int] = set()
    for result in results:
        if isinstance(result, PayloadLost):
            lost.update(result.group_ids)
        elif isinstance(result, BaseException):
            raise result
    if lost:
        raise PayloadLost(tuple(sorted(lost)))
    return [result for result in results if not isinstance(result, BaseException)]
