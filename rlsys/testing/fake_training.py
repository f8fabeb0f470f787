"""Fake training workers: actor, critic, reference and relays. Payloads are plain objects, weights a number."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.algorithm import Column
from rlsys.batch.packing import BatchPlan, RankPlan
from rlsys.contracts import Arrival, Files, MarkerReply, Published, Saving, TrainedGroup, TrainStats
from rlsys.errors import TrainingError, WorkerDied, WorkerError
from rlsys.loop.checkpoint import copy_and_write
from rlsys.loop.checkpoint_files import content_problem
from rlsys.loop.shared_place import answer_marker
from rlsys.replay.rollout_json import GroupRecord, RolloutRecord, read_groups, write_groups
from rlsys.replay.rollout_parquet import write_records
from rlsys.testing.fake_pools import now
from rlsys.testing.world_state import WorldState
from rlsys.types import Episode, Group, PolicyVersion, Ref
from rlsys.util.any_paths import AnyPath, writing
from rlsys.util.hashed_files import SavedFile


class _FakeProcess:
    """A process that dies in the calls that `FakeWorld.training_deaths` lists, and is dead until its restart."""

    name = ""
    """Name of its worker; a successor has another."""

    def __init__(self, world: WorldState) -> None:
        self.world = world
        self._kind, self._num_before = self.name, 0
        self._death: WorkerDied | None = None
        self._died = asyncio.Event()

    def _begin(self, call: str) -> None:
        """Begin a call. Raises `WorkerDied` if the process dies in it, or is dead."""
        if self._death is None and self.world.dies(self._kind, call):
            self._death = WorkerDied(self.name, call, "the process is gone")
            self._died.set()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    async def sleep(self) -> None:
        self._begin("sleep")
        await self.world.move(self.role, is_awake=False)
        self._check_alive()

    async def wake(self) -> None:
        self._begin("wake")
        await self.world.move(self.role, is_awake=True)
        self._check_alive()

    @property
    def role(self) -> str:
        return self._kind.partition("-")[0]

    async def _live_again(self) -> None:
        self.world.awake.discard(self.role)
        await asyncio.sleep(self.world.restart_s)
        self._num_before += 1
        self.name = f"{self._kind}.{self._num_before}"
        self._death = None
        self._died.clear()


class _FakeModel(_FakeProcess):
    """Common base of actor and critic: a step trains exactly the groups that were fetched for its plan."""

    def __init__(self, world: WorldState) -> None:
        super().__init__(world)
        self.fetched: Sequence[Group] = ()
        self._plan: BatchPlan | None = None
        self._on_progress: Callable[[], None] = lambda: None

    async def watch(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        await self._died.wait()
        self._check_alive()

    async def end(self) -> None:
        self.world.awake.discard(self.role)

    async def restart(self) -> None:
        await self._live_again()
        if self.role in self.world.together:
            await self.world.move(self.role, is_awake=True)
        self._end_step()
        self._forget()

    def _forget(self) -> None:
        """Return to the initial model."""
        raise NotImplementedError

    async def fetch(self, groups: Sequence[Group], plan: BatchPlan) -> None:
        self._begin("fetch")
        await self.world.fetch(self._fetching, groups)
        self.fetched, self._plan = groups, plan

    _fetching = "fetch"

    def _check_fetched(self, plan: BatchPlan) -> None:
        assert self._plan is plan, "fetch comes first, for the same plan"

    def _check_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> None:
        """Check that a step has its data, and the columns made for it, one array per micro-batch."""
        self._check_fetched(plan)
        made = {kind: column for kind, (of, column) in self.world.columns.items() if of is plan}
        assert columns == made, f"made for this step: {sorted(made)}, handed in: {sorted(columns)}"
        for kind, column in columns.items():
            handed_in = [[len(array) for array in of_rank] for of_rank in column]  # type: ignore[union-attr]
            assert handed_in == [_num_trained(self.fetched, of_rank) for of_rank in plan], kind

    async def _compute(self, seconds: float) -> None:
        """Return after `seconds`, and report progress. Raises `WorkerDied` if the process has died by then."""
        self.world.check_device(self.role)
        while seconds > self.world.progress_s:
            await asyncio.sleep(self.world.progress_s)
            seconds -= self.world.progress_s
            self._on_progress()
        await asyncio.sleep(seconds)
        self._check_alive()

    def _end_step(self) -> None:
        self.fetched, self._plan = (), None

    def save(self, folder: AnyPath) -> Saving[Files]:
        return FakeSaving(self, folder)

    async def copy_state(self) -> str:
        """Return the state to save."""
        self._begin("save")
        self.world.check_device(self.role)
        return json.dumps(self._state())

    async def write_state(self, folder: AnyPath, state: str) -> Files:
        """Write a copy of the state. It takes `FakeWorld.save_s`, beside the next steps."""
        await asyncio.sleep(self.world.save_s)
        self._check_alive()
        path = folder / self._file
        self.world.check_disk(path)
        return {path.name: await asyncio.to_thread(_write, path, state)}

    async def answer_marker(self, folder: AnyPath) -> list[MarkerReply]:
        return [await asyncio.to_thread(answer_marker, folder, self.name)]

    async def find_damage(self, checkpoint: AnyPath, files: Files) -> str | None:
        self._check_alive()
        return await asyncio.to_thread(content_problem, checkpoint, files)

    _file = ""

    def _state(self) -> Mapping[str, object]:
        raise NotImplementedError


@dataclass
class FakeSaving:
    """Implement `Saving`: the state of a fake model."""

    model: _FakeModel
    folder: AnyPath
    _state: str = ""

    async def take_copy(self) -> None:
        self._state = await self.model.copy_state()

    async def write_copy(self) -> Files:
        return await self.model.write_state(self.folder, self._state)


def _write(path: AnyPath, text: str) -> SavedFile:
    with writing(path) as file:
        file.write(text.encode())
    return file.report


class FakeActor(_FakeModel):
    """Implement `Actor`: its weights are a number that depends on all trained groups, in order."""

    pair_cost = 0.0

    name = "actor-0"

    def __init__(self, world: WorldState) -> None:
        super().__init__(world)
        self.version = self.num_steps = 0
        self.num_seen = 0
        """Number of policy steps that the stabilizer has seen."""
        self.last_step: tuple[BatchPlan, Mapping[Column, Sequence[Ref]]] | None = None
        self.stall_s: list[float] = []

    def _forget(self) -> None:
        self.world.weights, self.world.consumed = 0, Counter()
        self.num_steps = self.num_seen = 0

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        self._begin("train_step")
        self._check_step(plan, columns)
        seconds = self.world.step_s(self.version, self.fetched)
        await self._compute(seconds)
        if self.num_steps == 0:
            self.world.trained.clear()  # by an actor that was replaced before any checkpoint
        if self.version == self.world.nan_at:
            raise TrainingError(f"the loss of step {self.version + 1} is nan", update=len(plan[0].updates) - 1)
        for group in self.fetched:
            rewards = tuple(t.reward for _, t in group.trajectories())
            spans = tuple((s.version, s.num_tokens) for s in group.versions)
            self.world.weights = hash((self.world.weights, group.group_id, group.task_id, rewards, spans))
            self.world.consumed[group.task_id] += 1
            self.world.trained.append((self.version, group))
        steered = self.world.steer(self.version, len(plan[0].updates), plan[0].staleness)
        metrics = {"loss": self.world.weights % 1000 / 7, **steered}
        self.last_step = (plan, columns)
        self._end_step()
        self.num_seen += self.world.synchronous_steps > 0 and self.world.trains_policy(self.num_steps)
        self.version += 1
        self.num_steps += 1
        return TrainStats(metrics, seconds)

    async def publish(self, version: PolicyVersion) -> Published:
        self._begin("publish")
        self.world.check_device(self.role)
        self.version, began_s = version, now()
        await asyncio.sleep(self.world.publish_s)
        self._check_alive()
        self.world.send(version)
        self.stall_s.append(now() - began_s)
        return Published(version, self.world.num_bytes, self.stall_s[-1])

    async def announce_again(self, version: PolicyVersion) -> None:
        """Do nothing: fake relays lose no version."""

    _file = "weights.json"

    def _state(self) -> Mapping[str, object]:
        counts = {"version": self.version, "num_steps": self.num_steps, "num_seen": self.num_seen}
        return {"weights": self.world.weights, "consumed": self.world.consumed, **counts}

    async def load(self, folder: AnyPath) -> int:
        self._begin("load")
        self.world.check_device(self.role)
        state = json.loads((folder / "weights.json").read_bytes())
        self.world.weights, self.version = state["weights"], state["version"]
        self.world.consumed = Counter(state["consumed"])
        self.world.trained = [(version, group) for version, group in self.world.trained if version < self.version]
        self.num_steps, self.num_seen = state["num_steps"], state["num_seen"]
        return max(0, self.world.synchronous_steps - self.num_seen)

    def record(self, path: Path, step: int, trained: Sequence[TrainedGroup]) -> Saving[None]:
        return FakeRecording(self, path, step, trained)

    async def copy_columns(self) -> None:
        """Do as if the columns of the step were copied."""
        self._begin("record")

    async def record_evaluated(self, path: Path, version: PolicyVersion, evaluated: Sequence[TrainedGroup]) -> None:
        self._begin("record_evaluated")
        await copy_and_write(self.record(path, version, evaluated))

    async def save_groups(self, path: AnyPath, groups: Sequence[Group]) -> SavedFile:
        self._begin("save_groups")
        await self.world.fetch("save_groups", groups)
        return write_groups(path, [GroupRecord(g, _payload(g)) for g in groups])

    async def load_groups(self, path: AnyPath) -> list[Group]:
        return [replace(record.group, payload=record.episodes) for record in read_groups(path)]


@dataclass(frozen=True)
class FakeRecording:
    """Implement `Saving`: the rollouts of a trained step."""

    actor: FakeActor
    path: Path
    step: int
    trained: Sequence[TrainedGroup]

    async def take_copy(self) -> None:
        await self.actor.copy_columns()

    async def write_copy(self) -> None:
        records = [RolloutRecord.of(self.step, o.task, o.group, _payload(o.group), o.assigned) for o in self.trained]
        write_records(self.path, records)


class FakeCritic(_FakeModel):
    """Implement `Critic`: its value of every state is the number of its steps."""

    name = "critic-0"
    _fetching = "fetch_critic"

    def __init__(self, world: WorldState) -> None:
        super().__init__(world)
        self.num_steps = 0

    def _forget(self) -> None:
        self.num_steps = 0

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        self._begin("annotate_step")
        self._check_fetched(plan)
        self.world.check_device(self.role)
        return _columns(self.world, groups, plan, column, float(self.num_steps))

    async def train_step(self, plan: BatchPlan, columns: Mapping[Column, Sequence[Ref]]) -> TrainStats:
        self._begin("train_step")
        self._check_step(plan, columns)
        seconds = self.world.critic_s(self.num_steps)
        await self._compute(seconds)
        self._end_step()
        self.num_steps += 1
        return TrainStats({"critic/loss": 1 / self.num_steps}, seconds)

    _file = "critic.json"

    def _state(self) -> Mapping[str, object]:
        return {"num_steps": self.num_steps}

    async def load(self, folder: AnyPath) -> None:
        self._begin("load")
        self.world.check_device(self.role)
        self.num_steps = json.loads((folder / "critic.json").read_bytes())["num_steps"]


class FakeRelays:
    """Implement `Relays`: versions arrive by `FakeWorld.send`."""

    def __init__(self, world: WorldState) -> None:
        self.world = world

    async def arrival(self, version: PolicyVersion) -> Arrival:
        await self.world.wait_for_version(version)
        num_bytes = self.world.num_bytes
        return Arrival(version, self.world.hash(version), num_bytes, num_bytes, self.world.broadcast_s)

    async def supervise(
        self, on_failure: Callable[[WorkerError], None], on_recovery: Callable[[str, float], None]
    ) -> None:
        for death_s in self.world.relay_deaths_s:
            await asyncio.sleep(death_s - now())
            on_failure(WorkerDied("relay-0", "keeping weights", "the process is gone"))
            await asyncio.sleep(self.world.restart_s)
            on_recovery("relay-0", self.world.restart_s)
        await asyncio.Event().wait()


class FakeReference(_FakeProcess):
    """Implement `Reference` and `StepAnnotator`: every trained token gets logprob -1."""

    name = "reference"

    def __init__(self, world: WorldState) -> None:
        super().__init__(world)
        self._replacing = asyncio.Lock()

    async def restart(self, worker: str, on_recovery: Callable[[str, float], None]) -> None:
        async with self._replacing:
            if worker == self.name:
                await self._live_again()
                on_recovery(worker, self.world.restart_s)

    async def sleep(self) -> None:
        with suppress(WorkerDied):
            await super().sleep()
        self.world.awake.discard(self.role)

    async def annotate(self, groups: Sequence[Group], column: Column) -> list[Group]:
        self._begin("annotate")
        await asyncio.sleep(sum(self.world.annotate_s(group.group_id) for group in groups))
        await self.world.fetch("annotate", groups)
        return [replace(g, columns={**g.columns, column: [(-1.0,) * 3] * len(g.episodes)}) for g in groups]

    async def annotate_step(self, groups: Sequence[Group], plan: BatchPlan, column: Column) -> list[Ref]:
        self._begin("annotate_step")
        if self.role in self.world.together and self.role not in self.world.awake:  # a successor is set up now
            await self.world.move(self.role, is_awake=True)
        await self.world.fetch("annotate_step", groups)
        self.world.check_device(self.role)
        return _columns(self.world, groups, plan, column, -1.0)


def _columns(world: WorldState, groups: Sequence[Group], plan: BatchPlan, kind: Column, value: float) -> list[Ref]:
    """Return `value` for every trained token: per rank, a tuple for each of its micro-batches."""
    column: list[Ref] = [[(value,) * count for count in _num_trained(groups, of_rank)] for of_rank in plan]
    world.columns[kind] = (plan, column)
    return column


def _num_trained(groups: Sequence[Group], plan: RankPlan) -> list[int]:
    """Count the trained tokens of each micro-batch of a rank."""
    episodes = [[(groups[r.group].episodes[r.episode], r) for r in batch.samples] for batch in plan.micro_batches]
    return [sum(e.trajectories[r.trajectory].samples[r.sample].num_trained for e, r in batch) for batch in episodes]


def _payload(group: Group) -> tuple[Episode, ...]:
    """Return the episodes; none for a simulated group, which has only lengths."""
    assert isinstance(group.payload, tuple | None)
    return group.payload or ()
