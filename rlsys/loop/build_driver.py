"""Construction of a driver from a configuration and workers, for a job, the simulator and tests.

driver = build_driver(config, workers, TaskSource(tasks, config.run.seed), events)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlsys.algorithm import version_after
from rlsys.config import Config
from rlsys.contracts import Rewards, Rollouts, Workers
from rlsys.data.task_source import Tasks
from rlsys.loop.admission import Admission, StalenessBound
from rlsys.loop.checkpoint import Checkpoints
from rlsys.loop.checkpoint_scores import BestCheckpoints
from rlsys.loop.curation import LOOK_AGAIN, MIN_EPISODES, Curation
from rlsys.loop.device_leases import ACTOR, DeviceLeases
from rlsys.loop.driver import Driver
from rlsys.loop.endpoints import Endpoints
from rlsys.loop.evaluation import EVALUATIONS, EvaluationLane, Evaluator
from rlsys.loop.failure_policy import DroppedGroups, FailurePolicy, Retries
from rlsys.loop.group_queue import GroupQueue, State
from rlsys.loop.learner import BatchShape, Learner
from rlsys.loop.production import Production
from rlsys.loop.recovery import Recovery
from rlsys.loop.repack import Repacker
from rlsys.loop.replica_events import ReplicaWatcher
from rlsys.loop.rollout_writer import RolloutWriter
from rlsys.loop.run_position import RunPosition
from rlsys.loop.saver import Saver
from rlsys.loop.step_metrics import StepClock
from rlsys.loop.stop_request import StopRequest
from rlsys.loop.task_ledger import Ledger
from rlsys.monitoring.events import Events
from rlsys.types import Task
from rlsys.util.deadlines import Progress
from rlsys.weight_sync.links import TRANSFER_S
from rlsys.weight_sync.sync import WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Values of a driver that no key sets, which the simulator and tests vary."""

    transfer_s: float = TRANSFER_S
    """Least deadline of one weight transfer, seconds."""
    repack_s: float = 5.0
    """Seconds between two checks for replicas that are nearly done with old weights; 0: never."""
    is_adaptive: bool = True
    """Have no more groups in flight than keep the trainer busy."""
    min_episodes: int = MIN_EPISODES
    """As in `Curation`."""
    look_again: int = LOOK_AGAIN
    """As in `Curation`."""


CONSTANTS = Constants()
WITHOUT_REPACKING = Constants(repack_s=0)
"""Values for a run of several policies, whose groups do not move."""


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
    constants: Constants = CONSTANTS,
) -> Driver:
    """Build the driver of a run.

    `eval_sets` are evaluated during training, on `workers.evaluation`. The drivers of a run with several policies share
    one `progress`. `look_s` is the time between two observations of replicas and queue, for events; 0 disables them.
    `machines` returns metrics for each step's row.
    """
    algorithm, limits = config.algorithm, config.limits
    queue = _queue_of(config, workers, tasks, events, progress or Progress(), constants)
    weights = WeightSync(
        workers.actor, workers.relays, constants.transfer_s, max_age=config.staleness_bound, events=events
    )
    clock, stop, position = StepClock(events), StopRequest(), RunPosition()
    dropped_groups = DroppedGroups(queue, FailurePolicy(limits))
    retries = Retries(events, dropped_groups.decide, Endpoints(events, limits.max_attempts))
    failed = config.run_dir / "failed"
    devices = DeviceLeases(workers.tenants, ACTOR if workers.tenants else "", clock.span)
    learner = Learner(workers, algorithm, shape_of(config), clock.span, failed, config.to_yaml, retries, devices)
    checkpoints = _checkpoints_of(config)
    saver = Saver(workers, queue, weights, checkpoints, events, learner, dropped_groups, clock, stop, position)
    evaluation = _evaluation_of(config, workers, weights, eval_sets or {}, events, checkpoints.best, devices)
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
            *_repackers_of(config, workers.rollouts, events, constants.repack_s),
            *([ReplicaWatcher(workers.rollouts, queue, events, look_s)] if look_s else ()),
        ],
        machines=machines,
    )


def _checkpoints_of(config: Config) -> Checkpoints:
    saves = config.checkpoint
    return Checkpoints(config.checkpoints_at, saves.every, saves.keep_last, saves.every_s, best_of(config))


def _records_of(config: Config, workers: Workers, events: Events) -> RolloutWriter:
    record, folder = config.record, config.run_dir / "rollouts"
    return RolloutWriter(workers.actor, events, folder, record.rollouts_every)


def evaluator_of(
    config: Config, rollouts: Rollouts, rewards: Rewards, sets: Mapping[str, Sequence[Task]], events: Events
) -> Evaluator:
    """Build the evaluator of `sets` from the section `eval`."""
    section = config.eval
    max_open = max(1, 2 * section.replicas * config.slots // section.samples)
    failures, success = FailurePolicy(config.limits), config.reward.success
    return Evaluator(rollouts, rewards, failures, events, sets, section, config.run.seed, max_open, success)


def best_of(config: Config) -> BestCheckpoints:
    """Return the rule by which a run keeps its best checkpoints and ends early, without any value yet."""
    saves, every = config.checkpoint, config.eval.every
    is_highest, patience = not saves.is_lowest_best, saves.early_stopping_patience
    return BestCheckpoints(saves.keep_best, saves.best_metric, is_highest, every, patience)


def shape_of(config: Config) -> BatchShape:
    """Return the layout of a step over ranks, updates and micro-batches."""
    train, budget = config.train, config.rollout.max_new_tokens
    return BatchShape(train.mesh.num_batches, config.micro_batch_tokens, train.updates_per_step, budget)


def _queue_of(
    config: Config, workers: Workers, tasks: Tasks, events: Events, progress: Progress, constants: Constants
) -> GroupQueue:
    algorithm, stabilizer, steps = config.algorithm, config.stabilizer, config.run.steps
    curation = Curation(
        config.curation,
        events,
        success=config.reward.success,
        min_episodes=constants.min_episodes,
        look_again=constants.look_again,
    )
    is_adaptive = constants.is_adaptive and config.asynchrony.max_staleness > 0
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
        ledger=Ledger(tasks, algorithm.group_size, config.run.seed, curation),
        columns=frozenset(algorithm.columns & workers.annotators.keys()),
        annotated_from=State.SCORED if config.curation.stored_successes else State.ROLLED_OUT,
        admission=Admission(config.train.groups_per_step, config.permits) if is_adaptive else None,
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
    devices: DeviceLeases,
) -> EvaluationLane | None:
    if workers.evaluation is None or not config.eval.every:
        return None
    evaluator = evaluator_of(config, workers.evaluation, workers.rewards, sets, events)
    folder = config.run_dir / EVALUATIONS
    record = workers.actor.record_evaluated if config.record.rollouts_every else None
    return EvaluationLane(evaluator, workers.evaluation, weights, config.run.steps, folder, best, record, devices)


def _repackers_of(config: Config, rollouts: Rollouts, events: Events, repack_s: float) -> list[Repacker]:
    """Return none if running groups do not delay new weights, or there is a single replica."""
    rollout = config.rollout
    if rollout.weight_change != "between" or rollout.replicas < 2 or not repack_s:
        return []
    return [Repacker(rollouts, repack_s, config.slots, events)]
