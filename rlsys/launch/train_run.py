"""One training job, of one policy or several, from the command to its end.

With several policies, each trained one has a driver, a run directory `RUN/policies/NAME` as a run of it alone would
have, and a line on the screen. What they share, the workers, is reported in `RUN/events.jsonl`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from rlsys.config import Config
from rlsys.config.resource_plan import plan_of
from rlsys.errors import NOT_SAVED, ClusterLost, ConfigError, Interrupted, WorkerDied, full_text
from rlsys.launch import preflight, run_folder
from rlsys.launch.dashboard_process import dashboard_beside
from rlsys.launch.device_defaults import with_device_defaults
from rlsys.launch.doctor import ensure_not_shadowed
from rlsys.launch.earlier_runs import changes_since, with_models_of_runs
from rlsys.launch.run_lock import lock_run
from rlsys.launch.scaling import follow
from rlsys.launch.session_files import SessionFiles
from rlsys.loop.build_driver import CONSTANTS, WITHOUT_REPACKING, build_driver
from rlsys.loop.checkpoint_files import step_of
from rlsys.loop.driver import Driver
from rlsys.loop.multi_policy import Joint, JointRewards, JointRollouts, train_jointly
from rlsys.loop.shared_place import check_shared
from rlsys.monitoring.alerts import AlertSink
from rlsys.monitoring.events import (
    CautionRaised,
    CheckpointPassedOver,
    EngineChosen,
    Event,
    Events,
    FileSkipped,
    PhaseDone,
    RunEnded,
    RunStarted,
    Sink,
    StepDone,
    TransportChosen,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerRestarted,
)
from rlsys.monitoring.machine_metrics import MachineMetrics
from rlsys.monitoring.tracker import RunFacts
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.monitoring.trackers.tracker_thread import InThread
from rlsys.types import POLICY, PolicyVersion
from rlsys.util.any_paths import AnyPath
from rlsys.util.deadlines import Progress
from rlsys.util.event_loops import run_to_end
from rlsys.util.native_output import native_output_in
from rlsys.util.signals import Interruptible

if TYPE_CHECKING:
    from workers.worker_set import WorkerSet

LOOK_S = 2.0
"""Seconds between two looks at what replicas hold and do."""
SMOOTHED_STEPS = 10
"""Number of steps averaged in `reward_first` and `reward_last`."""


@dataclass
class TrainResult:
    """Result of a run, collected from its events."""

    run_dir: str
    steps: int = 0
    """Optimizer steps behind the final weights."""
    reward_first: float | None = None
    """Mean reward of the first 10 steps of this session; None if it took none."""
    reward_last: float | None = None
    """Mean reward of the last 10 steps."""
    early_stop: str = ""
    """Reason for which it took fewer than `run.steps`; empty if it took all."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: start-up phases by name, then the sum of each `time/*` metric over the steps."""
    policies: dict[str, TrainResult] = field(default_factory=dict)
    """Results by name, for several policies. `steps` is then their minimum, and only the policies have rewards."""

    def as_json(self) -> dict[str, object]:
        """Result as JSON, as the command line prints it."""
        result: dict[str, object] = {
            "run_dir": self.run_dir,
            "steps": self.steps,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "seconds": {phase: round(s, 3) for phase, s in self.seconds.items()},
        }
        if self.early_stop:
            result["early_stop"] = self.early_stop
        if self.policies:
            result["policies"] = {name: policy.as_json() for name, policy in self.policies.items()}
        return result


class Summary:
    """Sink that fills a `TrainResult`, and emits the time from the command to the end of the first step."""

    def __init__(self, result: TrainResult, events: Events, began: float) -> None:
        self._result, self._events, self._began = result, events, began
        self._rewards: list[float] = []

    def handle(self, event: Event, time_s: float) -> None:
        seconds = self._result.seconds
        if isinstance(event, PhaseDone):
            seconds[event.phase] = event.seconds
        elif isinstance(event, RunStarted):
            self._result.steps = event.first_step
        elif isinstance(event, StepDone):
            self._result.steps = event.step
            self._rewards.append(event.metrics["reward/mean"])
            self._result.reward_first = fmean(self._rewards[:SMOOTHED_STEPS])
            self._result.reward_last = fmean(self._rewards[-SMOOTHED_STEPS:])
            for name, value in event.metrics.items():
                if name.startswith("time/"):
                    seconds[name.removeprefix("time/")] = seconds.get(name.removeprefix("time/"), 0.0) + value
            if len(self._rewards) == 1:
                self._events.emit(PhaseDone("first_step", time.monotonic() - self._began))

    def close(self) -> None: ...


class Stopping:
    """Request of another thread to stop a run in order."""

    def __init__(self) -> None:
        self._lock, self._is_requested = threading.Lock(), False
        self._interruptible: Interruptible | None = None

    def request(self) -> None:
        """Stop the run as the first Ctrl-C does, now or as soon as it can be. Thread-safe."""
        with self._lock:
            self._is_requested = True
            if self._interruptible is not None:
                self._interruptible.interrupt()

    def pass_to(self, interruptible: Interruptible | None) -> None:
        """Pass requests to a running job; None: it has ended."""
        with self._lock:
            self._interruptible = interruptible
            if self._is_requested and interruptible is not None:
                interruptible.interrupt()


def train_job(
    config: Config, *, progress: bool = True, sinks: Sequence[Sink] = (), stopping: Stopping | None = None
) -> TrainResult:
    """Run one training job; see `rlsys.train`. `sinks` get the events of the run, `stopping` may end it earlier."""
    began = time.monotonic()
    ensure_not_shadowed()
    check_can_begin(config)
    config = preflight.with_absolute_paths(with_models_of_runs(config))
    config = with_device_defaults(preflight.with_steps(config))
    owns = config.trained_policies if config.policies else {POLICY: config}
    if not config.run_dir.is_dir():
        for own in owns.values():
            run_folder.start_of(own)  # a run that is refused leaves no folder
        run_folder.make_run_dir(config)
    with lock_run(config.run_dir):
        starts = {name: run_folder.start_of(own) for name, own in owns.items()}
        changes = {name: changes_since(own, at) for name, own in owns.items() if (at := starts[name].checkpoint)}
        with native_output_in(config.run_dir / "logs" / "driver.log"), dashboard_beside(config):
            job = TrainingJob.of(config, owns, starts, began, progress=progress)
            for name, notes in changes.items():
                for note in notes:
                    job.runs[name].events.emit(CautionRaised(note))
            for sink in sinks:
                job.events.attach(sink)
            with job.end_emitted():
                run_to_end(lambda: job.train_in_cluster(stopping or Stopping()))
    return job.result


def check_can_begin(config: Config) -> None:
    """Raise `ConfigError` if the run's folder is of another kind of run, or will be deleted, or a tracker needs a
    missing package."""
    preflight.check_is_kept(config.run.folder)
    run_folder.check_run_dir(config)
    check_trackers(config)


def check_trackers(config: Config) -> None:
    """Raise `ConfigError` if a tracker needs a missing package, so that a long run does not discover it later."""
    for index, plugin in enumerate(config.tracking):
        if plugin.package and find_spec(plugin.package) is None:
            remedy = f"install it: pip install 'rlsys[{plugin.package}]'"
            raise ConfigError(f"tracking[{index}]: the package {plugin.package} is not installed; {remedy}")


def facts_of(config: Config) -> RunFacts:
    """Description for trackers of this run, or of this policy of a run of several."""
    whole = run_folder.whole_of(config.run_dir)
    name, policy = (whole.name, config.run.name) if whole else (config.run.name, "")
    return RunFacts(config.run_dir, name, policy, config.model_dump(mode="json"))


@dataclass(frozen=True)
class PolicyRun:
    """Run of one trained policy."""

    config: Config
    checkpoint: AnyPath | None
    """Checkpoint to resume from; None: start anew."""
    events: Events
    result: TrainResult

    @classmethod
    def of(cls, files: SessionFiles, began: float, *, progress: bool, policy: str = "") -> PolicyRun:
        """Open all that follows its events. `policy`: its name, if there are several."""
        config, start = files.config, files.start
        result, events = TrainResult(str(config.run_dir)), Events([files])
        if progress:
            run_dir = "" if policy else config.run_dir
            events.attach(ConsoleSink(config.run.steps, policy=policy, run_dir=run_dir))
        events.attach(Summary(result, events, began))
        for plugin in config.tracking:
            events.attach(InThread(plugin, facts_of(config)))
        events.attach(AlertSink(events, config.alerts))
        for problem in start.passed_over:
            events.emit(CheckpointPassedOver(problem))
        if config.staleness_caution:
            events.emit(CautionRaised(config.staleness_caution))
        return cls(config, start.checkpoint, events, result)


@dataclass(frozen=True)
class TrainingJob:
    """Runs of the trained policies, by name, and what they share; with one policy, that is what belongs to its run."""

    config: Config
    runs: Mapping[str, PolicyRun]
    events: Events
    result: TrainResult
    began: float
    """Time of the command, on the monotonic clock."""
    files: Sequence[SessionFiles]
    """Files of every run, and of the whole if there are several policies."""
    drivers: dict[str, Driver] = field(default_factory=dict, init=False)
    """Drivers by policy; none before the workers have started."""

    @classmethod
    def of(
        cls,
        config: Config,
        owns: Mapping[str, Config],
        starts: Mapping[str, run_folder.Start],
        began: float,
        *,
        progress: bool,
    ) -> TrainingJob:
        """Open the run of every trained policy; `owns` and `starts` are by its name."""
        is_new = not any(run_folder.holds_run(own.run_dir) for own in owns.values())
        whole = [SessionFiles(config, run_folder.Start(None), is_new=is_new)] if config.policies else []
        parts = {name: SessionFiles(own, starts[name], is_new=is_new) for name, own in owns.items()}
        files = [*whole, *parts.values()]
        runs = {
            name: PolicyRun.of(part, began, progress=progress, policy=name if config.policies else "")
            for name, part in parts.items()
        }
        if not config.policies:
            return cls(config, runs, runs[POLICY].events, runs[POLICY].result, began, files)
        result = TrainResult(str(config.run_dir), policies={name: run.result for name, run in runs.items()})
        shared = Events([*whole, *([ConsoleSink(0, run_dir=config.run_dir)] if progress else [])])
        shared.attach(Summary(result, shared, began))
        return cls(config, runs, shared, result, began, files)

    @contextmanager
    def end_emitted(self) -> Iterator[None]:
        """Emit on every bus how the block ended, and close the bus."""
        try:
            yield
            self._emit_end("finished")
        except Interrupted:
            self._emit_end("interrupted")
            raise
        except KeyboardInterrupt:
            self._emit_end("interrupted")
            raise Interrupted("interrupted before the first step", signal.SIGINT) from None
        except BaseException as error:
            self._emit_failure(error)
            raise
        finally:
            for events, _ in self._ends():
                events.close()

    def _ends(self) -> list[tuple[Events, TrainResult]]:
        """Every bus, with the result that it fills."""
        ends = [(run.events, run.result) for run in self.runs.values()]
        return [*ends, (self.events, self.result)] if self.config.policies else ends

    def _emit_end(self, reason: Literal["finished", "interrupted", "failed"], detail: str = "") -> None:
        for events, result in self._ends():
            events.emit(RunEnded(result.steps, reason, detail or (result.early_stop if reason == "finished" else "")))

    def _caution(self, sentence: str) -> None:
        self.events.emit(CautionRaised(sentence))

    def _resize_of(self, workers: WorkerSet) -> Callable[[int], None]:
        """Return what changes the number of replicas. Raises `ConfigError` for those on the devices of ranks."""

        def refuse(size: int) -> None:
            raise ConfigError(
                "replicas have the devices of the ranks (placement.together), and cannot be more or fewer"
            )

        return refuse if self.config.tenants else workers.rollouts.resize

    def _emit_failure(self, error: BaseException) -> None:
        self._emit_end("failed", f"{type(error).__name__}: {full_text(error)}")

    async def train_in_cluster(self, stopping: Stopping) -> None:
        """Look everything up, join or start a cluster, train there."""
        from workers.ray import cluster as ray_cluster
        from workers.ray import vitals
        from workers.ray.node_forks import forked_workers
        from workers.ray.placement import check_fits, live_nodes

        this = asyncio.current_task()
        assert this is not None
        with Interruptible(this.cancel) as interruptible:
            stopping.pass_to(interruptible)
            begun = ray_cluster.begin(self.config.ray_address)
            try:
                with phase(self.events, "load_data"):
                    data = preflight.look_up(self.config)
                for note in data.notes:
                    self.events.emit(CautionRaised(note))
                plan = plan_of(self.config)
                with phase(self.events, "start_ray"):
                    num_cpus = preflight.local_cpus(self.config, plan.num_cpus)
                    cluster = ray_cluster.connect(self.config.ray_address, num_cpus, begun)
                try:
                    async with cluster.watch.during(self._emit_loss, self._end_stuck):
                        check_fits(plan.roles, live_nodes())
                        if caution := ray_cluster.caution_about_idle_gpus(plan.num_gpus, ray_cluster.totals()):
                            self.events.emit(CautionRaised(caution))
                        link_logs(self.config.run_dir, ray_cluster.log_folder(), self.events)
                        async with forked_workers():
                            with vitals.of_run(self.config.run_dir):
                                await self.train(data, interruptible)
                    self.result.steps = min(run.result.steps for run in self.runs.values())
                except ClusterLost as lost:
                    self.note_saved(lost)
                    raise
                finally:
                    cluster.close()
            except (asyncio.CancelledError, SystemExit):
                if interruptible.signal is None:
                    raise
                raise Interrupted("interrupted before the first step", interruptible.signal) from None
            finally:
                if begun is not None:
                    begun.close()
                stopping.pass_to(None)

    def _emit_loss(self, lost: ClusterLost) -> None:
        self.events.emit(WorkerFailed("the cluster", "running the workers", str(lost)))

    def _end_stuck(self, lost: ClusterLost) -> None:
        """Emit the end for a main thread that a call into the lost cluster blocks."""
        self.note_saved(lost)
        self._emit_failure(lost)
        for events, _ in self._ends():
            events.close()

    def note_saved(self, lost: ClusterLost) -> None:
        """Note in the error what can be resumed, as far as this process knows: the network to the checkpoints may be
        lost too, and no call into it may block here."""
        for name, run in self.runs.items():
            policy = f"{name}: " * bool(self.config.policies)
            saved = self.drivers[name].saver.checkpoints.last_saved if name in self.drivers else None
            if saved is None and run.checkpoint is not None and run.checkpoint.parent == run.config.checkpoints_at:
                saved = step_of(run.checkpoint)
            kept = "no step is saved; begin anew" if saved is None else f"step {saved} is saved; go on"
            lost.add_note(f"{policy}{kept} with run.resume=auto")

    async def train(self, data: preflight.Data, stops: Interruptible) -> None:
        """Start the workers, train, end them. Raises `Interrupted` if the user stopped any of it."""
        workers, machines = await self._start_workers(), MachineMetrics(self.config.run_dir)
        try:
            machines.start()
            joint = Joint(workers.rollouts, workers.rewards) if self.config.policies else None
            self.drivers.update(self._drivers(workers, joint, data, machines))
            drivers = self.drivers
            for driver in drivers.values():
                await check_shared(driver.workers, driver.saver.checkpoints.folder)
            starts = dict.fromkeys(self.runs, 0)
            for name, run in self.runs.items():
                if run.checkpoint is not None:
                    with phase(run.events, "load_checkpoint"):
                        starts[name] = await drivers[name].restore(run.checkpoint)
            restored = {run.config.run_dir: starts[name] for name, run in self.runs.items()}
            for files in self.files:
                files.begin(restored.get(files.config.run_dir, 0))  # from here on nothing refuses the start
            for name, run in self.runs.items():
                bound = run.config.asynchrony.max_staleness
                end = drivers[name].end
                run.events.emit(RunStarted(str(run.config.run_dir), starts[name], end, bound))
                if 0 < end <= starts[name]:
                    text = f"step {starts[name]} is done, and the run ends at step {end}: nothing is left to train"
                    run.events.emit(CautionRaised(f"{text}; raise run.steps to go on"))
            self.events.emit(PhaseDone("start_up", time.monotonic() - self.began))
            stops.stop = lambda: [driver.stop() for driver in drivers.values()]
            gc.freeze()  # all of start-up's objects stay, and a collection need not look at them again
            async with follow(self.config.run_dir, self._resize_of(workers), self._caution):
                if joint is None:
                    reached = {name: await driver.run(starts[name]) for name, driver in drivers.items()}
                else:
                    reached = await train_jointly(joint, drivers, starts)
        finally:
            gc.unfreeze()
            machines.close()
            await workers.close()
        lanes = [driver.evaluation for driver in drivers.values() if driver.evaluation is not None]
        for name, driver in drivers.items():
            self.runs[name].result.early_stop = driver.early_stop if reached[name] < driver.end else ""
        is_cut = any(reached[n] < driver.end and not driver.early_stop for n, driver in drivers.items())
        is_cut = is_cut or any(lane.was_given_up for lane in lanes) or any(d.saver.lost for d in drivers.values())
        if stops.signal is not None and is_cut:
            raise Interrupted(self._interruption(drivers, reached), stops.signal)
        for lost in filter(None, (driver.saver.lost for driver in drivers.values())):
            lost.add_note(self._interruption(drivers, reached))
            raise lost

    async def _start_workers(self) -> WorkerSet:
        """Start all workers. If one of them dies meanwhile, perhaps with its node, all are started once more."""
        from workers.worker_set import WorkerSet

        for is_last in (False, True):
            workers = WorkerSet.of(self.config)
            try:
                await self._set_up(workers)
            except BaseException as error:
                await workers.close()
                if is_last or not isinstance(error, WorkerDied):
                    raise
                self.events.emit(WorkerFailed(error.worker, error.phase, str(error)))
            else:
                break
        return workers

    async def _set_up(self, workers: WorkerSet) -> None:
        """Return once all workers are set up; emit what happens to them in the background, from now on."""
        events = self.events
        workers.watch(
            lambda error: events.emit(WorkerFailed(error.worker, error.phase, str(error))),
            lambda worker, seconds: events.emit(WorkerRestarted(worker, seconds)),
            lambda worker, seconds: events.emit(WorkerJoined(worker, seconds)),
            lambda worker, seconds: events.emit(WorkerLeft(worker, seconds)),
        )
        with phase(events, "start_workers"):
            await workers.ready()
        for worker, choice in await workers.engines():
            events.emit(EngineChosen(worker, choice.engine, choice.reason))
        for policy, line in workers.lines.items():
            transport = line.relays.transport
            events.emit(TransportChosen(policy, transport.name, transport.reason))

    def _drivers(
        self, workers: WorkerSet, joint: Joint | None, data: preflight.Data, machines: MachineMetrics
    ) -> dict[str, Driver]:
        drivers: dict[str, Driver] = {}
        progress = Progress()
        for name, run in self.runs.items():
            line = workers.lines[name]
            if joint:
                own = line.workers(JointRollouts(joint, name), JointRewards(joint, name), workers.composer)
            else:
                own = workers.workers()
            tasks = copy(data.train)  # the tasks are shared, the place in them is not
            drivers[name] = build_driver(
                run.config,
                own,
                tasks,
                run.events,
                eval_sets=data.eval,
                progress=progress,
                look_s=LOOK_S,
                machines=machines.newest,
                constants=WITHOUT_REPACKING if joint else CONSTANTS,
            )
        return drivers

    def _interruption(self, drivers: Mapping[str, Driver], reached: Mapping[str, PolicyVersion]) -> str:
        saved = {name: driver.saver.checkpoints.last_saved for name, driver in drivers.items()}
        places = [_place(step, saved[name], f"{name} " * bool(self.config.policies)) for name, step in reached.items()]
        remedy = "; go on with run.resume=auto" if any(saved.values()) else ""
        return f"interrupted {', '.join(places)}{remedy}"


def _place(step: PolicyVersion, saved: PolicyVersion | None, policy: str) -> str:
    """Where a policy was interrupted, e.g. `after step 7, which is saved`."""
    if not step:
        return f"{policy}before the first step"
    if saved == step:
        return f"{policy}after step {step}, which is saved"
    return f"{policy}after step {step}, {NOT_SAVED}; {'no step' if saved is None else f'step {saved}'} is"


@contextmanager
def phase(events: Events, name: str) -> Iterator[None]:
    """Emit the duration of the block."""
    began = time.monotonic()
    yield
    events.emit(PhaseDone(name, time.monotonic() - began))


def link_logs(run_dir: Path, session: Path, events: Events) -> None:
    """Link `logs/ray` to the output of the workers, where it is on this machine; without a link the run goes on."""
    link = run_dir / "logs" / "ray"
    try:
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(session)
    except OSError as error:
        events.emit(FileSkipped(str(link), str(error)))
