"""Several runs of one configuration in one cluster and one process, which search for values of its keys together.

The runs are those that `rlsys train` would make, in `run.folder/run.name/member0`, `member1`, ... A folder with runs
goes on from their newest checkpoints.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from signal import SIGINT
from statistics import fmean

import orjson

from rlsys.config import Config
from rlsys.config.loader import load
from rlsys.config.population_file import PopulationFile, with_values
from rlsys.config.resource_plan import plan_of
from rlsys.errors import ConfigError, Interrupted, RlsysError
from rlsys.launch import preflight, run_folder
from rlsys.launch.device_defaults import as_in, with_device_defaults
from rlsys.launch.run_lock import locked
from rlsys.launch.train_run import Stops, TrainingJob, TrainResult, check_trackers
from rlsys.loop.population import Meeting, Population, Range, Switch
from rlsys.types import POLICY, PolicyVersion
from rlsys.util.deadlines import Progress
from rlsys.util.event_loops import run_to_end
from rlsys.util.native_output import native_output_in
from rlsys.util.signals import Interruptible

KEPT = 3
"""Newest checkpoints of each run: the others may still read the one of the last meeting."""


@dataclass(frozen=True)
class PopulationResult:
    """Result of a finished population."""

    folder: str
    members: Sequence[TrainResult]
    scores: Sequence[float | None]
    """Mean of the score over the last `every` steps of each run."""
    values: Sequence[Mapping[str, float]]
    """Values of the searched keys at the end."""
    lineage: Sequence[Sequence[int]]
    """For each run, those that its weights descend from, oldest first; the last is the run itself."""
    best: int | None
    """Run with the best score among those that took all steps; None if there is none."""

    def as_json(self) -> dict[str, object]:
        """Result as JSON, as the command line prints it."""
        members = [
            {"run_dir": m.run_dir, "steps": m.steps, "score": s, "values": dict(v), "lineage": list(line)}
            for m, s, v, line in zip(self.members, self.scores, self.values, self.lineage, strict=True)
        ]
        return {"folder": self.folder, "best": self.best, "members": members}

    def lines(self) -> list[str]:
        """Result as lines of a table, the best run first marked by a star."""
        rows = []
        for number, member in enumerate(self.members):
            score = self.scores[number]
            values = "  ".join(f"{key}={value:.4g}" for key, value in self.values[number].items())
            line = " < ".join(str(parent) for parent in reversed(self.lineage[number]))
            mark = "*" if number == self.best else " "
            shown = "none" if score is None else f"{score:.4f}"
            rows.append(f"{mark} member{number}  steps {member.steps}  score {shown}  {values}  lineage {line}")
        return [f"folder           {self.folder}", *rows]


def run_population(path: Path, overrides: Sequence[str] = ()) -> PopulationResult:
    """Run the population of a file to its end; `overrides` are of the configuration of every run.

    Ctrl-C finishes the current step of each run, saves, and raises `Interrupted`. The first error of a run ends the
    others in the same way, and is raised.
    """
    began = time.monotonic()
    settings = load(PopulationFile, [path], [])
    preflight.prepare_imports()
    base = preflight.with_steps(preflight.rooted(Config.load(settings.config, overrides)))
    if base.policies:
        raise ConfigError("policies: a population has runs of one policy")
    population = _population_of(settings, base.run_dir)
    try:
        base.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {base.run_dir}: {error.strerror}") from error
    population.recall()
    configs = [_member(base, population, settings, number) for number in range(settings.members)]
    first = with_device_defaults(configs[0])  # or what its run has recorded
    configs = [as_in(first, config) for config in configs]
    for config in configs:
        run_folder.check_run_dir(config)
        check_trackers(config)
    with ExitStack() as stack:
        stack.enter_context(locked(base.run_dir))
        stack.enter_context(native_output_in(base.run_dir / "logs" / "driver.log"))
        members: list[Member] = []
        for number, config in enumerate(configs):
            run_folder.make_run_dir(config)
            stack.enter_context(locked(config.run_dir))
            start = _start_of(config, population.last(number))
            job = TrainingJob.of(config, {POLICY: config}, {POLICY: start}, began, progress=True, label=_name(number))
            members.append(Member(number, job, population, settings, config))
        run_to_end(lambda: _run(base, members))
    return _result(base, population, members)


def _population_of(settings: PopulationFile, folder: Path) -> Population:
    return Population(
        num_members=settings.members,
        search=settings.search,
        ranges={key: Range(section.low, section.high) for key, section in settings.keys.items()},
        every=settings.every,
        share=settings.share,
        is_highest_best=settings.score_is == "highest",
        seed=settings.seed,
        folder=folder,
    )


def _member(base: Config, population: Population, settings: PopulationFile, number: int) -> Config:
    """Configuration of a run with its current values."""
    name = _name(number)
    run = base.run.model_copy(
        update={
            "folder": base.run_dir,
            "name": name,
            "seed": base.run.seed + number,
            "resume": "auto",
        }
    )
    kept = base.checkpoint.model_copy(update={"keep_last": max(KEPT, base.checkpoint.keep_last)})
    dashboard = base.dashboard.model_copy(update={"enabled": False})
    config = base.model_copy(update={"run": run, "checkpoint": kept, "dashboard": dashboard})
    return with_values(config, population.values(number), name)


def _name(number: int) -> str:
    return f"member{number}"


def _start_of(config: Config, last: Meeting | None) -> run_folder.Start:
    """Return the newer start of a run: its own last checkpoint, or the one its last meeting gave it."""
    start = run_folder.start_of(config)
    is_own = start.checkpoint is not None and last is not None and start.checkpoint.name > Path(last.checkpoint).name
    if last is None or not last.checkpoint or is_own:
        return start
    return run_folder.Start(Path(last.checkpoint), start.passed_over)


@dataclass
class Member:
    """Implements `rlsys.loop.population.Meetings`: one run of the population."""

    number: int
    job: TrainingJob
    population: Population
    settings: PopulationFile
    config: Config
    """With the current values."""

    def is_due(self, step: int) -> bool:
        return self.population.is_due(self.number, step)

    async def meet(self, step: int, version: PolicyVersion, checkpoint: Path) -> Switch | None:
        meeting = await self.population.meet(self.number, step, self.score(version), checkpoint)
        if meeting.end:
            return Switch(end=meeting.end)
        if meeting.parent is None:
            return None
        self.config = with_values(self.config, meeting.values, _name(self.number))
        run_folder.write_run_dir(self.config, self.config.run_dir / "checkpoints" / checkpoint.name)
        return Switch(
            parent=_name(meeting.parent),
            checkpoint=Path(meeting.checkpoint),
            config=self.config,
            values=meeting.values,
        )

    def score(self, version: PolicyVersion | None = None) -> float | None:
        """Mean of the score over the `every` steps up to `version`, the last by default; None without a finite one."""
        path, name = self.config.run_dir / "metrics.jsonl", self.settings.score
        try:
            rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        except FileNotFoundError:
            return None
        rows = [row for row in rows if name in row]
        last = version if version is not None else max((row["step"] for row in rows), default=0)
        found = [row[name] for row in rows if last - self.settings.every < row["step"] <= last]
        finite = [value for value in found if value is not None and isfinite(value)]
        return fmean(finite) if finite else None

    async def run(self, data: preflight.Data, stops: Stops, progress: Progress) -> None:
        """Run to the end of its steps, or of its part in the search."""
        from workers.ray import vitals

        try:
            with self.job.end_emitted(), vitals.of_run(self.config.run_dir):
                await self.job.train(data, stops, progress=progress, meetings=self)
        finally:
            self.population.leave(self.number)


async def _run(base: Config, members: Sequence[Member]) -> None:
    """Look everything up, join or start a cluster, run all members there. Raises the first error of one."""
    from workers.ray import cluster as ray_cluster

    this = asyncio.current_task()
    assert this is not None
    with Interruptible(this.cancel) as interruptible:
        begun = ray_cluster.begin(base.ray.address)
        try:
            data = preflight.look_up(base)
            plan = plan_of(base)
            num_cpus, num_gpus = plan.num_cpus * len(members), plan.num_gpus * len(members)
            cluster = ray_cluster.connect(base.ray.address, preflight.local_cpus(base, num_cpus), begun)
            try:
                ray_cluster.check_capacity(num_cpus, num_gpus)
                await _train(members, data, interruptible)
            finally:
                cluster.close()
        except asyncio.CancelledError:
            if interruptible.signal is None:
                raise
            raise Interrupted("interrupted before the first step", interruptible.signal) from None
        finally:
            if begun is not None:
                begun.close()


async def _train(members: Sequence[Member], data: preflight.Data, interruptible: Interruptible) -> None:
    """Run all members. The first error, or the first signal, stops all of them in order."""
    own = [MemberStops(interruptible) for _ in members]
    progress = Progress()

    def stop() -> None:
        for stops in own:
            stops.stop()

    interruptible.stop = stop
    runs = [asyncio.create_task(member.run(data, stops, progress)) for member, stops in zip(members, own, strict=True)]
    for stops, run in zip(own, runs, strict=True):
        stops.stop = run.cancel  # until it has a driver, which finishes its step
    failed: BaseException | None = None
    try:
        for run in asyncio.as_completed(runs):
            try:
                await run
            except (RlsysError, asyncio.CancelledError) as error:
                failed = failed or error
                for stops in own:
                    stops.is_stopped = True
                stop()
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    if isinstance(failed, Interrupted):
        raise Interrupted(
            "interrupted after the current step of each run; the same command goes on", own[0].signal or SIGINT
        )
    if failed is not None:
        raise failed


class MemberStops:
    """Implements `rlsys.launch.train_run.Stops` for one member."""

    def __init__(self, of_process: Interruptible) -> None:
        self.of_process = of_process
        self.is_stopped = False
        """True if another member's end stops this one."""
        self.stop: Callable[[], object] = lambda: None

    @property
    def signal(self) -> int | None:
        return self.of_process.signal or (SIGINT if self.is_stopped else None)


def _result(base: Config, population: Population, members: Sequence[Member]) -> PopulationResult:
    numbers = range(len(members))
    results = [member.job.result for member in members]
    scores = [member.score() for member in members]
    sign = 1 if population.is_highest_best else -1
    done = [
        (sign * score, -number)
        for number, score in zip(numbers, scores, strict=True)
        if score is not None and not results[number].early_stop
    ]
    best = -max(done)[1] if done else None
    values = [population.values(number) for number in numbers]
    return PopulationResult(
        str(base.run_dir), results, scores, values, [population.lineage(number) for number in numbers], best
    )
