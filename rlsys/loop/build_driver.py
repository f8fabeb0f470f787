"""Construction of a driver from a configuration and workers, for a job, the simulator and tests.

driver = build_driver(config, workers, TaskSource(tasks, config.run.seed), events)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsys.algorithm import version_after
from rlsys.config import Config
from rlsys.contracts import Rewards, Rollouts, Workers
from rlsys.data.task_source import Tasks
from rlsys.loop.admission import Admission
from rlsys.loop.checkpoint import Checkpoints
from rlsys.loop.checkpoint_scores import BestCheckpoints
from rlsys.loop.driver import Driver
from rlsys.loop.evaluation import EVALUATIONS, EvaluationLane, Evaluator
from rlsys.loop.failure_policy import FailurePolicy
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.learner import BatchShape
from rlsys.loop.population import Meetings
from rlsys.loop.remote_checkpoints import CheckpointCopies, RemoteCheckpoints
from rlsys.loop.repack import Repacker
from rlsys.loop.rollout_records import RolloutRecords
from rlsys.loop.task_ledger import Curriculum, Ledger
from rlsys.monitoring.events import Events
from rlsys.types import Task
from rlsys.util.deadlines import Progress
from rlsys.weight_sync.sync import WeightSync


def build_driver(
    config: Config,
    workers: Workers,
    tasks: Tasks,
    events: Events,
    *,
    eval_sets: Mapping[str, Sequence[Task]] | None = None,
    progress: Progress | None = None,
    look_s: float = 0,
    machines: Callable[[], Mapping[str, float]] = dict,
    meetings: Meetings | None = None,
) -> Driver:
    """Build the driver of a run.

    `eval_sets` are evaluated during training, on `workers.evaluation`. The drivers of a run with several policies share
    one `progress`, as do those of a population, whose runs have `meetings`. `look_s` is the time between two
    observations of replicas and queue, for events; 0 disables them. `machines` returns metrics for each step's row.
    """
    transfer_s, bound, saves = config.limits.transfer_s, config.staleness_bound, config.checkpoint
    best = best_of(config)
    weights = WeightSync(workers.actor, workers.relays, transfer_s, max_age=bound, events=events)
    checkpoints = Checkpoints(
        config.run_dir / "checkpoints", saves.every, saves.keep_last, saves.keep_every, saves.every_s, best
    )
    remote = RemoteCheckpoints(config.copies) if config.copies else None
    return Driver(
        workers=workers,
        algorithm=config.algorithm,
        queue=_queue_of(config, workers, tasks, events, progress or Progress()),
        weights=weights,
        failures=FailurePolicy(config.limits),
        checkpoints=checkpoints,
        events=events,
        shape=shape_of(config),
        steps=config.run.steps,
        no_progress_s=config.limits.no_progress_s,
        run_dir=config.run_dir,
        config=config.to_yaml,
        records=RolloutRecords(
            workers.actor,
            events,
            config.run_dir / "rollouts",
            config.record.rollouts_every,
            config.record.share,
            config.run.seed,
        ),
        evaluation=_evaluation_of(config, workers, weights, eval_sets or {}, events, best),
        copies=CheckpointCopies(checkpoints, remote, events) if remote else None,
        repacker=_repacker_of(config, workers.rollouts, events),
        look_s=look_s,
        machines=machines,
        meetings=meetings,
    )


def evaluator_of(
    config: Config, rollouts: Rollouts, rewards: Rewards, sets: Mapping[str, Sequence[Task]], events: Events
) -> Evaluator:
    """Build the evaluator of `sets` from the section `eval`."""
    section = config.eval
    max_open = max(1, 2 * section.replicas * config.slots // section.samples)
    return Evaluator(rollouts, rewards, FailurePolicy(config.limits), events, sets, section, config.run.seed, max_open)


def best_of(config: Config) -> BestCheckpoints:
    """Return the rule by which a run keeps its best checkpoints and ends early, without any value yet."""
    saves, is_highest = config.checkpoint, config.checkpoint.best_is == "highest"
    return BestCheckpoints(
        saves.keep_best, saves.best_by or "", is_highest, config.eval.every, saves.early_stopping_patience
    )


def shape_of(config: Config) -> BatchShape:
    """Return the layout of a step over ranks, updates and micro-batches."""
    train, budget = config.train, config.rollout.max_new_tokens
    return BatchShape(train.mesh.num_batches, config.micro_batch_tokens, train.updates_per_step, budget)


def _queue_of(config: Config, workers: Workers, tasks: Tasks, events: Events, progress: Progress) -> GroupQueue:
    algorithm, stabilizer, steps = config.algorithm, config.stabilizer, config.run.steps
    num_synchronous = stabilizer.synchronous_steps if stabilizer else 0
    return GroupQueue(
        groups_per_step=config.train.groups_per_step,
        max_staleness=config.asynchrony.max_staleness,
        window=config.asynchrony.window,
        version=0,
        num_groups=steps * config.train.groups_per_step,
        ledger=Ledger(tasks, algorithm.group_size, config.run.seed, Curriculum(config.curation)),
        signals=frozenset(algorithm.signals & workers.annotators.keys()),
        synchronous_until=version_after(algorithm, num_synchronous, start=0, end=steps),
        admission=Admission(config.train.groups_per_step, config.permits) if config.asynchrony.is_adaptive else None,
        events=events,
        progress=progress,
    )


def _evaluation_of(
    config: Config,
    workers: Workers,
    weights: WeightSync,
    sets: Mapping[str, Sequence[Task]],
    events: Events,
    best: BestCheckpoints,
) -> EvaluationLane | None:
    if workers.evaluation is None or not config.eval.every:
        return None
    evaluator = evaluator_of(config, workers.evaluation, workers.rewards, sets, events)
    folder = config.run_dir / EVALUATIONS
    record = workers.actor.record_evaluated if config.record.rollouts_every else None
    return EvaluationLane(evaluator, workers.evaluation, weights, config.run.steps, folder, best, record)


def _repacker_of(config: Config, rollouts: Rollouts, events: Events) -> Repacker | None:
    """Return None if running groups do not delay new weights, or there is a single replica."""
    rollout = config.rollout
    if rollout.weight_change != "between" or rollout.replicas < 2 or rollout.repack_s == 0:
        return None
    return Repacker(rollouts, rollout.repack_s, config.slots, events)
