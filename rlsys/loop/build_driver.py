"""Construction of a driver from a configuration and workers, for a job, the simulator and tests.

driver = build_driver(config, workers, TaskSource(tasks, config.run.seed), events)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsys.algorithm import version_after
from rlsys.config import Config
from rlsys.contracts import Rewards, Rollouts, Workers
from rlsys.data.task_source import Tasks
from rlsys.loop.admission import Admission, StalenessBound
from rlsys.loop.checkpoint import Checkpoints
from rlsys.loop.checkpoint_scores import BestCheckpoints
from rlsys.loop.curation import Curation
from rlsys.loop.driver import Driver
from rlsys.loop.evaluation import EVALUATIONS, EvaluationLane, Evaluator
from rlsys.loop.failure_policy import DroppedGroups, FailurePolicy, Retries
from rlsys.loop.group_queue import GroupQueue, State
from rlsys.loop.learner import BatchShape, Learner
from rlsys.loop.production import Production
from rlsys.loop.recovery import Recovery
from rlsys.loop.remote_checkpoints import CheckpointCopies, RemoteCheckpoints
from rlsys.loop.repack import Repacker
from rlsys.loop.replica_watcher import ReplicaWatcher
from rlsys.loop.rollout_records import RolloutRecords
from rlsys.loop.run_position import RunPosition
from rlsys.loop.saver import Saver
from rlsys.loop.step_metrics import StepClock
from rlsys.loop.stop_request import StopRequest
from rlsys.loop.task_ledger import Ledger
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
) -> Driver:
    """Build the driver of a run.

    `eval_sets` are evaluated during training, on `workers.evaluation`. The drivers of a run with several policies share
    one `progress`. `look_s` is the time between two observations of replicas and queue, for events; 0 disables them.
    `machines` returns metrics for each step's row.
    """
    algorithm, limits = config.algorithm, config.limits
    queue = _queue_of(config, workers, tasks, events, progress or Progress())
    weights = WeightSync(
        workers.actor, workers.relays, limits.transfer_s, max_age=config.staleness_bound, events=events
    )
    clock, stop, position = StepClock(events), StopRequest(), RunPosition()
    dropped_groups = DroppedGroups(queue, FailurePolicy(limits))
    retries = Retries(events, dropped_groups.decide)
    failed = config.run_dir / "failed"
    learner = Learner(workers, algorithm, shape_of(config), clock.span, failed, config.to_yaml, retries)
    checkpoints, remote = _checkpoints_of(config), RemoteCheckpoints(config.copies) if config.copies else None
    copies = CheckpointCopies(checkpoints, remote, events) if remote else None
    saver = Saver(workers, queue, weights, checkpoints, events, learner, dropped_groups, clock, stop, position, copies)
    evaluation = _evaluation_of(config, workers, weights, eval_sets or {}, events, checkpoints.best)
    recovery = Recovery(workers, algorithm, queue, weights, learner, saver, events, position, config.run.steps)
    return Driver(
        workers=workers,
        queue=queue,
        weights=weights,
        learner=learner,
        saver=saver,
        recovery=recovery,
        production=Production(workers, queue, weights, learner, recovery, retries, dropped_groups, events, clock),
        dropped_groups=dropped_groups,
        records=_records_of(config, workers, events),
        events=events,
        clock=clock,
        stop_request=stop,
        position=position,
        no_progress_s=limits.no_progress_s,
        evaluation=evaluation,
        companions=[
            *_repackers_of(config, workers.rollouts, events),
            *([ReplicaWatcher(workers.rollouts, queue, events, look_s)] if look_s else ()),
        ],
        machines=machines,
    )


def _checkpoints_of(config: Config) -> Checkpoints:
    saves = config.checkpoint
    folder = config.run_dir / "checkpoints"
    return Checkpoints(folder, saves.every, saves.keep_last, saves.keep_every, saves.every_s, best_of(config))


def _records_of(config: Config, workers: Workers, events: Events) -> RolloutRecords:
    record, folder = config.record, config.run_dir / "rollouts"
    return RolloutRecords(workers.actor, events, folder, record.rollouts_every, record.share, config.run.seed)


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
    bound = StalenessBound(
        config.train.groups_per_step,
        config.asynchrony.max_staleness,
        config.asynchrony.window,
        version_after(algorithm, num_synchronous, start=0, end=steps),
    )
    return GroupQueue(
        bound,
        version=0,
        num_groups=steps * config.train.groups_per_step,
        ledger=Ledger(tasks, algorithm.group_size, config.run.seed, Curation(config.curation, events)),
        signals=frozenset(algorithm.signals & workers.annotators.keys()),
        annotated_from=State.SCORED if config.curation.stored_successes else State.ROLLED_OUT,
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


def _repackers_of(config: Config, rollouts: Rollouts, events: Events) -> list[Repacker]:
    """Return none if running groups do not delay new weights, or there is a single replica."""
    rollout = config.rollout
    if rollout.weight_change != "between" or rollout.replicas < 2 or rollout.repack_s == 0:
        return []
    return [Repacker(rollouts, rollout.repack_s, config.slots, events)]
