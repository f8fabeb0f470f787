"""Sessions in hosts apart from engines: the same tokens, the same failures, and a replica that can do without."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rlsys.agents.workflow import Session, SingleTurn, Workflow
from rlsys.errors import TaskTooLong, WorkerDied, WorkflowError
from rlsys.types import POLICY, Assignment
from tests.replicas import Shelf, assignment, own_tokens, played, replica_of, scripted, until
from workers.rollout.early_ends import GroupEnds
from workers.rollout.group_route import Ticket
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_host import GroupSessions, SessionHost, SessionHosts


class Dialogue(Workflow):
    """Three turns, then a given reply."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for _ in range(3):
            await agent.chat("7>")
        await agent.recite("8>", "123")
        session.reward(float(session.episode_index))


class Dying(SessionHost):
    """A host whose process is gone."""

    async def play(self, replica: RolloutWorker, ticket: Ticket, assignment: Assignment):
        raise WorkerDied(self.name, "playing a group", "the process is gone")


def host_of(workflow: Workflow, name: str = "rollout-host-0", kind: type[SessionHost] = SessionHost) -> SessionHost:
    speech = replica_of(None, scripted("x"), num_tokens=6).generator._speech
    return kind(name, GroupSessions(workflow), {POLICY: speech})


def replica(workflow: Workflow, *hosts: SessionHost, shelf: Shelf | None = None) -> RolloutWorker:
    return replica_of(shelf, scripted("rollout-0", own_tokens), workflow=workflow, hosts=hosts)


def test_a_hosted_session_has_the_tokens_of_one_in_the_replica():
    here, there = replica(Dialogue(), shelf=Shelf(4)), replica(Dialogue(), host_of(Dialogue()), shelf=Shelf(4))
    (local, episodes), (hosted, others) = (
        played([worker], lambda worker=worker: worker.run(assignment(4, size=3))) for worker in (here, there)
    )
    assert others == episodes
    assert hosted[0].versions == local[0].versions
    assert hosted[0].weights == local[0].weights and hosted[0].weights[0].version == 4


class NowhereElse(Workflow):
    """Fails where it is not expected to run."""

    async def run(self, session: Session) -> None:
        raise AssertionError("the replica plays no session itself")


def test_the_workflow_runs_in_the_host_alone():
    worker = replica(NowhereElse(), host_of(Dialogue()))
    _, episodes = played([worker], lambda: worker.run(assignment(size=2)))
    assert len(episodes) == 2


class Breaks(Workflow):
    async def run(self, session: Session) -> None:
        raise ValueError("a bug")


@pytest.mark.parametrize(
    ("workflow", "prompt", "error"), [(Breaks(), "7>", WorkflowError), (SingleTurn(), "7" * 99, TaskTooLong)]
)
def test_errors_of_a_hosted_session_are_those_of_the_group(workflow, prompt, error):
    worker = replica(workflow, host_of(workflow))
    with pytest.raises(error):
        played([worker], lambda: worker.run(assignment(prompt=prompt)))


def test_a_host_that_dies_loses_the_attempt_and_the_next_one_goes_elsewhere():
    worker = replica(Dialogue(), host_of(Dialogue(), "rollout-host-0", Dying), host_of(Dialogue(), "rollout-host-1"))

    async def scenario() -> None:
        with pytest.raises(WorkerDied, match="rollout-host-0"):
            await worker.run(assignment())
        for group_id in range(3):
            _, episodes = await worker.run(assignment(group_id=group_id))
            assert len(episodes) == 2

    played([worker], scenario)


def test_a_replica_without_a_live_host_plays_sessions_itself():
    worker = replica(Dialogue(), host_of(NowhereElse(), kind=Dying))

    async def scenario() -> None:
        with pytest.raises(WorkerDied):
            await worker.run(assignment())
        assert len((await worker.run(assignment()))[1]) == 2

    played([worker], scenario)


def test_a_turn_for_a_group_that_has_ended_is_refused():
    worker = replica(Dialogue())

    async def scenario() -> None:
        with pytest.raises(WorkerDied, match="the group has ended here"):
            await worker.sample_turn(Ticket("rollout-0", 3, 1), POLICY, (5,), 1, None, ())

    played([worker], scenario)


def test_groups_go_to_the_host_with_the_fewest_of_them():
    hosts = [host_of(Dialogue(), f"rollout-host-{n}") for n in range(2)]
    chosen = SessionHosts(hosts, place=1)
    first = chosen.choose()
    assert first is hosts[1], "replicas begin at different hosts"
    chosen._running["rollout-host-1"] += 1
    assert chosen.choose() is hosts[0]


class Sleeps(Workflow):
    """One episode ends at once, the other has a long turn."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        if session.episode_index:
            await agent.chat("7>")


def test_the_replica_samples_no_further_for_a_cancelled_session():
    host = host_of(Sleeps())
    worker = replica(NowhereElse(), host)

    async def scenario() -> None:
        group = asyncio.create_task(worker.run(assignment(size=2)))
        await until(lambda: worker.stats().num_running == 1)
        (turn,) = worker._turns
        await worker.cancel_turn(*turn)
        with pytest.raises(WorkerDied, match="its session was cancelled"):
            await group
        assert worker.stats().num_running == 0 and not worker._turns

    played([worker], scenario)


class Uneven(Workflow):
    async def run(self, session: Session) -> None:
        for _ in range(1 + 5 * session.episode_index):
            await session.agent("policy").chat("7>")
        session.reward(1.0)


def test_early_ends_work_in_a_host():
    host = host_of(Uneven())
    host._sessions = replace(host._sessions, ends=GroupEnds(after=0.5, keep=1e-9))
    worker = replica(NowhereElse(), host)

    async def scenario() -> None:
        done, episodes = await worker.run(assignment(size=4))
        assert (len(episodes), done[0].num_ended_early) == (2, 2)
        await asyncio.sleep(0)
        assert worker.stats().num_running == 0

    played([worker], scenario)
