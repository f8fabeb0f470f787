"""Run of the real driver on fake workers and a virtual clock, to test plug-ins and the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rlsys.agents.workflow import SingleTurn, play_or_fail
from rlsys.config import Config
from rlsys.contracts import Workers
from rlsys.data.task_source import Tasks, TaskSource
from rlsys.loop.build_driver import WITHOUT_REPACKING, Constants, build_driver
from rlsys.loop.checkpoint_files import find_latest
from rlsys.loop.driver import Driver
from rlsys.monitoring.events import Event, Events, StepDone
from rlsys.rewards.reward_function import RewardInput, RewardSum, check_answered, judged_agents, known_score
from rlsys.stabilizer import Stabilizer, alone
from rlsys.testing.fake_pools import now
from rlsys.testing.fake_world import FakeWorld, tasks
from rlsys.testing.scripted_policy import ScriptedPolicy
from rlsys.testing.virtual_clock import run_virtual
from rlsys.testing.world_state import Spans
from rlsys.types import POLICY, Assignment, Episode, Group, PolicyVersion, Score, Task
from rlsys.util.deadlines import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from rlsys.stabilizer import Gradients

    MakesGradients: TypeAlias = Callable[[PolicyVersion], Gradients]

E = TypeVar("E", bound=Event)
LEAST: Mapping[str, Mapping[str, object]] = {
    "run": {"steps": 3},
    "model": {"path": "fake"},
    "data": {"path": "fake"},
    "rollout": {"workflow": SingleTurn()},
    "train": {"groups_per_step": 2},
    "checkpoint": {"every": 0, "every_s": 0},
    "record": {"rollouts_every": 0},
}
"""Defaults of a `FakeRun`."""


@dataclass
class EventRecorder:
    """Event sink that keeps every event."""

    events: list[Event] = field(default_factory=list)

    def handle(self, event: Event, time_s: float) -> None:
        self.events.append(event)

    def close(self) -> None: ...

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


SEVEN = tasks(7)


class FakeRun:
    """One run of the real driver on the workers of a `FakeWorld`, in `folder`.

        run = FakeRun(tmp_path, algorithm=Mine(group_size=4), asynchrony={"max_staleness": 1})
        assert run.train() == 3
        run.metrics[-1]["reward/mean"], run.recorder.of(GroupDropped), run.world.staleness, run.driver.queue

    Keys that the sections leave out have the values of `LEAST`, else the defaults. There is no stabilizer by default.
    """

    def __init__(
        self,
        folder: Path,
        world: FakeWorld | None = None,
        *,
        tasks: Sequence[Task] | Tasks = SEVEN,
        reply: Callable[[str], str] | None = None,
        gradients: MakesGradients | None = None,
        workers: Workers | None = None,
        recorder: EventRecorder | None = None,
        progress: Progress | None = None,
        constants: Constants = WITHOUT_REPACKING,
        **sections: object,
    ) -> None:
        """With `reply`, a function from the text so far to the policy's reply, play the configured workflow and score
        by the reward functions. With `gradients`, by version, the configured stabilizer receives them.

        A world is for one run, which sets its play, scores and stabilizer. `workers` replaces the world's workers.
        Raises `ConfigError`.
        """
        self.config = config = fake_config(folder, sections)
        self.world = world = world or FakeWorld()
        self.recorder = recorder or EventRecorder()
        world.trains_policy = config.algorithm.trains_policy
        world.synchronous_steps = config.stabilizer.synchronous_steps if config.stabilizer else 0
        source: Tasks
        if isinstance(tasks, Sequence):
            source = TaskSource(tasks, config.run.seed, shuffle=config.data.shuffle)
        else:
            source = tasks
        if reply is not None:
            config.rollout.workflow.check(
                source.tasks, group_size=config.algorithm.group_size, distribution=config.rollout.distribution
            )
            world.play, world.judge = partial(_play_session, config, reply), Judge(config, source.tasks)
        if gradients is not None and config.stabilizer is not None:
            world.steer = Steering(config.stabilizer.start(gradients(0)), gradients)
        events = Events([self.recorder], clock=now)
        self.driver = build_driver(
            config, workers or world.workers(), source, events, progress=progress, constants=constants
        )

    @property
    def metrics(self) -> list[Mapping[str, float]]:
        """Metrics of every step, in order."""
        return [step.metrics for step in self.recorder.of(StepDone)]

    def train(self) -> PolicyVersion:
        """Run to the end, from the newest checkpoint in the folder if there is one; return the version reached.

        Raises what `Driver.run` raises.
        """
        return run_virtual(go_on(self.driver))


async def go_on(driver: Driver) -> PolicyVersion:
    """Run to the end, from the newest checkpoint if there is one, else from the start; return the version reached."""
    return await driver.run(await start_of(driver))


async def start_of(driver: Driver) -> PolicyVersion:
    """Restore the newest checkpoint, if there is one; return its version, else 0."""
    checkpoint = await asyncio.to_thread(find_latest, driver.saver.checkpoints.folder)
    return 0 if checkpoint is None else await driver.restore(checkpoint)


def fake_config(folder: Path, sections: Mapping[str, object]) -> Config:
    """Build the configuration of a run in `folder`: `LEAST`, overridden by these sections. Raises `ConfigError`."""
    place = {"run": {"folder": folder.parent, "name": folder.name}}
    merged: dict[str, object] = {"stabilizer": None, **sections}
    for name in LEAST:
        section = merged.get(name, {})
        assert isinstance(section, Mapping), f"{name}: give its keys"
        merged[name] = {**LEAST[name], **section, **place.get(name, {})}
    return Config.model_validate(merged)


async def _play_session(
    config: Config, reply: Callable[[str], str], assignment: Assignment, index: int, spans: Spans, worker: str
) -> Episode:
    """Play one session of the configured workflow, on the version at the start of its group."""
    policy = ScriptedPolicy(reply, config.rollout.max_new_tokens, spans[0].version)
    policies, workflow = dict.fromkeys(config.policies or [POLICY], policy), config.rollout.workflow
    limit = assignment.token_limit
    session = workflow.session(assignment.task, policies, assignment.seed, index, config.agents, limit)
    return await play_or_fail(workflow, session, worker)


class Judge:
    """Reward functions of a configuration, in a thread that the call waits for, because the clock is virtual."""

    def __init__(self, config: Config, tasks: Sequence[Task]) -> None:
        """Raise `ConfigError` for a function that does not exist, or requires a column that some task lacks."""
        self._rewards, self._thread = RewardSum(config.reward_functions), ThreadPoolExecutor(1)
        self._rewards.check(set.intersection(*(set(task.info) for task in tasks)))

    def __call__(self, task: Task, group: Group) -> Iterable[Score]:
        assert isinstance(group.payload, tuple)
        known = {e: known_score(episode) for e, episode in enumerate(group.payload)}
        judged = judged_agents(group.payload)
        asked = [
            [RewardInput.of(group.payload[e]) for e, score in known.items() if score is None],
            [RewardInput.of(group.payload[e], t) for e, t in judged],
        ]
        roots, others = ([*self._thread.submit(self._rewards.score, task, each).result()] for each in asked)
        scored = iter(roots)
        scores = [score or next(scored) for score in known.values()]
        for (e, t), score in zip(judged, others, strict=True):
            scores[e] = replace(scores[e], others={**scores[e].others, t: score})
        check_answered(scores)
        return scores


@dataclass
class Steering:
    """Stabilizer on artificial gradients, one set for every update. Implements `Updates`."""

    stabilizer: Stabilizer
    make: MakesGradients
    latest: Gradients = field(default_factory=dict)
    """Gradients of this update."""
    before: Gradients = field(default_factory=dict)
    """Gradients of the previous update."""

    def __call__(self, version: PolicyVersion, num_updates: int, staleness: float) -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        for _ in range(num_updates):
            self.latest = self.make(version)
            squared_norm = sum(float((g * g).sum()) for g in self.latest.values())
            steered = self.stabilizer.steer(self.latest, squared_norm, alone, staleness)
            metrics |= steered.metrics
            if not steered.is_skipped:
                metrics |= self.stabilizer.correct(self, alone)
                self.before = self.latest
        self.stabilizer.end_step()
        return metrics

    def pieces(self) -> Iterable[_Piece]:
        return [_Piece(name, self.before.get(name, g * 0), g) for name, g in self.latest.items()]


@dataclass
class _Piece:
    """Implement `GradientPiece`, for an optimizer that moves against the gradient."""

    name: str
    earlier: Tensor
    gradient: Tensor

    def before(self) -> Tensor:
        return self.earlier.clone().flatten()

    def now(self) -> Tensor:
        return self.gradient.clone().flatten()

    def add(self, direction: Tensor, scale: float) -> None:
        """Do nothing: there are no weights."""
