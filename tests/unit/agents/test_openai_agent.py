"""The workflow `openai_agent`: a function or a program with an OpenAI client, played by a scripted policy."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from rlsys.agents.agent import Policy
from rlsys.agents.workflow import play_or_fail
from rlsys.errors import ConfigError, DataError, TaskTooLong, WorkerDied
from rlsys.testing import ScriptedPolicy, play_scripted
from rlsys.types import POLICY, Distribution, Message, Task, Trajectory, Turn
from rlsys.workflows.openai_agent import OpenAIAgent
from tests.by_day import first_by_day
from tests.gateways import FailingPolicy, PickyPolicy
from tests.openai_agents import PROGRAM
from tests.processes import Holders, stray
from tests.stray_processes import WAYS

pytestmark = pytest.mark.slow

TASK = Task(id="sum", prompt="2+3?", answer="five")
ASKS = (sys.executable, "-I", "-S", "-c", PROGRAM, "{model}")


def agent(name: str, *, deadline_s: float = 20, max_turns: int = 64) -> OpenAIAgent:
    return OpenAIAgent(agent=f"tests.openai_agents:{name}", deadline_s=deadline_s, max_turns=max_turns)


def said_by(workflow: OpenAIAgent, reply: Callable[[str], str] | Policy = lambda prompt: "five") -> Trajectory:
    (trajectory,) = play_scripted(workflow, TASK, reply).trajectories
    return trajectory


# ------------------------------------------------------------------------------------------------------------ functions


def test_a_function_says_what_its_episode_is_worth():
    right, wrong = (said_by(agent("rewarded"), lambda prompt, said=said: said) for said in ("five", "six"))
    assert (right.reward, wrong.reward) == (1.0, 0.0) and right.turns[0].text == "five"


def test_a_function_returning_text_or_nothing_sets_no_reward():
    assert [said_by(agent(name)).reward for name in ("in_words", "two_turns")] == [None, None]


def test_a_function_whose_conversation_goes_on_is_one_agent():
    assert [turn.text for turn in said_by(agent("two_turns")).turns] == ["five", "five"]


def test_an_agent_that_never_called_has_failed():
    trajectory = said_by(agent("silent"))
    assert trajectory.outcome.is_failed and "no request of it got a reply" in trajectory.outcome.reason


def test_an_agent_that_does_not_end_has_failed():
    trajectory = said_by(agent("endless", deadline_s=0.3))
    assert trajectory.outcome.is_failed and "longer than 0.3 s" in trajectory.outcome.reason


@pytest.mark.slow
def test_an_agent_that_ignores_cancellation_has_failed():
    trajectory = said_by(agent("deaf", deadline_s=0.3))
    assert trajectory.outcome.is_failed and "longer than 0.3 s" in trajectory.outcome.reason


def test_who_never_spoke_is_no_part_of_the_episode():
    trajectory = said_by(agent("hasty"), PickyPolicy(lambda prompt: "five"))
    assert (trajectory.outcome.kind, trajectory.reward, trajectory.parent) == ("ok", 1.0, None)
    assert text_of(trajectory.turns[0]) == "<user>fast\n<assistant>"


def test_the_last_reply_is_scored_with_tools_or_without():
    episode = play_scripted(agent("concluding"), TASK, lambda prompt: "found\n")
    root, aside = episode.trajectories
    assert [len(t.turns) for t in (root, aside)] == [2, 1] and "conclude" in text_of(root.turns[-1])
    assert (root.parent, aside.parent) == (None, 0)


def test_the_last_reply_is_scored_whichever_conversation_it_ends():
    episode = play_scripted(agent("summing_up"), TASK, lambda prompt: "five")
    assert "sum up: five" in text_of(episode.trajectories[0].turns[-1])
    assert [(t.parent, len(t.turns)) for t in episode.trajectories] == [(None, 1), (0, 2), (1, 1)]


@pytest.mark.parametrize("name", ["refused_beside_a_reply", "refused_in_a_group"])
def test_a_refusal_raised_by_the_agent_truncates_the_episode(name: str):
    episode = play_scripted(agent(name), TASK, PickyPolicy(lambda prompt: "five"))
    assert episode.trajectories[0].outcome.kind == "truncated"


def test_a_bug_after_a_handled_refusal_is_raised():
    with pytest.raises(ZeroDivisionError):
        said_by(agent("buggy_after_a_refusal"), PickyPolicy(lambda prompt: "five"))


def test_later_messages_refused_by_the_template_fail_the_episode():
    trajectory = said_by(agent("led_astray"), PickyPolicy(lambda prompt: "five"))
    assert trajectory.outcome.is_failed and "takes no 'odd'" in trajectory.outcome.reason


def test_opening_messages_refused_by_the_template_raise_at_their_line():
    with pytest.raises(openai.BadRequestError, match="takes no 'odd'") as error:
        said_by(agent("odd_from_the_start"), PickyPolicy(lambda prompt: "five"))
    assert any(entry.name == "odd_from_the_start" for entry in error.traceback)


def test_an_agent_that_ends_on_a_refused_turn_is_truncated():
    trajectory = said_by(agent("stubborn", max_turns=3))
    assert (len(trajectory.turns), trajectory.outcome.kind) == (3, "truncated")


def test_a_first_prompt_that_is_too_long_is_the_tasks():
    with pytest.raises(TaskTooLong):
        said_by(agent("careless"), FailingPolicy(error=TaskTooLong("rollout-0", "encoding a prompt", "too long")))


def test_worker_failures_are_raised_even_when_the_agent_catches_them():
    with pytest.raises(WorkerDied):
        said_by(agent("careless"), FailingPolicy(error=WorkerDied("rollout-0", "sampling", "gone")))


def test_a_bug_is_raised_at_its_line():
    with pytest.raises(ZeroDivisionError) as error:
        said_by(agent("buggy"))
    assert str(error.traceback[-1].path).endswith("openai_agents.py")


@pytest.mark.parametrize(
    ("name", "num_turns", "reason"),
    [
        ("gives_up", 2, "MaxTurnsExceeded: Max turns (2) exceeded"),
        ("exits", 1, "the agent called sys.exit('cannot go on')"),
    ],
)
def test_a_framework_that_gives_up_fails_its_episode(name: str, num_turns: int, reason: str):
    workflow = agent(name)
    session = workflow.session(TASK, {POLICY: ScriptedPolicy()}, 1, 0, {})
    (trajectory,) = asyncio.run(play_or_fail(workflow, session, "rollout-0")).trajectories
    assert trajectory.outcome.is_failed and trajectory.reward is None and len(trajectory.turns) == num_turns
    assert reason in trajectory.outcome.reason and f"in {name}" in trajectory.outcome.reason


def test_what_is_no_reward_is_refused():
    with pytest.raises(TypeError, match=r"returned the list \['five'\]; give a number, text or None"):
        said_by(agent("odd"))


# ------------------------------------------------------------------------------------------------------------- programs


def test_a_program_is_trained_as_it_is():
    trajectory = said_by(OpenAIAgent(command=ASKS))
    assert (trajectory.outcome.kind, trajectory.reward) == ("ok", None)
    assert "".join(map(chr, trajectory.turns[0].prompt_ids)) == "<user>2+3?\n<assistant>"


def test_a_program_that_fails_has_no_reward_but_a_reason():
    trajectory = said_by(OpenAIAgent(command=ASKS), lambda prompt: "no")
    assert trajectory.outcome.is_failed and trajectory.reward is None
    assert "exit code 1" in trajectory.outcome.reason and "cannot use 'no'" in trajectory.outcome.reason


@pytest.mark.parametrize("way", WAYS)
def test_what_a_program_leaves_behind_ends_with_the_episode(tmp_path: Path, way: str):
    with closing(Holders(tmp_path)) as holders:
        said_by(OpenAIAgent(command=stray(way, holders.pipe)))
        assert holders.are_gone()


@pytest.mark.parametrize("way", first_by_day(WAYS))
def test_what_a_late_program_started_ends_with_it(tmp_path: Path, way: str):
    with closing(Holders(tmp_path)) as holders:
        trajectory = said_by(OpenAIAgent(command=stray(way, holders.pipe, "hang"), deadline_s=1.5))
        assert "longer than 1.5 s" in trajectory.outcome.reason and holders.are_gone()


@pytest.mark.parametrize("way", first_by_day(WAYS))
def test_what_a_program_started_ends_though_it_kills_its_launcher(tmp_path: Path, way: str):
    with closing(Holders(tmp_path)) as holders:
        trajectory = said_by(OpenAIAgent(command=stray(way, holders.pipe, "orphan")))
        assert "exit code -9" in trajectory.outcome.reason and holders.are_gone()


def test_the_prompt_is_also_an_argument():
    program = 'test "$1" = "2+3?"'
    trajectory = said_by(OpenAIAgent(command=("sh", "-c", program, "sh", "{prompt}")))
    assert "no request of it got a reply" in trajectory.outcome.reason  # it ended well, and never called


def test_a_prompt_of_messages_is_its_input_as_json():
    program = 'import json, sys; sys.exit(0 if json.load(sys.stdin) == [{"role": "user", "content": "hi"}] else 3)'
    task = Task(id="hi", prompt=(Message(role="user", content="hi"),))
    workflow = OpenAIAgent(command=(sys.executable, "-I", "-S", "-c", program))
    (trajectory,) = play_scripted(workflow, task, lambda prompt: "").trajectories
    assert "exit code" not in trajectory.outcome.reason


def test_programs_run_concurrently_up_to_the_limit(tmp_path: Path):
    note = tmp_path / "log"
    workflow = OpenAIAgent(command=("sh", "-c", f"echo in >> {note}; sleep 0.05; echo out >> {note}"), max_processes=1)

    async def main() -> None:
        policies = {POLICY: ScriptedPolicy()}
        await asyncio.gather(*(workflow.play(workflow.session(TASK, policies, 1, e, {})) for e in range(3)))

    asyncio.run(main())
    assert note.read_text().split() == ["in", "out"] * 3


def test_a_program_reaches_its_endpoint_whatever_proxy_is_set():
    program = 'case "$NO_PROXY" in *127.0.0.1) exit 0;; esac; exit 3'
    assert "exit code" not in said_by(OpenAIAgent(command=("sh", "-c", program))).outcome.reason


def test_a_program_does_not_inherit_the_ray_cluster_token():
    assert os.environ["RAY_AUTH_TOKEN"], "the tests have one"
    program = 'test -z "$RAY_AUTH_TOKEN"'
    assert "exit code" not in said_by(OpenAIAgent(command=("sh", "-c", program))).outcome.reason


@pytest.mark.parametrize("way", first_by_day(WAYS))
def test_what_a_program_started_ends_with_the_replica(tmp_path: Path, way: str):
    with closing(Holders(tmp_path)) as holders:
        command = [*stray(way, holders.pipe, "hang")]
        code = f"asyncio.run(run_program({command}, env={{}}, stdin=''))"
        imports = "import asyncio; from rlsys.sandbox.programs import run_program; "
        with subprocess.Popen([sys.executable, "-c", imports + code]) as replica:
            assert holders.have_started()
            replica.kill()
        assert holders.are_gone()


def test_a_prompt_that_cannot_be_an_argument_is_named_before_the_run():
    tasks = [Task(id="good", prompt="2+3?"), Task(id="bad", prompt="2\0+3?")]
    rules: dict[str, Any] = {"group_size": 1, "distribution": Distribution()}
    with pytest.raises(DataError, match=r"command: the prompt of task bad contains a NUL"):
        OpenAIAgent(command=(sys.executable, "solve.py", "{prompt}")).check(tasks, **rules)
    OpenAIAgent(command=(sys.executable, "solve.py")).check(tasks, **rules)  # it reads stdin


def test_a_program_that_cannot_be_started_says_why(tmp_path: Path):
    program = tmp_path / "program"
    program.touch()
    assert f"cannot start {program}: Permission denied" in said_by(OpenAIAgent(command=(str(program),))).outcome.reason


def test_a_program_that_a_signal_ends_says_which():
    assert "exit code 137" in said_by(OpenAIAgent(command=("sh", "-c", "kill -9 $$"))).outcome.reason


def test_a_program_that_stops_for_a_while_is_waited_for():
    program = "(sleep 0.1; kill -CONT $$) & kill -STOP $$; exit 3"
    assert "exit code 3;" in said_by(OpenAIAgent(command=("sh", "-c", program))).outcome.reason


def test_a_prompt_too_long_for_an_argument_fails_the_episode():
    task = Task(id="long", prompt="x" * 200_000)
    (trajectory,) = play_scripted(OpenAIAgent(command=("true", "{prompt}")), task, lambda prompt: "").trajectories
    assert trajectory.outcome.is_failed and "cannot start true: Argument list too long" in trajectory.outcome.reason


def text_of(turn: Turn) -> str:
    return "".join(map(chr, turn.prompt_ids))


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nobody", "has no 'nobody'"),
        ("not_async", "is not an async function"),
        ("asks_too_much", "asks for temperature"),
    ],
)
def test_an_unusable_agent_function_is_refused_in_the_configuration(name: str, problem: str):
    from rlsys.config.plugins import WORKFLOWS

    with pytest.raises(ValueError, match=problem):
        WORKFLOWS.read({"type": "openai_agent", "agent": f"tests.openai_agents:{name}"})


def test_it_is_a_function_or_a_program():
    cases: list[dict[str, Any]] = [{}, {"agent": "tests.openai_agents:silent", "command": ("true",)}]
    for wrong in cases:
        with pytest.raises(ValueError, match="give either `agent`, an async function, or `command`, a program"):
            OpenAIAgent(**wrong)


def test_a_missing_program_is_found_before_the_run_starts():
    with pytest.raises(ConfigError, match=r"no program 'no-such-program'"):
        OpenAIAgent(command=("no-such-program",)).check([TASK], group_size=2, distribution=Distribution())
    OpenAIAgent(command=("python", "agent.py")).check([TASK], group_size=2, distribution=Distribution())
