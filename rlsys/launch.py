"""The composition root: from a configuration to running objects. The only importer of `workers`.

    result = rlsys.train(Config.load("run.yaml"))

works from the command line, from a Python script (also one that called `ray.init` already) and inside a Ray job.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rlsys.checkpoint import STEP, Checkpoints, find_latest, is_complete
from rlsys.config import Config
from rlsys.config.plan import plan_of
from rlsys.contracts import Published, Workers
from rlsys.data.rows import load_tasks
from rlsys.data.source import TaskSource
from rlsys.doctor import ensure_not_shadowed
from rlsys.driver import BatchShape, Driver
from rlsys.errors import CheckpointError, ConfigError, Interrupted, ModelError
from rlsys.evaluation import EvalResult
from rlsys.evaluation import evaluate as measure
from rlsys.events import Event, Events, PhaseDone, RunEnded, RunStarted, StepDone, WeightsPublished
from rlsys.failures import FailurePolicy
from rlsys.interrupts import Interruptible
from rlsys.ledger import Ledger
from rlsys.queue import StreamingQueue
from rlsys.rewards.calling import RewardFunction
from rlsys.tracking.console import ConsoleSink
from rlsys.tracking.jsonl import JsonlSink
from rlsys.types import PolicyVersion, Sampling, Task
from rlsys.weights import WeightSync
from rlsys.workflow import load_workflow

RESOLVED = "config.resolved.yaml"
SMOOTHED_STEPS = 10
"""Steps that `reward_first` and `reward_last` average over."""


@dataclass
class TrainResult:
    """What a run came to. Collected from its events."""

    run_dir: str
    steps: int = 0
    """Optimizer steps behind the final weights."""
    reward_first: float | None = None
    """Mean reward of the first 10 steps of this session; None if it took none."""
    reward_last: float | None = None
    """Mean reward of the last 10."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: start-up phases by name, then the sum of each `time/*` metric over the steps."""

    def as_json(self) -> dict[str, object]:
        """One JSON object, as the command line prints it."""
        return {
            "run_dir": self.run_dir,
            "steps": self.steps,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "seconds": {phase: round(s, 3) for phase, s in self.seconds.items()},
        }


class _Summary:
    """A sink that fills a `TrainResult`."""

    def __init__(self, result: TrainResult) -> None:
        self._result = result
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

    def close(self) -> None: ...


class _FirstStep:
    """A sink that tells how long it took from the command to the end of the first step."""

    def __init__(self, events: Events, began: float) -> None:
        self._events, self._began, self._is_over = events, began, False

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone) and not self._is_over:
            self._is_over = True
            self._events.emit(PhaseDone("first_step", time.monotonic() - self._began))

    def close(self) -> None: ...


def train(config: Config, *, progress: bool = True) -> TrainResult:
    """Run one training job to its end and return what it came to.

    `progress` shows it on stderr. Ctrl-C once finishes the step, saves, and raises `Interrupted`; twice exits at once.
    Raises the `RlsysError` that ended the run, after writing it to the run directory.
    """
    began = time.monotonic()
    _prepare_imports()
    config = _rooted(config)
    checkpoint = _checkpoint_to_resume(config)
    _write_run_dir(config)
    result = TrainResult(str(config.run_dir))
    sinks = [JsonlSink(config.run_dir), _Summary(result), *([ConsoleSink(config.run.steps)] if progress else [])]
    events = Events(sinks)
    events.attach(_FirstStep(events, began))
    try:
        asyncio.run(_train(config, checkpoint, events, began))
        events.emit(RunEnded(result.steps, "finished"))
    except Interrupted:
        events.emit(RunEnded(result.steps, "interrupted"))
        raise
    except KeyboardInterrupt:
        events.emit(RunEnded(result.steps, "interrupted"))
        raise Interrupted("interrupted before the first step", signal.SIGINT) from None
    except BaseException as error:
        events.emit(RunEnded(result.steps, "failed", f"{type(error).__name__}: {error}"))
        raise
    finally:
        events.close()
    return result


async def _train(config: Config, checkpoint: Path | None, events: Events, began: float) -> None:
    """Start everything, train, stop everything; `began` is when the command was given (monotonic clock)."""
    from workers import cluster as ray_cluster

    with _phase(events, "load_data"):
        _check_model(config)
        source = _tasks(config)
    with _phase(events, "start_ray"):
        cluster = ray_cluster.connect(config.ray.address, _local_cpus(config))
    this = asyncio.current_task()
    assert this is not None
    with Interruptible(this.cancel) as interruptible:
        try:
            plan = plan_of(config)
            ray_cluster.check_capacity(plan.num_cpus, plan.num_gpus)
            _link_logs(config.run_dir, ray_cluster.log_folder())
            reached = await _train_on_cluster(config, source, checkpoint, events, began, interruptible)
        except asyncio.CancelledError:
            if interruptible.signal is None:
                raise
            raise Interrupted("interrupted before the first step", interruptible.signal) from None
        finally:
            cluster.close()
    if interruptible.signal is not None and reached < config.run.steps:
        saved = f"after step {reached}, which is saved; go on with run.resume=auto"
        raise Interrupted(f"interrupted {saved if reached else 'before the first step'}", interruptible.signal)


async def _train_on_cluster(
    config: Config,
    source: TaskSource,
    checkpoint: Path | None,
    events: Events,
    began: float,
    interruptible: Interruptible,
) -> PolicyVersion:
    """Start the workers, train, end them; returns the version reached."""
    from workers.launching import Crew

    crew = Crew.of(config)
    try:
        with _phase(events, "start_workers"):
            await crew.ready()
        driver = _driver(config, source, crew.workers(), events)
        start = 0
        if checkpoint is not None:
            with _phase(events, "load_checkpoint"):
                start = await driver.restore(checkpoint)
        events.emit(RunStarted(str(config.run_dir), start, config.run.steps))
        events.emit(PhaseDone("start_up", time.monotonic() - began))
        interruptible.stop = driver.stop
        return await driver.run(start)
    finally:
        await crew.close()


def _driver(config: Config, source: TaskSource, workers: Workers, events: Events) -> Driver:
    def published(receipt: Published) -> None:
        events.emit(WeightsPublished(receipt.version, receipt.hash, receipt.num_bytes, receipt.stall_s))

    per_step = config.train.groups_per_step
    asynchrony, limits = config.asynchrony, config.limits
    return Driver(
        workers=workers,
        algorithm=config.algorithm,
        queue=StreamingQueue(per_step, asynchrony.max_staleness, asynchrony.window, 0, config.run.steps * per_step),
        ledger=Ledger(source, config.algorithm.group_size, config.run.seed),
        weights=WeightSync(workers.actor, limits.transfer_s, on_publish=published),
        failures=FailurePolicy(limits.max_attempts, limits.max_failed_groups),
        checkpoints=Checkpoints(config.run_dir / "checkpoints", config.checkpoint.every, config.checkpoint.keep_last),
        events=events,
        shape=BatchShape(config.train.ranks, config.train.micro_batch_tokens),
        steps=config.run.steps,
        no_progress_s=limits.no_progress_s,
        rollouts_folder=config.run_dir / "rollouts",
        rollouts_every=config.record.rollouts_every,
    )


# ----------------------------------------------------------------------------------------------- evaluate and export


def evaluate(
    target: str,
    *,
    config_overrides: Sequence[str] = (),
    data: str | None = None,
    samples: int = 1,
    temperature: float = 0.0,
    limit: int | None = None,
) -> EvalResult:
    """Measure the latest checkpoint of a run directory, or a model (folder or hub name), on `data`.

    A run brings its own configuration and `data.eval_path`; a model takes defaults, `data` and overrides such as
    `reward.fn=...`. `temperature` 0 is greedy. Raises `ConfigError` if there is no data to evaluate on.
    """
    _prepare_imports()
    run = Path(target)
    is_run = (run / RESOLVED).is_file()
    if is_run:
        config = Config.load(run / RESOLVED, config_overrides)
        model_path = str(export(run, run / "export"))
    else:
        needed = ["run.steps=1", f"model.path={target}", f"data.path={data}"]
        config, model_path = Config.load([], [*needed, *config_overrides]), target
    path = data or config.data.eval_path
    if path is None:
        raise ConfigError("data.eval_path: none is set; give tasks with --data FILE")
    config = _rooted(config)
    tasks = load_tasks(path)[:limit]
    RewardFunction.load(config.reward.fn).check(columns_of(tasks))
    sampling = Sampling(temperature=temperature, max_new_tokens=config.rollout.max_new_tokens)
    return asyncio.run(_evaluate(config, model_path, tasks, sampling, samples))


async def _evaluate(
    config: Config, model_path: str, tasks: Sequence[Task], sampling: Sampling, samples: int
) -> EvalResult:
    from workers import cluster as ray_cluster
    from workers.launching import start_rewards, start_rollouts

    cluster = ray_cluster.connect(config.ray.address, _local_cpus(config))
    rollouts = start_rollouts(config, model_path, sampling, relays={})
    rewards = start_rewards(config)
    try:
        await asyncio.gather(rollouts.ready(), rewards.ready())
        max_open = max(1, 2 * config.rollout.replicas * config.rollout.slots // samples)
        return await measure(rollouts, rewards, tasks, samples=samples, seed=config.run.seed, max_open=max_open)
    finally:
        await asyncio.gather(rollouts.close(), rewards.close())
        cluster.close()


def export(run: Path, to: Path, step: str = "latest") -> Path:
    """Write a checkpoint of a run as a model folder (safetensors, config, tokenizer); returns the folder.

    Raises `CheckpointError` if the run has no such complete checkpoint.
    """
    if not (run / RESOLVED).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {RESOLVED}")
    checkpoints = run / "checkpoints"
    if not (step == "latest" or step.isdigit()):
        raise ConfigError(f"step {step!r} is neither a number nor `latest`")
    checkpoint = find_latest(checkpoints) if step == "latest" else checkpoints / STEP.format(int(step))
    if checkpoint is None or not is_complete(checkpoint):
        raise CheckpointError(f"{run} has no complete checkpoint of step {step}")
    from workers.launching import export_checkpoint

    export_checkpoint(Config.load(run / RESOLVED), checkpoint / "actor", to)
    return to


# ----------------------------------------------------------------------------------------------- before anything runs


def _prepare_imports() -> None:
    """Let `module:name` in a configuration mean the user's own folder, as `python -m` would, in workers too."""
    ensure_not_shadowed()
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _check_model(config: Config) -> None:
    """Raise `ModelError` for a folder that is not there, before anything starts; a hub name is left to the workers.

    A cluster at an address of its own may see other folders than this machine.
    """
    path = config.model.path
    is_hub_name = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    if config.ray.address is None and not is_hub_name and not Path(path).is_dir():
        raise ModelError(f"model.path: there is no folder {path}; give one, or `org/name` on the hub")


def _tasks(config: Config) -> TaskSource:
    """The run's tasks; reward function and workflow are looked up now, before anything expensive starts."""
    tasks = load_tasks(config.data.path)
    RewardFunction.load(config.reward.fn).check(columns_of(tasks))
    load_workflow(config.rollout.workflow)
    return TaskSource(tasks, config.run.seed, shuffle=config.data.shuffle)


def columns_of(tasks: Sequence[Task]) -> set[str]:
    """Columns that every one of the first tasks has besides prompt and answer."""
    return set.intersection(*(set(task.info) for task in tasks[:100]))


def _checkpoint_to_resume(config: Config) -> Path | None:
    """Where to start from, by `run.resume`; None is the beginning. A run that never took a step may begin again."""
    own = find_latest(config.run_dir / "checkpoints")
    if config.run.resume == "never":
        if own is not None or _has_content(config.run_dir / "metrics.jsonl"):
            raise ConfigError(
                f"run.name: {config.run_dir} holds a run already; choose another run.name, "
                "go on with run.resume=auto, or remove the folder"
            )
        return None
    if config.run.resume in ("auto", "must"):
        if own is None and config.run.resume == "must":
            raise CheckpointError(f"run.resume is must, and {config.run_dir} has no complete checkpoint")
        return own
    other = find_latest(Path(config.run.resume) / "checkpoints")
    if other is None:
        raise CheckpointError(f"run.resume: {config.run.resume} has no complete checkpoint")
    return own or other


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _write_run_dir(config: Config) -> None:
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / RESOLVED).write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {config.run_dir}: {error.strerror or error}") from error


def _rooted(config: Config) -> Config:
    """The configuration with absolute paths: workers do not run in this process's folder."""
    model, fn = Path(config.model.path), config.reward.fn
    file, colon, name = fn.rpartition(":")
    update: dict[str, object] = {"run": config.run.model_copy(update={"folder": config.run.folder.absolute()})}
    if model.is_dir():
        update["model"] = config.model.model_copy(update={"path": str(model.absolute())})
    if file.endswith(".py"):
        update["reward"] = config.reward.model_copy(update={"fn": f"{Path(file).absolute()}{colon}{name}"})
    return config.model_copy(update=update)


def _local_cpus(config: Config) -> int:
    """CPUs of a cluster of our own: the machine's, or as many as the run asks for. Ray counts them, nothing more."""
    return config.ray.num_cpus or max(os.cpu_count() or 1, math.ceil(plan_of(config).num_cpus))


def _link_logs(run_dir: Path, session: Path) -> None:
    """Point `logs/ray` at what the workers print, where it is on this machine."""
    link = run_dir / "logs" / "ray"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(session)


@contextmanager
def _phase(events: Events, name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    events.emit(PhaseDone(name, time.monotonic() - began))
