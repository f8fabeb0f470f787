"""Session workers end episodes early once their group is settled, and only then."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.agents.workflow import Session, Workflow
from rlsys.types import Episode, Score, Task
from tests.replicas import DIGIT, assignment, played, scripted, worker_of
from tests.scripted_engine import ScriptedEngine
from workers.rollout.early_ends import GroupEnds
from workers.rollout.session_worker import SessionWorker


class Uneven(Workflow):
    """Episode number n takes n turns more; its reward is 1, or 0 for those whose number is in the prompt."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for _ in range(1 + 4 * session.episode_index):
            await agent.chat("7>")
        session.reward(float(str(session.episode_index) not in str(session.task.prompt)))


class Lengths:
    """Judge by the number of turns: 1 for up to 5."""

    def __init__(self) -> None:
        self.is_closed = False

    async def score(self, task: Task, episodes: tuple[Episode, ...]) -> tuple[Score, ...]:
        return tuple(Score(float(len(e.trajectories[0].turns) <= 5)) for e in episodes)

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


class Silent(Uneven):
    """The same without rewards."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for _ in range(1 + 4 * session.episode_index):
            await agent.chat("7>")


def player(ends: GroupEnds, workflow: Workflow, engine: ScriptedEngine | None = None) -> SessionWorker:
    engine = engine or scripted("rollout-0", lambda request: [DIGIT] * 99)
    return worker_of(None, engine, workflow=workflow, num_tokens=2, ends=ends)


def rolled_out(ends: GroupEnds, prompt: str = "x>", workflow: Workflow | None = None, size: int = 6):
    worker = player(ends, workflow or Uneven())
    return played([worker], lambda: worker.run(assignment(prompt=prompt, size=size)))


def test_a_settled_group_ends_early_and_says_so():
    done, episodes = rolled_out(GroupEnds(after=0.5, keep=1e-9))
    group = done[0]
    assert (len(episodes), group.num_ended_early, group.settled_reward) == (3, 3, 1.0)
    assert [len(e.trajectories[0].turns) for e in episodes] == [1, 5, 9]
    assert [e.weight for e in group.episodes] == [1.0] * 3
    assert group.num_trained == sum(len(t.output_ids) for e in episodes for t in e.trajectories[0].turns)


def test_episodes_that_go_on_stand_for_all_that_were_running():
    done, _ = rolled_out(GroupEnds(after=0.5, keep=1 - 1e-12))
    assert [e.weight for e in done[0].episodes] == pytest.approx([1.0] * 6)
    assert (done[0].num_ended_early, done[0].settled_reward) == (0, 1.0)
    half, _ = rolled_out(GroupEnds(after=0.34, keep=0.5), size=10)
    weights = [e.weight for e in half[0].episodes]
    assert weights[:4] == [1.0] * 4 and set(weights[4:]) <= {2.0}
    assert half[0].num_ended_early == 10 - len(weights)


@pytest.mark.parametrize("prompt", ["0>", "1>", "2>"])
def test_a_group_with_different_rewards_is_played_to_its_end(prompt):
    done, episodes = rolled_out(GroupEnds(after=0.5, keep=1e-9), prompt)
    assert (len(episodes), done[0].num_ended_early, done[0].settled_reward) == (6, 0, None)


def test_two_episodes_at_least_have_ended():
    _, episodes = rolled_out(GroupEnds(after=0.1, keep=1e-9))
    assert len(episodes) == 2


def test_a_judge_scores_what_the_workflow_does_not():
    judge = Lengths()
    done, episodes = rolled_out(GroupEnds(after=0.3, keep=1e-9, judge=judge), workflow=Silent())
    assert len(episodes) == 2 and done[0].settled_reward == 1.0
    assert judge.is_closed
    unknown, all_of_them = rolled_out(GroupEnds(after=0.3, keep=1e-9), workflow=Silent())
    assert len(all_of_them) == 6 and unknown[0].settled_reward is None


def test_nothing_runs_at_the_engine_after_an_early_end():
    engine = scripted("rollout-0", lambda request: [DIGIT] * 99)
    worker = player(GroupEnds(after=0.5, keep=1e-9), Uneven(), engine)

    async def scenario() -> None:
        await worker.run(assignment(prompt="x>", size=6))
        await asyncio.sleep(0)
        assert engine.stats().num_running == engine.stats().num_waiting == 0

    played([worker], scenario)
