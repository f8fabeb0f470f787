"""Play of an environment: rewards, ends, tools, and failing environments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest

from rlsys.agents.environment import Environment, Step
from rlsys.agents.tool_calls import ToolCall
from rlsys.agents.tools import Toolbox
from rlsys.config.plugins import WORKFLOWS
from rlsys.errors import ConfigError
from rlsys.testing import ScriptedPolicy, play_scripted
from rlsys.types import TRUNCATED, Distribution, Json, Message, OutcomeKind, Prompt, Task, Trajectory
from rlsys.workflows.environment_play import EnvironmentPlay
from tests.call_texts import write_calls
from tests.worlds import Broken

GUESS = "rlsys.testing:FakeEnvironment"
TASK = Task(id="t", prompt="Guess.")


def trajectory(workflow: EnvironmentPlay, reply: Callable[[str], str], task: Task = TASK, seed: int = 1) -> Trajectory:
    (only,) = play_scripted(workflow, task, reply, seed=seed).trajectories
    return only


def counting() -> Callable[[str], str]:
    """A policy that says 1, 2, 3, ..."""
    numbers = iter(range(1, 100))
    return lambda prompt: f"{next(numbers)}\n"


def play(environment: str = GUESS, **fields: Any) -> EnvironmentPlay:
    return EnvironmentPlay(environment=environment, **fields)


def test_it_plays_until_the_environment_is_done():
    result = trajectory(play(), counting())
    assert result.reward == 1.0 and result.outcome.kind is OutcomeKind.OK
    told = "".join(map(chr, result.turns[-1].prompt_ids))
    secret = len(result.turns)
    assert told.startswith("Guess.\na number from 1 to 10" + "1\nhigher" * (secret > 1))


def test_all_episodes_of_a_group_play_the_same_world():
    lengths = {seed: len(trajectory(play(), counting(), seed=seed).turns) for seed in range(8)}
    again = {seed: len(trajectory(play(), counting(), seed=seed).turns) for seed in range(8)}
    assert lengths == again and len(set(lengths.values())) > 1


def test_in_a_conversation_the_world_speaks_as_the_user():
    task = Task(id="t", prompt=(Message(role="system", content="S"), Message(role="user", content="Guess.")))
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return "11"

    trajectory(play(max_turns=2), reply, task)
    assert asked[1] == ("<system>S\n<user>Guess.\n\na number from 1 to 10\n<assistant>11\n<user>lower\n<assistant>")


class Lookup(Environment):
    """A world with a tool, for a prompt of plain text."""

    async def reset(self, task: Task, seed: int) -> Prompt:
        self.tools = Toolbox(self.look)
        return task.prompt

    async def step(self, reply: str) -> Step:
        return Step("", is_done=True)

    async def look(self) -> str:
        """Look around."""
        return "a door"


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_of_an_environment_are_offered_with_plain_text_prompts(system: str | None):
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return "a door" if "<tool>a door" in prompt else write_calls([ToolCall("look", {}, "")])

    trajectory(play(f"{__name__}:Lookup", system=system), reply)
    assert len(asked) == 2 and asked[0].startswith("<tools># Tools") and '"look"' in asked[0]


def test_a_system_message_of_the_run_comes_first():
    asked: list[str] = []
    trajectory(play(system="Be brief.", max_turns=1), lambda prompt: asked.append(prompt) or "1")
    assert asked[0].startswith("<system>Be brief.\n<user>Guess.\n")


def test_running_out_of_turns_without_rewards_gives_zero():
    result = trajectory(play(f"{__name__}:Steps", args={"rewards": [None, None]}, max_turns=1), lambda prompt: "x")
    assert (result.outcome, result.reward) == (TRUNCATED, 0.0)


@pytest.mark.parametrize("max_turns", [3, 64])
def test_truncated_episodes_keep_their_reward(max_turns: int):
    result = trajectory(play(args={"tries": 5}, max_turns=max_turns), lambda prompt: "no idea")
    assert (result.outcome, result.reward) == (TRUNCATED, 0.0)
    assert len(result.turns) == min(5, max_turns)


class Steps(Environment):
    """Gives these rewards, one a step."""

    def __init__(self, *, rewards: list[float | None]) -> None:
        self.rewards = rewards

    async def reset(self, task: Task, seed: int) -> Prompt:
        return task.prompt

    async def step(self, reply: str) -> Step:
        reward, *self.rewards = self.rewards
        return Step("on", reward=reward, is_done=not self.rewards)


@pytest.mark.parametrize(
    ("reward", "rewards", "total"),
    [
        ("sum", [1.0, None, 0.5], 1.5),
        ("last", [1.0, None, 0.5], 0.5),
        ("last", [1.0, None], 1.0),
        ("sum", [0.0, None], 0.0),
        ("sum", [None, None], None),
        ("last", [None, None], None),
        ("task", [1.0, 0.5], None),
    ],
)
def test_rewards_are_summed_taken_last_or_left_to_the_task(reward: str, rewards: list[Json], total: float | None):
    result = trajectory(play(f"{__name__}:Steps", args={"rewards": rewards}, reward=reward), lambda prompt: "x")
    assert result.reward == total


def test_it_is_a_section_of_a_configuration():
    section = {
        "type": "rlsys.workflows.environment_play:EnvironmentPlay",
        "environment": GUESS,
        "args": {"most": 3},
        "reward": "last",
    }
    assert WORKFLOWS.read(section) == play(args={"most": 3}, reward="last")


# --------------------------------------------------------------------------------------------------------- what breaks


@pytest.mark.parametrize(
    ("what", "how", "reason"),
    [
        ("reset", "raise", "environment 'tests.worlds:Broken': reset raised ZeroDivisionError: by zero ("),
        ("step", "raise", "environment 'tests.worlds:Broken': step raised ZeroDivisionError: by zero ("),
        ("close", "raise", "environment 'tests.worlds:Broken': close raised ZeroDivisionError: by zero ("),
        ("reset", "hang", "environment 'tests.worlds:Broken': reset took longer than its 0.05 s (step_timeout_s)"),
        ("step", "hang", "environment 'tests.worlds:Broken': step took longer than its 0.05 s (step_timeout_s)"),
        ("close", "hang", "environment 'tests.worlds:Broken': close took longer than its 0.05 s (step_timeout_s)"),
        ("reward", "nan", "environment 'tests.worlds:Broken': step gave the reward nan"),
    ],
)
def test_an_environment_that_breaks_fails_the_episode_and_is_closed(what: str, how: str, reason: str):
    Broken.closed.clear()
    workflow = play("tests.worlds:Broken", args={"what": what, "how": how}, step_timeout_s=0.05)
    result = trajectory(workflow, lambda prompt: "x")
    assert result.outcome.is_failed and result.outcome.reason.startswith(reason)
    assert Broken.closed == [what]
    if how == "raise":
        assert "worlds.py:" in result.outcome.reason


def test_a_cancelled_episode_closes_its_environment():
    Broken.closed.clear()
    workflow = play("tests.worlds:Broken", args={"what": "step", "how": "hang"})

    async def script() -> None:
        session = workflow.session(TASK, {"policy": ScriptedPolicy()}, 1, 0, {})
        episode = asyncio.create_task(workflow.play(session))
        while not session.agents or not session.agents[0].turns:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0)
        episode.cancel()
        await asyncio.wait([episode])
        assert episode.cancelled()

    asyncio.run(script())
    assert Broken.closed == ["step"]


def test_the_timeline_of_an_episode_has_turns_and_steps_in_order():
    episode = play_scripted(play(), TASK, counting(), seed=1)
    (trajectory,) = episode.trajectories
    turns, steps = ["turn"] * len(trajectory.turns), ["step"] * len(trajectory.turns)
    expected = ["reset", *chain.from_iterable(zip(turns, steps, strict=True)), "close"]
    assert [span.name or span.kind for span in episode.spans] == expected
    assert all(a.start_s + a.seconds <= b.start_s + 2e-6 for a, b in pairwise(episode.spans))
    assert episode.seconds is not None and 0 < episode.seconds < time.time() - episode.began_s + 1


def test_a_step_that_hangs_is_in_the_timeline():
    workflow = play("tests.worlds:Broken", args={"what": "step", "how": "hang"}, step_timeout_s=0.05)
    episode = play_scripted(workflow, TASK, lambda prompt: "x")
    (step,) = [span for span in episode.spans if span.name == "step"]
    assert step.seconds >= 0.049


def test_what_cannot_be_made_is_said_before_anything_starts():
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        play("nowhere:World").check([TASK], group_size=8, distribution=Distribution())
    play().check([TASK], group_size=8, distribution=Distribution())


def test_a_checked_environment_is_closed_inside_an_event_loop():
    async def within() -> None:
        play("tests.worlds:Broken", args={"what": "step"}).check([TASK], group_size=8, distribution=Distribution())

    Broken.closed.clear()
    asyncio.run(within())
    assert Broken.closed == ["step"]


# --------------------------------------------------------------------------------------------------------------- tools


class Safe(Environment):
    """Opens with a number that one of its tools tells."""

    def __init__(self) -> None:
        self.number = 0

    async def reset(self, task: Task, seed: int) -> Prompt:
        self.number = 42

        def look() -> int:
            """The number."""
            return self.number

        self.tools = Toolbox(look)
        return (Message(role="user", content="Open the safe."),)

    async def step(self, reply: str) -> Step:
        return Step("", reward=float(reply == "42"), is_done=True)


def test_tools_of_the_environment_are_offered_and_called_between_replies():
    def reply(prompt: str) -> str:
        assert "The number." in prompt
        return "42" if "<tool>42" in prompt else '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

    result = trajectory(play(f"{__name__}:Safe"), reply)
    assert (result.reward, len(result.turns)) == (1.0, 2)
