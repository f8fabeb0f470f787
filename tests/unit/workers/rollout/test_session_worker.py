"""A session worker plays groups on weights as new as their permits, within their deadline, and loses no failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import GroupExpired, RlsysError, TaskTooLong, WeightsMismatch, WorkerDied, WorkflowError
from rlsys.routing.requests import Request
from rlsys.testing.virtual_clock import run_virtual
from rlsys.types import Acknowledged, Episode, Sampling, VersionSpan
from tests.groups import report_of
from tests.models import tiny_sorter
from tests.replicas import (
    DIGIT,
    Shelf,
    assignment,
    hash_of,
    own_tokens,
    played,
    remote_of,
    replica_of,
    scripted,
    sessions_of,
    until,
    worker_of,
)  # fmt: skip
from tests.scripted_engine import ScriptedEngine
from tests.scripted_replica import ScriptedReplica
from workers.engines.engine import EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.session_worker import SessionWorker

REPLY_TOKENS = 6
When = Literal["between", "inflight", "beside"]


class Pair:
    """A replica on a shelf, and a session worker."""

    def __init__(self, when: When = "between", workflow: Workflow | None = None, version: int = 0, **options: Any):
        self.shelf = Shelf(version)
        self.engine = scripted("a")
        self.replica = replica_of(self.shelf, self.engine, when=when)
        self.worker = sessions_of(self.replica, workflow=workflow, num_tokens=REPLY_TOKENS, **options)

    @property
    def both(self) -> list[EngineReplica | SessionWorker]:
        return [self.worker, self.replica]


class Dialogue(Workflow):
    """Three turns, then a given reply."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for _ in range(3):
            await agent.chat("7>")
        await agent.recite("8>", "123")
        session.reward(float(session.episode_index))


# -------------------------------------------------------------------------------------------------------------- groups


def test_a_group_has_acknowledged_versions_and_a_separate_payload():
    pair = Pair(version=4)
    views, payload = played(pair.both, lambda: pair.worker.run(assignment(version=2)))
    (group,) = views
    assert (group.group_id, group.task_id, group.permit_version, group.replica) == (3, "sort-12", 2, "rollout-0")
    assert (group.payload, len(group.episodes), len(payload)) == (None, 2, 2)
    assert group.versions == (VersionSpan(4, 2 * REPLY_TOKENS),)
    assert group.weights == (Acknowledged("rollout-0", 4, hash_of(4)),)
    assert group.num_trained == 2 * REPLY_TOKENS
    assert payload[0].trajectories[0].turns[0].sampling == Sampling(max_new_tokens=REPLY_TOKENS)
    assert report_of(views).busy.worker == "rollout-0"
    assert report_of(views).busy.start_s <= report_of(views).busy.end_s


def test_a_group_starts_on_weights_no_older_than_its_permit():
    pair = Pair()

    async def scenario() -> None:
        waiting = asyncio.create_task(pair.worker.run(assignment(version=2)))
        for version in (1, 2):
            await asyncio.sleep(0)
            assert not waiting.done()
            pair.shelf.put(version)
        views, _ = await waiting
        assert views[0].oldest_version == 2

    played(pair.both, scenario)


@pytest.mark.parametrize(("when", "versions"), [("between", [0]), ("inflight", [0, 1])])
def test_a_change_waits_for_running_groups_or_happens_under_them(when: When, versions: list[int]):
    pair = Pair(when)

    async def scenario() -> None:
        older = asyncio.create_task(pair.worker.run(assignment(0)))
        await until(lambda: pair.engine.stats().num_tokens == 4)
        pair.shelf.put(1)
        newer = asyncio.create_task(pair.worker.run(assignment(1)))
        (old, _), (new, _) = await asyncio.gather(older, newer)
        assert [span.version for span in old[0].versions] == versions
        assert sum(span.num_tokens for span in old[0].versions) == 12
        assert new[0].versions == (VersionSpan(1, 12),)
        assert [(a.version, a.hash) for a in old[0].weights] == [(v, hash_of(v)) for v in versions]

    played(pair.both, scenario)


def test_a_group_reports_the_weight_changes_before_it_and_its_wait():
    pair = Pair()

    async def scenario() -> None:
        older = asyncio.create_task(pair.worker.run(assignment(0)))
        await until(lambda: pair.engine.stats().num_tokens == 2)
        pair.shelf.put(1)
        newer = asyncio.create_task(pair.worker.run(assignment(1)))
        (old, _), (new, _) = await asyncio.gather(older, newer)
        same, _ = await pair.worker.run(assignment(1))
        (first,), (second,) = report_of(old).pulls, report_of(new).pulls
        before, after = report_of(old).busy, report_of(new).busy
        assert first.end_s <= before.start_s < before.end_s <= second.start_s <= second.end_s <= after.start_s
        assert report_of(new).waited_s > 0
        assert report_of(same).pulls == ()

    played(pair.both, scenario)


def test_without_a_puller_tokens_have_the_first_version():
    worker = worker_of(None, scripted("a"))
    views, _ = played([worker], lambda: worker.run(assignment()))
    assert (views[0].versions, views[0].weights) == ((VersionSpan(-1, 12),), ())


def test_a_replica_in_another_process_gives_the_same_group():
    def group_of(*, is_remote: bool) -> tuple[tuple[Acknowledged, ...], tuple[Episode, ...]]:
        pair = Pair("inflight", workflow=Dialogue(), version=4)

        async def scenario() -> tuple[tuple[Acknowledged, ...], tuple[Episode, ...]]:
            if is_remote:
                pair.worker.meet([remote_of("rollout-0", ReplicaWorker("rollout-0", {"policy": pair.replica}))])
            views, payload = await pair.worker.run(assignment(4, size=3))
            return views[0].weights, payload

        if is_remote:
            pair.worker = sessions_of(workflow=Dialogue(), num_tokens=REPLY_TOKENS)
        return played(pair.both, scenario)

    assert group_of(is_remote=True) == group_of(is_remote=False)


@pytest.mark.parametrize("when", ["between", "inflight", "beside"])
def test_turns_of_a_group_go_to_replicas_with_room_and_have_the_same_tokens(when: When):
    def payload_on(*slots: int) -> tuple[Episode, ...]:
        shelf = Shelf()
        engines = [scripted(f"e{n}", num_slots=num) for n, num in enumerate(slots)]
        replicas = [
            replica_of(shelf, engine, name=f"rollout-{n}", when=when, num_slots=slots[n])
            for n, engine in enumerate(engines)
        ]
        worker = sessions_of(*replicas, workflow=Dialogue(), num_tokens=REPLY_TOKENS)

        async def scenario() -> tuple[Episode, ...]:
            await asyncio.gather(*(worker.run(assignment(group_id=n, size=1)) for n in range(len(replicas))))
            views, payload = await worker.run(assignment(group_id=9, size=6))
            assert {a.replica for a in views[0].weights} == {replica.name for replica in replicas}
            assert {(span.version) for span in views[0].versions} == {0}
            return payload

        return played([worker, *replicas], scenario)

    assert payload_on(2, 64) == payload_on(64)


# ------------------------------------------------------------------------------------------------------------ deadline


class Slow(Workflow):
    """Two turns, and a tool between them that takes its time."""

    def __init__(self, tool_s: float) -> None:
        self.tool_s = tool_s

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat("7>")
        await asyncio.sleep(self.tool_s)
        await agent.chat("8>")


def timed(group_s: float, *, tick_s: float = 1.0, tool_s: float = 0.0) -> float:
    """Play a group of twice six tokens; return the seconds that it took."""
    engine = ScriptedEngine(own_tokens, tick_s=tick_s)
    worker = worker_of(None, engine, workflow=Slow(tool_s), group_s=group_s)

    async def scenario() -> float:
        await worker.run(assignment())
        return asyncio.get_running_loop().time()

    return run_virtual(scenario())


def test_a_slow_tool_does_not_end_a_group():
    assert timed(20.0, tool_s=1000.0) == pytest.approx(1012.0)


def test_a_group_that_waits_too_long_for_tokens_expires():
    with pytest.raises(GroupExpired, match=r"group 3 waited for tokens for more than 10 s .* raise limits\.group_s"):
        timed(10.0, tool_s=100.0)


def test_an_expired_group_leaves_its_replica_and_its_weights():
    shelf = Shelf()
    engine = ScriptedEngine(own_tokens, shapes={"w": (2,)}, tick_s=1.0)
    replica = replica_of(shelf, engine)
    worker = sessions_of(replica, group_s=3.0)

    async def scenario() -> None:
        with pytest.raises(GroupExpired):
            await worker.run(assignment())
        await asyncio.sleep(0.1)
        assert (engine.stats().num_running, replica.load().num_present) == (0, 0)

    run_virtual(scenario())


def test_a_wait_for_weights_does_not_count():
    shelf = Shelf()
    worker = worker_of(shelf, ScriptedEngine(own_tokens, shapes={"w": (2,)}, tick_s=1.0), group_s=10.0)

    async def scenario() -> None:
        running = asyncio.create_task(worker.run(assignment(1)))
        await asyncio.sleep(100.0)
        shelf.put(1)
        views, _ = await running
        assert views[0].oldest_version == 1

    run_virtual(scenario())


def test_a_wait_for_a_successor_does_not_count():
    dead, live = ScriptedReplica("rollout-0"), ScriptedReplica("rollout-0.1")
    worker = sessions_of(dead, group_s=10.0)

    async def scenario() -> None:
        dead.go.clear()
        running = asyncio.create_task(worker.run(assignment()))
        await asyncio.sleep(5.0)
        dead.die()
        await asyncio.sleep(100.0)
        worker._roads["policy"].router.meet([live])
        views, _ = await running
        assert views[0].replica == "rollout-0.1"

    run_virtual(scenario())


# ------------------------------------------------------------------------------------------------------------ failures


def test_an_overlong_prompt_names_its_length_and_the_key():
    pair = Pair()
    with pytest.raises(TaskTooLong, match=r"61 tokens, allowed are 1 to data\.max_prompt_tokens = 60"):
        played(pair.both, lambda: pair.worker.run(assignment(prompt="1" * 60 + ">")))


def test_a_failed_group_does_not_keep_the_next_change_waiting():
    pair = Pair()

    async def scenario() -> None:
        too_long = replace(assignment(0).task, prompt="1" * 60 + ">")
        with pytest.raises(TaskTooLong):
            await pair.worker.run(replace(assignment(0), task=too_long))
        pair.shelf.put(1)
        views, _ = await pair.worker.run(assignment(1))
        assert views[0].oldest_version == 1

    played(pair.both, scenario)


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


class Buggy(Workflow):
    """Has a bug after its first turn."""

    async def run(self, session: Session) -> None:
        said = await session.agent("policy").chat(session.task.prompt, max_new_tokens=3)
        int(said + "!")


def test_an_error_after_a_reply_fails_its_episode_with_the_source_line():
    pair = Pair(workflow=Broken())
    _, episodes = played(pair.both, lambda: pair.worker.run(assignment()))
    for episode in episodes:
        (trajectory,) = episode.trajectories
        assert trajectory.outcome.is_failed and len(trajectory.turns) == 1
        reason = trajectory.outcome.reason
        assert reason.startswith("session-0 while running Broken on task sort-12: ValueError: invalid")
        assert f'{__file__}", line {Broken._talk.__code__.co_firstlineno + 4}, in _talk' in reason


def test_a_bug_is_told_with_what_was_said():
    pair = Pair(workflow=Buggy())
    _, (episode,) = played(pair.both, lambda: pair.worker.run(assignment(size=1)))
    lines = episode.trajectories[0].outcome.reason.splitlines()
    assert "ValueError: invalid literal for int()" in lines[0]
    assert lines[1] == f'  File "{__file__}", line {Buggy.run.__code__.co_firstlineno + 2}, in run'
    assert lines[-2:] == ["[policy] user: 12>", f"[policy] assistant: {lines[-1].rpartition(' ')[2]}"]


def test_worker_errors_pass_through_tasks_of_a_workflow_unchanged():
    died = WorkerDied("judge-3", "scoring", "it is gone")
    pair = Pair(workflow=Broken(died))
    with pytest.raises(WorkerDied) as raised:
        played(pair.both, lambda: pair.worker.run(assignment()))
    assert raised.value is died


def test_a_workflow_without_an_agent_is_named():
    pair = Pair(workflow=Silent())
    with pytest.raises(WorkflowError, match="running Silent on task sort-12: ValueError: the workflow made no agent"):
        played(pair.both, lambda: pair.worker.run(assignment()))


class Forgiving(Workflow):
    """Takes whatever its turn raises for a failure of the policy."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        try:
            if session.episode_index % 2:
                await agent.chat("7>")
            else:
                await agent.recite("8>", "123")
        except RlsysError:
            session.reward(0.0)
            if session.episode_index == 1:
                raise ValueError("no reply") from None


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_a_workflow_handles_fails_the_group(size: int):
    pair = Pair(workflow=Forgiving(), max_losses=1)
    successor = replica_of(pair.shelf, scripted("b"), name="rollout-0.1")

    async def scenario() -> None:
        await pair.replica.weights.ensure(0)
        await pair.engine.pause()
        running = asyncio.create_task(pair.worker.run(assignment(size=size)))
        await until(lambda: pair.replica.load().num_present == 1)
        await pair.engine.close()
        await until(lambda: not pair.worker._roads["policy"].router._places)
        pair.worker._roads["policy"].router.meet([successor])
        with pytest.raises(WorkerDied, match="the engine was closed"):
            await running

    played([*pair.both, successor], scenario)


def test_corrupted_weights_end_no_group_while_another_replica_is_live():
    pair = Pair("inflight")
    other = replica_of(pair.shelf, scripted("b"), name="rollout-0.1", when="inflight")

    async def scenario() -> None:
        losses: list[Exception] = []
        pair.replica.on_loss = losses.append
        running = asyncio.create_task(pair.worker.run(assignment(0)))
        await until(lambda: pair.engine.stats().num_tokens == 4)
        pair.shelf.put(1)
        pair.shelf.corrupted = True
        newer = asyncio.create_task(pair.worker.run(assignment(1, group_id=4)))
        await until(lambda: bool(losses))
        assert {type(loss) for loss in losses} == {WeightsMismatch}
        pair.shelf.corrupted = False
        pair.worker._roads["policy"].router.meet([other])
        for views, _ in await asyncio.gather(running, newer):
            assert views[0].weights == (Acknowledged("rollout-0.1", 1, hash_of(1)),)

    played([*pair.both, other], scenario)


@pytest.mark.parametrize("when", ["between", "inflight"])
def test_a_cancelled_group_leaves_nothing_behind(when: When):
    pair = Pair(when)

    async def scenario() -> None:
        running = asyncio.create_task(pair.worker.run(assignment()))
        await until(lambda: pair.engine.stats().num_tokens > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(9):
            await asyncio.sleep(0)
        load = pair.replica.load()
        assert (load.stats.num_running, load.num_present, load.weight) == (0, 0, 0)

    played(pair.both, scenario)


class Fails(Workflow):
    """The second session raises after its first turn; the first goes on."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        if session.episode_index == 1:
            raise WorkerDied("judge-3", "scoring", "it is gone")
        await agent.chat("1>")


def test_an_error_of_one_session_ends_the_requests_of_the_others():
    pair = Pair(workflow=Fails())

    async def scenario() -> None:
        with pytest.raises(WorkerDied):
            await pair.worker.run(assignment())
        await asyncio.sleep(0)
        assert pair.replica.load().stats.num_running == 0

    played(pair.both, scenario)


# -------------------------------------------------------------------------------------------------------------- agents


class Short(Workflow):
    """Turns of different limits."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for most in (4, None, 999):
            await agent.chat("12>", max_new_tokens=most)


class Talk(Workflow):
    """A dialogue of four turns."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for said in ("12>", "345>", "6>", "78>"):
            await agent.chat(said)


class Wide(Workflow):
    """A lead, and forks of it that speak at once."""

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat(session.task.prompt, max_new_tokens=5)
        forks = [lead.fork("helper") for _ in range(3)]
        await session.gather(*(fork.chat(f"{n}>", max_new_tokens=6) for n, fork in enumerate(forks)))


def test_a_dialogue_computes_each_of_its_tokens_once():
    engine = LocalEngine(
        tiny_sorter(), EngineSpec(model_path="", slots=4, max_context=128), stop_token_ids=frozenset({1}), name="a"
    )
    worker = worker_of(None, engine, workflow=Talk(), num_tokens=10)

    async def scenario() -> tuple[Episode, ...]:
        _, payload = await worker.run(assignment(size=1))
        await engine.close()
        return payload

    (episode,) = played([worker], scenario)
    last = episode.trajectories[0].turns[-1]
    assert engine.num_computed == len(last.prompt_ids) + len(last.output_ids) - 1


def test_the_token_limit_of_a_turn_is_capped_and_recorded():
    worker = worker_of(Shelf(), scripted("a"), workflow=Short(), num_tokens=10)
    _, episodes = played([worker], lambda: worker.run(assignment()))
    for episode in episodes:
        turns = episode.trajectories[0].turns
        assert [len(turn.output_ids) for turn in turns] == [4, 10, 10]
        assert [turn.sampling for turn in turns] == [Sampling(max_new_tokens=n) for n in (4, 10, 10)]


def test_forks_share_the_parents_tokens_and_have_distinct_seeds():
    seeds: list[int] = []

    def reply(request: Request) -> Sequence[int]:
        seeds.append(request.seed)
        return [DIGIT] * 5

    worker = worker_of(Shelf(), scripted("a", reply), workflow=Wide(), num_tokens=30)
    _, (first, second) = played([worker], lambda: worker.run(assignment()))
    for episode in (first, second):
        lead, *forks = episode.trajectories
        seen = (*lead.turns[0].prompt_ids, *lead.turns[0].output_ids)
        assert [fork.turns[0].prompt_ids[: len(seen)] for fork in forks] == [seen] * 3
    assert len(set(seeds)) == 8
