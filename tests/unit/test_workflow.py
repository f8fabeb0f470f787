"""Workflows: an author speaks text, and every token, seed and reward is recorded for them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from rlsys.batch.samples import samples_of
from rlsys.errors import ConfigError
from rlsys.testing import ScriptedPolicy
from rlsys.types import OK, TRUNCATED, Episode, Task, failed
from rlsys.workflow import Session, SingleTurn, Workflow, load_workflow

TASK = Task(id="t", prompt="2+3?", answer="5")


def played(workflow: Workflow, policy: ScriptedPolicy, *, episode: int = 0, seed: int = 1) -> Episode:
    session = Session(TASK, policy, seed, episode)
    asyncio.run(workflow.run(session))
    return session.episode()


class Chat(Workflow):
    """One agent that says `prompts` one after the other."""

    def __init__(self, *prompts: str | tuple, system: str | None = None) -> None:
        self.prompts, self.system = prompts, system

    async def run(self, session: Session) -> None:
        agent = session.agent("solver", system=self.system)
        for prompt in self.prompts:
            await agent.chat(prompt)


class LeadAndHelpers(Workflow):
    """A lead asks two helpers at once; one of them asks a helper of its own."""

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat(session.task.prompt)
        helpers = [session.agent("helper", parent=lead) for _ in range(2)]
        await asyncio.gather(*(h.chat("help") for h in helpers))
        await session.agent("clerk", parent=helpers[1]).chat("note")
        session.reward(1.0)
        session.reward(0.25, helpers[0])


def user(text: str) -> tuple:
    return ({"role": "user", "content": text},)


def test_a_text_prompt_is_fed_as_it_is():
    policy = ScriptedPolicy(lambda prompt: "5")
    (trajectory,) = played(SingleTurn(), policy).trajectories
    (turn,) = trajectory.turns
    assert policy.asked[0][0] == "2+3?"
    assert (trajectory.agent, trajectory.outcome, trajectory.reward, trajectory.parent) == ("policy", OK, None, None)
    assert (turn.prompt_ids, turn.text) == (tuple(map(ord, "2+3?")), "5")


def test_more_text_goes_on_after_the_reply():
    policy = ScriptedPolicy(lambda prompt: "5")
    played(Chat("2+3=", ", 1+1="), policy)
    assert [prompt for prompt, _ in policy.asked] == ["2+3=", "2+3=5, 1+1="]


def test_messages_are_a_conversation_of_which_no_token_is_read_twice():
    policy = ScriptedPolicy(lambda prompt: f"reply {prompt.count('<user>')}")
    (trajectory,) = played(Chat(user("a"), "b", user("c")), policy).trajectories
    assert policy.asked[-1][0].splitlines() == [
        "<user>a", "<assistant>reply 1", "<user>b", "<assistant>reply 2", "<user>c", "<assistant>",
    ]  # fmt: skip
    for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids + before.output_ids)] == before.prompt_ids + before.output_ids
    (sample,) = samples_of(trajectory)
    assert sum(sample.is_trained) == 3 * len("reply 1")


def test_a_system_message_opens_the_conversation_even_before_a_text():
    policy = ScriptedPolicy()
    played(Chat("hello", system="Be brief."), policy)
    assert policy.asked[0][0] == "<system>Be brief.\n<user>hello\n<assistant>"


def test_plain_text_cannot_turn_into_a_conversation():
    with pytest.raises(ValueError, match="'solver' began with plain text and cannot go on with messages"):
        played(Chat("2+3=", user("and?")), ScriptedPolicy())


def seeds(workflow: Workflow, *, episode: int = 0, seed: int = 1) -> list[int]:
    policy = ScriptedPolicy()
    played(workflow, policy, episode=episode, seed=seed)
    return [seed for _, seed in policy.asked]


@pytest.mark.parametrize("make", [lambda: Chat("a", "b", "c"), LeadAndHelpers], ids=["turns", "agents"])
def test_every_call_of_every_episode_has_a_seed_of_its_own_and_always_the_same(make: Callable[[], Workflow]):
    first, second, other = seeds(make()), seeds(make(), episode=1), seeds(make(), seed=2)
    assert len({*first, *second, *other}) == len(first) * 3
    assert first == seeds(make())


def test_agents_know_who_called_them():
    trajectories = played(LeadAndHelpers(), ScriptedPolicy()).trajectories
    assert [(t.agent, t.parent) for t in trajectories] == [("lead", None), ("helper", 0), ("helper", 0), ("clerk", 2)]


def test_a_workflow_may_judge_the_episode_or_one_agent():
    trajectories = played(LeadAndHelpers(), ScriptedPolicy()).trajectories
    assert [t.reward for t in trajectories] == [1.0, 0.25, None, None]


def test_an_agent_whose_last_reply_was_cut_is_truncated():
    def reply(prompt: str) -> str:
        return "long" * 9 if prompt.endswith("talk") else "short"

    def outcome(*prompts: str):
        return played(Chat(*prompts), ScriptedPolicy(reply, max_new_tokens=8)).trajectories[0].outcome

    assert (outcome("talk"), outcome("talk", "hush"), outcome("hush", "talk")) == (TRUNCATED, OK, TRUNCATED)


class Silent(Workflow):
    async def run(self, session: Session) -> None:
        pass


def test_an_episode_in_which_nobody_speaks_is_a_bug_of_the_workflow():
    with pytest.raises(ValueError, match=r"made no agent: call session\.agent"):
        played(Silent(), ScriptedPolicy())


def test_workflows_are_found_by_name():
    assert isinstance(load_workflow("single_turn"), SingleTurn)
    assert isinstance(load_workflow("rlsys.workflow:SingleTurn"), SingleTurn)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:W", "cannot load 'no_such_module:W': No module named 'no_such_module'"),
        ("rlsys.workflow:Missing", "cannot load .* has no attribute 'Missing'"),
        ("rlsys.types:Task", "'rlsys.types:Task' is not a subclass of rlsys.workflow.Workflow"),
    ],
)
def test_what_is_not_a_workflow_is_named(spec, message):
    with pytest.raises(ConfigError, match=rf"rollout\.workflow: {message}"):
        load_workflow(spec)


def test_a_workflow_without_a_run_says_so():
    class Empty(Workflow):
        pass

    with pytest.raises(NotImplementedError, match="Empty plays nothing: implement `run`"):
        played(Empty(), ScriptedPolicy())


class Judged(Workflow):
    """A lead and a helper, of whom one is given a reward."""

    def __init__(self, lead: float | None = None, helper: float | None = None) -> None:
        self.rewards = (lead, helper)

    async def run(self, session: Session) -> None:
        agents = [session.agent("lead"), session.agent("helper")]
        for agent, reward in zip(agents, self.rewards, strict=True):
            await agent.chat("go")
            if reward is not None:
                session.reward(reward, agent)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_a_finite_number_fails_the_trajectory_it_was_given_to(value: float):
    lead, helper = played(Judged(lead=1.0, helper=value), ScriptedPolicy()).trajectories
    assert lead.outcome == OK
    assert helper.outcome == failed(f"the workflow gave agent 'helper' the reward {value}")


class Recited(Workflow):
    """A conversation whose first reply is given and whose second one is not."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.recite(user("a"), "given")
        await agent.chat("b")


def test_a_reply_that_is_given_is_recorded_like_any_other_and_the_conversation_goes_on_from_it():
    policy = ScriptedPolicy(lambda prompt: "own")
    (trajectory,) = played(Recited(), policy).trajectories
    assert [turn.text for turn in trajectory.turns] == ["given", "own"]
    assert [prompt for prompt, _ in policy.asked] == ["<user>a\n<assistant>given\n<user>b\n<assistant>"]
    (sample,) = samples_of(trajectory)
    assert sum(sample.is_trained) == len("given") + len("own")
