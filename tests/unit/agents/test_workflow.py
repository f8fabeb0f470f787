"""Workflows: lookup by name, the largest cost of a session, and the report of a bug."""

from __future__ import annotations

import asyncio
import math
import pickle
from dataclasses import dataclass

import pytest

from rlsys.agents.workflow import BudgetSpent, Session, SingleTurn, Workflow, play, play_or_fail
from rlsys.config.plugins import WORKFLOWS
from rlsys.errors import ConfigError, DataError, ToolError, WorkerDied, WorkflowError
from rlsys.testing import ScriptedPolicy, play_scripted
from rlsys.types import OK, TRUNCATED, Episode, Outcome, Task, Trajectory, failed

TASK = Task(id="t", prompt="2+3?", answer="5")


@dataclass(frozen=True, kw_only=True)
class Chatter(Workflow):
    """One agent that talks on and on."""

    num: int = 3
    """Turns."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for _ in range(self.num):
            await agent.chat("on>")


def outcome_of(episode: Episode) -> Outcome:
    return episode.trajectories[0].outcome


def test_a_text_prompt_is_fed_as_it_is():
    policy = ScriptedPolicy(lambda prompt: "5")
    (trajectory,) = play_scripted(SingleTurn(), TASK, policy).trajectories
    (turn,) = trajectory.turns
    assert policy.asked[0][0] == "2+3?"
    assert trajectory == Trajectory("policy", (turn,), OK, None, None, "policy")
    assert (turn.prompt_ids, turn.text) == (tuple(map(ord, "2+3?")), "5")


def test_workflows_are_found_by_name_and_carry_their_fields():
    assert WORKFLOWS.read("single_turn") == SingleTurn()
    assert WORKFLOWS.read({"type": f"{__name__}:Chatter", "num": 5, "max_turns": 2}) == Chatter(num=5, max_turns=2)
    assert pickle.loads(pickle.dumps(Chatter(num=5))) == Chatter(num=5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:W", "cannot import workflow 'no_such_module:W': ModuleNotFoundError"),
        ("rlsys.agents.workflow:Missing", "module 'rlsys.agents.workflow' has no 'Missing'"),
        ("rlsys.types:Task", r"'rlsys.types:Task' is not a dataclass derived from rlsys\.agents\.workflow\.Workflow"),
    ],
)
def test_what_is_not_a_workflow_is_named(spec: str, message: str):
    with pytest.raises(ConfigError, match=message):
        WORKFLOWS.find(spec)


def test_a_workflow_without_a_run_says_so():
    class Empty(Workflow):
        pass

    with pytest.raises(NotImplementedError, match="Empty plays nothing: implement `run`"):
        play_scripted(Empty(), TASK, ScriptedPolicy())


def test_an_episode_without_agents_is_a_workflow_bug():
    class Silent(Workflow):
        async def run(self, session: Session) -> None:
            pass

    with pytest.raises(ValueError, match=r"made no agent: call session\.agent"):
        play_scripted(Silent(), TASK, ScriptedPolicy())


# ------------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(("num", "turns", "outcome"), [(3, 3, OK), (4, 3, TRUNCATED)])
def test_an_agent_that_never_stops_ends_the_episode_truncated(num: int, turns: int, outcome: Outcome):
    episode = play_scripted(Chatter(num=num, max_turns=3), TASK, ScriptedPolicy())
    assert (len(episode.trajectories[0].turns), outcome_of(episode)) == (turns, outcome)


def test_the_last_turn_is_cut_to_the_episode_token_budget():
    episode = play_scripted(Chatter(num=9, max_episode_tokens=10), TASK, lambda prompt: "four")
    turns = episode.trajectories[0].turns
    assert [turn.text for turn in turns] == ["four", "four", "fo"]
    assert [turn.sampling.max_new_tokens for turn in turns] == [10, 6, 2]
    assert outcome_of(episode) == TRUNCATED


def test_tokens_are_counted_over_all_agents_and_turns_for_each():
    class Two(Workflow):
        async def run(self, session: Session) -> None:
            for name in "ab":
                agent = session.agent(name)
                for _ in range(2):
                    await agent.chat("on>")

    assert outcome_of(play_scripted(Two(max_turns=2), TASK, lambda prompt: "four")) == OK
    a, b = play_scripted(Two(max_episode_tokens=12), TASK, lambda prompt: "four").trajectories
    assert (len(a.turns), len(b.turns), a.outcome, b.outcome) == (2, 1, TRUNCATED, TRUNCATED)


def test_a_workflow_may_go_on_after_a_budget_is_spent():
    class Kept(Workflow):
        async def run(self, session: Session) -> None:
            agent, judge = session.agent("policy"), session.agent("judge")
            await agent.chat("on>")
            with pytest.raises(BudgetSpent, match=r"policy had its 1 turns \(max_turns\)"):
                await agent.chat("on>")
            await judge.chat("well?")

    agent, judge = play_scripted(Kept(max_turns=1), TASK, ScriptedPolicy()).trajectories
    assert (agent.outcome, judge.outcome, len(judge.turns)) == (TRUNCATED, OK, 1)


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_fails_its_trajectory(value: float):
    class GroupScores(Workflow):
        async def run(self, session: Session) -> None:
            lead, helper = session.agent("lead"), session.agent("helper")
            session.reward(1.0)
            session.reward(value, helper)
            await lead.chat("go")

    lead, helper = play_scripted(GroupScores(), TASK, ScriptedPolicy()).trajectories
    assert lead.outcome == OK
    assert helper.outcome == failed(f"the workflow gave agent 'helper' the reward {value}")


@pytest.mark.parametrize("speaks_before", [True, False])
def test_a_lost_environment_fails_only_its_episode(speaks_before: bool):
    class Gone(Workflow):
        async def run(self, session: Session) -> None:
            if speaks_before:
                await session.agent("policy").chat("go")
            raise ToolError("the server is gone")

    assert outcome_of(play_scripted(Gone(), TASK, ScriptedPolicy())) == failed("the server is gone")


def test_a_dead_worker_is_not_reported_as_a_workflow_bug():
    class Dies(Workflow):
        async def run(self, session: Session) -> None:
            session.agent("policy")
            raise WorkerDied("rollout-0", "sampling", "gone")

    with pytest.raises(WorkerDied):
        play_scripted(Dies(), TASK, ScriptedPolicy())


class Broken(Workflow):
    """A subagent of it has a bug."""

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat(session.task.prompt)
        await session.gather(self._delegate(session, 0), self._delegate(session, 1))

    async def _delegate(self, session: Session, number: int) -> int:
        said = await session.agent("helper").chat("help " + "x" * 2000)
        return int(said) // number


def test_a_bug_report_has_the_source_lines_and_the_transcript():
    session = Broken().session(TASK, {"policy": ScriptedPolicy(lambda prompt: "7")}, 1, 0, {})
    with pytest.raises(WorkflowError) as raised:
        asyncio.run(play(Broken(), session, "rollout-0"))
    assert (raised.value.worker, raised.value.phase) == ("rollout-0", "running Broken on task t")
    report = raised.value.detail
    first, line, code, *_ = report.splitlines()
    assert first == "ZeroDivisionError: integer division or modulo by zero"
    assert line == f'  File "{__file__}", line {Broken._delegate.__code__.co_firstlineno + 2}, in _delegate'
    assert code.strip() == "return int(said) // number"
    assert "what was said:\n[lead] user: 2+3?\n[lead] assistant: 7\n[helper#1] user: help xxx" in report
    assert "(2005 characters)" in report
    assert len(report) < 6000


@dataclass(frozen=True, kw_only=True)
class Raises(Workflow):
    """Raises before its first reply or after it."""

    error: BaseException
    is_late: bool

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        if self.is_late:
            await agent.chat(session.task.prompt)
        raise self.error


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), DataError("the template takes no 'tool'"), SystemExit("no")],
    ids=["code", "template", "exit"],
)
def test_errors_after_a_reply_fail_the_episode(error: BaseException):
    late, early = (Raises(error=error, is_late=is_late) for is_late in (True, False))
    (trajectory,) = played_or_failed(late).trajectories
    assert trajectory.outcome.is_failed and trajectory.turns[0].text == "ok"
    assert str(error) in trajectory.outcome.reason
    with pytest.raises((WorkflowError, DataError), match=str(error)):
        played_or_failed(early)


@pytest.mark.parametrize("error", [WorkerDied("rollout-0", "sampling", "gone"), ConfigError("agents: no policy")])
def test_failures_of_the_run_are_raised_after_a_reply(error: Exception):
    with pytest.raises(type(error)):
        played_or_failed(Raises(error=error, is_late=True))


def played_or_failed(workflow: Workflow) -> Episode:
    session = workflow.session(TASK, {"policy": ScriptedPolicy()}, 1, 0, {})
    return asyncio.run(play_or_fail(workflow, session, "rollout-0"))
