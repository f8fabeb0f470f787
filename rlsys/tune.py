"""A run as a trainable of Ray Tune, so that its searchers and schedulers can search for values of any keys.

    from ray import tune
    from rlsys import Config
    from rlsys.tune import trainable

    tuner = tune.Tuner(
        trainable(Config.load("run.yaml")),
        param_space={"train.lr": tune.loguniform(1e-5, 1e-2)},
        tune_config=tune.TuneConfig(metric="reward/mean", mode="max", num_samples=8),
    )
    best = tuner.fit().get_best_result()

Each trial is a run in the folder of its trial, on the cluster of the search. It reports the metrics of every step, with
those of the newest evaluation, and `step`, the time by which schedulers such as ASHA compare. A checkpoint that is due
by `checkpoint.every` is reported with its step; population based training copies such checkpoints, so its
`perturbation_interval` is a multiple of that key.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ray import tune

from rlsys.config import Config
from rlsys.config.loader import of_tree
from rlsys.config.resource_plan import plan_of
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.earlier_runs import with_models_of_runs
from rlsys.launch.preflight import with_absolute_paths
from rlsys.launch.train_run import Stopping, train_job
from rlsys.loop.checkpoint_files import STEP, saved_step
from rlsys.monitoring.events import CheckpointSaved, EvalDone, Event, StepDone

KEPT = 3
"""Newest checkpoints of a run at least: Tune copies one of a step while the run goes on."""


def trainable(config: Config) -> Callable[[dict[str, Any]], None]:
    """Build a trainable whose parameters are dotted keys of `config`, e.g. `{"train.lr": 1e-5}`.

    A trial reserves what the workers of its run need. One that gets a checkpoint goes on from it, in a run of its own:
    after an interruption of the search, after a failure, or from another trial's weights. Raises `ConfigError` for a
    configuration of several policies; a trial fails with one for a key or a value that its configuration refuses.
    """
    if config.policies:
        raise ConfigError("policies: a trial has a run of one policy")
    config = with_absolute_paths(with_models_of_runs(config))
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a user's plug-ins are found from this folder

    def trial(values: dict[str, Any]) -> None:
        own, start = of_trial(config, values, Path(tune.get_context().get_trial_dir())), tune.get_checkpoint()
        with start.as_directory() if start else nullcontext() as checkpoint:
            if checkpoint is not None:
                own = from_checkpoint(own, Path(checkpoint))
            _train(own)

    return tune.with_resources(trial, _resources(config))


def of_trial(config: Config, values: Mapping[str, object], folder: Path) -> Config:
    """Return the configuration of the next run in the folder of a trial. Raises `ConfigError`."""
    tree = config.model_dump(mode="json")
    own = {"run.folder": str(folder), "run.name": f"run{sum(1 for _ in folder.glob('run*'))}", "run.resume": "never"}
    own |= {"checkpoint.keep_last": max(KEPT, config.checkpoint.keep_last), "dashboard": None}
    own["checkpoint.to"] = None  # Tune keeps the checkpoints of trials itself
    for key, value in {**values, **own}.items():
        section: dict[str, Any] = tree
        *sections, last = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return of_tree(Config, tree, f"the trial in {folder}")


def from_checkpoint(config: Config, checkpoint: Path) -> Config:
    """Return the configuration of a run that goes on from a checkpoint, wherever that is. Raises `CheckpointError` if
    it is no checkpoint of a run."""
    if (step := saved_step(checkpoint)) is None:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a run of rlsys")
    source = config.run.folder / f"source_of_{config.run.name}"
    folder = source / "checkpoints" / STEP.format(step)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(checkpoint.absolute(), target_is_directory=True)
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": str(source)})})


def _train(config: Config) -> None:
    """Train, and report every step to Tune.

    Waits for reports; unblocked by a step or the end of the run. Tune ends a trial by an exception in `report`, and the
    run ends after its step.
    """
    reports, stopping = _Reports(config.checkpoint.every), Stopping()
    with ThreadPoolExecutor(1, "rlsys") as thread:
        training = thread.submit(train_job, config, progress=False, sinks=[reports], stopping=stopping)
        training.add_done_callback(lambda _: reports.end())
        try:
            for metrics, checkpoint in reports:
                tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(checkpoint) if checkpoint else None)
        finally:
            stopping.request()
    training.result()


class _Reports:
    """Sink that makes the reports of a run. One of a step whose checkpoint is due waits until that is on disk."""

    def __init__(self, every: int) -> None:
        """`every` is that of the checkpoints."""
        self._every = every
        self._evaluated: dict[str, float] = {}
        self._held: deque[tuple[int, dict[str, float]]] = deque()
        self._saved: dict[int, str] = {}
        self._made: SimpleQueue[tuple[dict[str, float], str | None] | None] = SimpleQueue()

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, EvalDone):
            self._evaluated |= event.metrics
        elif isinstance(event, StepDone):
            self._held.append((event.step, {"step": event.step, **event.metrics, **self._evaluated}))
        elif isinstance(event, CheckpointSaved):
            self._saved[event.step] = event.path
        while self._held and not self._is_awaited(self._held[0][0]):
            self._release()

    def close(self) -> None:
        while self._held:
            self._release()

    def end(self) -> None:
        """End the reports: the run has ended."""
        self._made.put(None)

    def __iter__(self) -> Iterator[tuple[dict[str, float], str | None]]:
        """Yield metrics and the folder of a checkpoint, step by step."""
        return iter(self._made.get, None)

    def _is_awaited(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and step not in self._saved

    def _release(self) -> None:
        step, metrics = self._held.popleft()
        self._made.put((metrics, self._saved.pop(step, None)))


def _resources(config: Config) -> tune.PlacementGroupFactory:
    """A bundle for the driver, which computes little, and one for each worker."""
    needs = [{"CPU": role.num_cpus, "GPU": role.num_gpus} for role in plan_of(config).roles for _ in range(role.count)]
    bundles = [{name: num for name, num in need.items() if num} for need in needs]
    return tune.PlacementGroupFactory([{}, *filter(None, bundles)])
