"""Rollout worker: weights change between or under running groups; no rollout runs on unverified weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, TypeVar

import pytest
from torch import Tensor

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import DeadlineExceeded, TaskTooLong, WeightsMismatch, WorkerDied, WorkerError, WorkflowError
from rlsys.types import Acknowledged, Sampling, VersionSpan
from rlsys.weight_sync.manifest import Manifest, Probe, TensorSpec
from tests.groups import report_of
from tests.replicas import DIGIT, Shelf, assignment, hash_of, own_tokens, replica_of, scripted, until
from tests.replicas import played as played_on
from tests.scripted_engine import ScriptedEngine
from workers.rollout.generator import ACKNOWLEDGEMENTS_KEPT
from workers.rollout.rollout_worker import RolloutWorker

T = TypeVar("T")
REPLY_TOKENS = 6


def worker_of(
    puller: Shelf | None,
    when: Literal["between", "inflight", "beside"] = "between",
    workflow: Workflow | None = None,
    **options: int,
) -> RolloutWorker:
    engine = scripted("rollout-0", lambda request: [DIGIT] * 99, **options)
    return replica_of(puller, engine, when=when, workflow=workflow, num_tokens=REPLY_TOKENS)


def played(worker: RolloutWorker, scenario: Callable[[], Coroutine[object, object, T]]) -> T:
    return played_on([worker], scenario)


def test_a_group_has_acknowledged_versions_and_a_separate_payload():
    worker = worker_of(Shelf(version=4))
    done, payload = played(worker, lambda: worker.run(assignment(version=2)))
    group = done[0]
    assert (group.group_id, group.task_id, group.permit_version, group.replica) == (3, "sort-12", 2, "rollout-0")
    assert (group.payload, len(group.episodes), len(payload)) == (None, 2, 2)
    assert group.versions == (VersionSpan(4, 2 * REPLY_TOKENS),)
    assert group.weights == (Acknowledged("rollout-0", 4, hash_of(4)),)
    assert group.num_trained == 2 * REPLY_TOKENS
    assert payload[0].trajectories[0].turns[0].sampling == Sampling(max_new_tokens=REPLY_TOKENS)
    assert report_of(done).busy.worker == "rollout-0"
    assert report_of(done).busy.start_s <= report_of(done).busy.end_s
    assert worker.generator.acknowledged == Acknowledged("rollout-0", 4, hash_of(4))


def test_a_group_starts_on_weights_no_older_than_its_permit():
    shelf = Shelf(version=0)
    worker = worker_of(shelf)

    async def scenario() -> None:
        waiting = asyncio.create_task(worker.run(assignment(version=2)))
        for version in (1, 2):
            await asyncio.sleep(0)
            assert not waiting.done()
            shelf.put(version)
        done, _ = await waiting
        assert done[0].oldest_version == 2

    played(worker, scenario)


def test_weights_that_are_new_enough_are_not_pulled_again():
    shelf = Shelf(version=3)
    worker = worker_of(shelf)

    async def scenario() -> None:
        for version in (0, 1, 3):
            await worker.run(assignment(version))
        shelf.put(4)
        await asyncio.gather(*(worker.run(assignment(4, group_id=s)) for s in range(5)))

    played(worker, scenario)
    assert shelf.pulls == [3, 4]


def test_groups_that_wait_for_a_change_go_on_in_one_turn_of_the_loop():
    shelf = Shelf()
    generator = worker_of(shelf).generator
    order: list[str] = []

    async def waits() -> None:
        await generator.ensure_version(1)
        order.append("goes on")
        asyncio.get_running_loop().call_soon(order.append, "next turn")

    async def scenario() -> None:
        changing = asyncio.create_task(generator.ensure_version(1))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(waits()) for _ in range(5)]
        await asyncio.sleep(0)
        shelf.put(1)
        await asyncio.gather(changing, *waiting)
        await asyncio.sleep(0)
        await generator.close()

    asyncio.run(scenario())
    assert order == ["goes on"] * 5 + ["next turn"] * 5, "an engine admits together what comes in one turn"


@pytest.mark.parametrize(("change", "versions"), [("between", [0]), ("inflight", [0, 1])])
def test_a_change_waits_for_running_groups_or_happens_under_them(change, versions):
    shelf = Shelf()
    worker = worker_of(shelf, change)
    engine = worker.generator._engine

    async def scenario() -> None:
        older = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: engine.stats().num_tokens == 4)
        shelf.put(1)
        newer = asyncio.create_task(worker.run(assignment(1)))
        (old, _), (new, _) = await asyncio.gather(older, newer)
        assert [span.version for span in old[0].versions] == versions
        assert sum(span.num_tokens for span in old[0].versions) == 12
        assert new[0].versions == (VersionSpan(1, 12),)
        assert [(a.version, a.hash) for a in old[0].weights] == [(v, hash_of(v)) for v in versions]

    played(worker, scenario)


def test_resident_versions_load_at_once_until_there_is_no_room():
    shelf = Shelf()
    worker = worker_of(shelf, "beside", resident_versions=2)
    engine = worker.generator._engine

    async def scenario() -> None:
        oldest = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: engine.stats().num_tokens == 2)
        shelf.put(1)
        newer = asyncio.create_task(worker.run(assignment(1)))
        await until(lambda: engine.version == 1)
        assert not oldest.done()
        shelf.put(2)
        newest = asyncio.create_task(worker.run(assignment(2)))
        done = [group for group, _ in await asyncio.gather(oldest, newer, newest)]
        assert [each[0].versions for each in done] == [(VersionSpan(version, 12),) for version in range(3)]
        assert [each[0].weights[0].hash for each in done] == [hash_of(version) for version in range(3)]

    played(worker, scenario)


def test_older_groups_start_while_newer_ones_wait_for_room():
    shelf = Shelf()
    worker = worker_of(shelf, "beside", resident_versions=2)
    engine = worker.generator._engine

    async def scenario() -> None:
        await worker.run(assignment(0))
        oldest = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: engine.stats().num_running == 2)
        shelf.put(1)
        older = asyncio.create_task(worker.run(assignment(1, group_id=4)))
        await until(lambda: engine.stats().num_running == 4)
        await engine.pause()
        shelf.put(2)
        newest = asyncio.create_task(worker.run(assignment(2, group_id=5)))
        await until(lambda: 2 in shelf.pulls)
        assert (worker.age_s(5), worker.age_s(6)) == (0.0, None)
        fresh = asyncio.create_task(worker.run(assignment(1, group_id=6)))
        await until(lambda: worker.age_s(6) is not None)
        for _ in range(20):
            await asyncio.sleep(0)
        waiting = [ticket.group_id for ticket, began_s in worker._began_s.items() if began_s is None]
        assert waiting == [5], "room is only for what needs it"
        await engine.resume()
        done = [group for group, _ in await asyncio.gather(oldest, older, newest, fresh)]
        assert [each[0].oldest_version for each in done] == [0, 1, 2, 1]

    played(worker, scenario)


def test_a_drained_replica_loads_the_newest_staged_weights():
    shelf = Shelf()
    worker = worker_of(shelf)
    engine = worker.generator._engine
    staged: list[float] = []
    stage = engine.stage

    async def noted(weights: Mapping[str, Tensor]) -> None:
        staged.append(weights["w"][0].item())
        await stage(weights)

    engine.stage = noted

    async def scenario() -> None:
        running = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: engine.stats().num_tokens == 2)
        assert (shelf.pulls, staged) == ([0], [0]), "nothing ran"
        shelf.put(1)
        waiting = asyncio.create_task(worker.run(assignment(1)))
        await until(lambda: 1 in shelf.pulls)
        shelf.put(2)
        (done, _), _ = await asyncio.gather(waiting, running)
        assert done[0].versions == (VersionSpan(2, 12),)
        assert (shelf.pulls, staged) == ([0, 1, 2], [0, 1, 2])
        assert report_of(done).waited_s > 0

    played(worker, scenario)


@pytest.mark.parametrize("kind", [WorkerDied, DeadlineExceeded, WeightsMismatch])
def test_a_failed_relay_fails_only_the_replica_that_pulls(kind: type[WorkerError]):
    class Failing(Shelf):
        async def pull(self, at_least: int) -> tuple[Manifest, dict[str, Tensor]]:
            raise kind("relay-0a1b", "giving version 2 or newer", "the process is gone")

    worker = worker_of(Failing())
    with pytest.raises(kind) as raised:
        played(worker, lambda: worker.run(assignment(2)))
    assert str(raised.value) == (
        "rollout-0 while pulling version 2 or newer: relay-0a1b while giving version 2 or newer: the process is gone"
    )
    assert raised.value.worker == "rollout-0"


@pytest.mark.parametrize(
    ("published", "own", "message"),
    [
        ("b1", "b2", "version 2 is an adapter of the base b1, and this replica loads an adapter of the base b2"),
        ("b1", None, "version 2 is an adapter of the base b1, and this replica loads whole weights"),
        (None, "b2", "version 2 is whole weights, and this replica loads an adapter of the base b2"),
    ],
)
def test_an_adapter_of_another_base_is_refused_by_name(published: str | None, own: str | None, message: str):
    engine = scripted("rollout-0", lambda request: [DIGIT] * 99)
    worker = replica_of(Shelf(version=2, base=published), engine, num_tokens=REPLY_TOKENS, base=own)
    with pytest.raises(WeightsMismatch, match=message):
        played(worker, lambda: worker.run(assignment(2)))
    assert engine.version == -1


def test_an_adapter_of_its_own_base_is_loaded():
    engine = scripted("rollout-0", lambda request: [DIGIT] * 99)
    worker = replica_of(Shelf(version=2, base="b1"), engine, num_tokens=REPLY_TOKENS, base="b1")
    played(worker, lambda: worker.run(assignment(2)))
    assert engine.version == 2


def test_acknowledgements_are_kept_while_a_running_group_needs_them():
    shelf = Shelf()
    worker = replica_of(shelf, scripted("rollout-0", num_slots=1), when="inflight", num_tokens=99)
    num_versions = ACKNOWLEDGEMENTS_KEPT + 9

    async def scenario() -> None:
        running = asyncio.create_task(worker.run(assignment(0, size=1)))
        for version in range(1, num_versions):
            tokens = worker.generator._engine.stats().num_tokens
            await until(lambda tokens=tokens: worker.generator._engine.stats().num_tokens > tokens)
            shelf.put(version)
            await worker.run(assignment(version, size=0))
        done, _ = await running
        assert [a.version for a in done[0].weights] == [span.version for span in done[0].versions]
        assert len(done[0].versions) == num_versions
        shelf.put(num_versions)
        await worker.run(assignment(num_versions, size=0))
        assert len(worker.generator._acknowledged) == ACKNOWLEDGEMENTS_KEPT

    played(worker, scenario)


def test_a_corrupted_tensor_closes_the_gate_for_good():
    shelf = Shelf(version=1)
    worker = worker_of(shelf)

    async def scenario() -> None:
        await worker.run(assignment(1))
        shelf.put(2)
        shelf.corrupted = True
        with pytest.raises(WeightsMismatch, match=r"verifying version 2: .* than those published of w \(1 tensors\)"):
            await worker.run(assignment(2))
        shelf.corrupted = False
        for version in (1, 2):
            with pytest.raises(WeightsMismatch, match=r"earlier weight change failed, .* while verifying version 2: "):
                await worker.run(assignment(version))
        assert worker.generator.acknowledged == Acknowledged("rollout-0", 1, hash_of(1))

    played(worker, scenario)
    assert shelf.pulls == [1, 2]


def test_a_replica_served_one_version_late_starts_nothing_on_it():
    shelf = Shelf(version=2, late=True)
    worker = worker_of(shelf)
    with pytest.raises(WeightsMismatch, match="asked for version 2 or newer, and got 1"):
        played(worker, lambda: worker.run(assignment(2)))
    assert worker.generator.acknowledged is None


def test_a_failed_probe_stops_the_replica_naming_both_versions():
    shelf = Shelf(version=1)
    worker = worker_of(shelf)

    async def scenario() -> None:
        await worker.run(assignment(1))
        shelf.put(2)
        shelf.probe = Probe((1, 2, 3), (-0.5, 0.0))  # the scripted engine says 0 of every token
        with pytest.raises(WeightsMismatch, match=r"version 2: .* by 0\.25 .* before the change it held version 1"):
            await worker.run(assignment(2))
        assert worker.generator.acknowledged == Acknowledged("rollout-0", 1, hash_of(1))

    played(worker, scenario)


def test_a_group_running_under_a_corrupted_change_is_not_returned():
    shelf = Shelf()
    worker = worker_of(shelf, "inflight")

    async def scenario() -> None:
        running = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: worker.generator._engine.stats().num_tokens == 4)
        shelf.put(1)
        shelf.corrupted = True
        with pytest.raises(WeightsMismatch):
            await worker.run(assignment(1))
        with pytest.raises(WorkerDied):
            await running

    played(worker, scenario)


class Verifying(ScriptedEngine):
    """Sums its weights only once `may_end` is set."""

    def __init__(self, version: int) -> None:
        super().__init__(own_tokens, shapes={"w": (2,)}, version=version, name="verifying")
        self.is_verifying, self.may_end = asyncio.Event(), asyncio.Event()

    async def checksums(self) -> Mapping[TensorSpec, int]:
        self.is_verifying.set()
        await self.may_end.wait()
        return await super().checksums()


@pytest.mark.parametrize("corrupted", [False, True])
def test_tokens_sampled_before_the_weights_are_verified_count_only_if_they_are(corrupted: bool):
    shelf, engine = Shelf(), Verifying(version=-1)
    worker = replica_of(shelf, engine, when="inflight")

    async def scenario() -> None:
        engine.may_end.set()
        running = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: engine.stats().num_tokens == 4)
        engine.may_end.clear()
        engine.is_verifying.clear()
        shelf.put(1)
        shelf.corrupted = corrupted
        newer = asyncio.create_task(worker.run(assignment(1)))
        await engine.is_verifying.wait()
        await until(lambda: engine.stats().num_running == 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        engine.may_end.set()
        with pytest.raises(WeightsMismatch) if corrupted else nullcontext():
            await newer
        done, _ = await running
        assert {span.version for span in done[0].versions} == {0, 1}
        assert [a.version for a in done[0].weights] == ([0] if corrupted else [0, 1])

    played(worker, scenario)


def test_without_a_puller_the_weights_it_was_built_with_stay():
    worker = worker_of(None)
    done, _ = played(worker, lambda: worker.run(assignment()))
    assert (done[0].versions, done[0].weights) == ((VersionSpan(-1, 12),), ())


def test_an_overlong_prompt_names_its_length_and_the_key():
    worker = worker_of(Shelf())
    with pytest.raises(TaskTooLong, match=r"61 tokens, allowed are 1 to data\.max_prompt_tokens = 60"):
        played(worker, lambda: worker.run(assignment(prompt="1" * 60 + ">")))


class Broken(Workflow):
    """Raises in code it calls, inside a task group of its own."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def run(self, session: Session) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._talk(session))

    async def _talk(self, session: Session) -> None:
        await session.agent("policy").chat("1>")
        if self.error is not None:
            raise self.error
        sum(int(x) for x in "12x")


class Silent(Workflow):
    async def run(self, session: Session) -> None:
        pass


def test_an_error_after_a_reply_fails_its_episode_with_the_source_line():
    worker = worker_of(Shelf(), workflow=Broken())
    _, episodes = played(worker, lambda: worker.run(assignment()))
    for episode in episodes:
        (trajectory,) = episode.trajectories
        assert trajectory.outcome.is_failed and len(trajectory.turns) == 1
        reason = trajectory.outcome.reason
        assert reason.startswith("rollout-0 while running Broken on task sort-12: ValueError: invalid")
        assert f'{__file__}", line {Broken._talk.__code__.co_firstlineno + 4}, in _talk' in reason


def test_worker_errors_pass_through_tasks_of_a_workflow_unchanged():
    died = WorkerDied("judge-3", "scoring", "it is gone")
    worker = worker_of(Shelf(), workflow=Broken(died))
    with pytest.raises(WorkerDied) as raised:
        played(worker, lambda: worker.run(assignment()))
    assert raised.value is died


def test_a_workflow_in_which_nobody_speaks_is_named():
    worker = worker_of(Shelf(), workflow=Silent())
    with pytest.raises(WorkflowError, match="running Silent on task sort-12: ValueError: the workflow made no agent"):
        played(worker, lambda: worker.run(assignment()))


def test_a_failed_group_does_not_keep_the_next_change_waiting():
    shelf = Shelf()
    worker = worker_of(shelf)

    async def scenario() -> None:
        too_long = replace(assignment(0).task, prompt="1" * 60 + ">")
        with pytest.raises(TaskTooLong):
            await worker.run(replace(assignment(0), task=too_long))
        shelf.put(1)
        done, _ = await worker.run(assignment(1))
        assert done[0].oldest_version == 1

    played(worker, scenario)


def test_a_pull_is_reported_once_with_the_next_finished_group():
    shelf = Shelf()
    worker = worker_of(shelf)
    engine = worker.generator._engine

    async def scenario() -> None:
        older = asyncio.create_task(worker.run(assignment(0)))
        await until(lambda: engine.stats().num_tokens == 2)
        shelf.put(1)
        newer = asyncio.create_task(worker.run(assignment(1)))
        (old, _), (new, _) = await asyncio.gather(older, newer)
        same, _ = await worker.run(assignment(1))
        (first,), (second,) = report_of(old).pulls, report_of(new).pulls
        assert first.worker == second.worker == "rollout-0"
        before, after = report_of(old).busy, report_of(new).busy
        assert first.end_s <= before.start_s < before.end_s <= second.start_s <= second.end_s <= after.start_s
        assert report_of(same).pulls == ()

    played(worker, scenario)


def test_failed_pulls_are_not_reported():
    worker = worker_of(Shelf(corrupted=True))
    with pytest.raises(WeightsMismatch):
        played(worker, lambda: worker.run(assignment(0)))
    assert worker.generator.take_pulls() == ()
