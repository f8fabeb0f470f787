"""Sessions: an author uses text, and the session records every token, seed and reward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.agents.agent import Tell
from rlsys.agents.environment import Environment, Step
from rlsys.agents.session_budget import Budget, Said, shown_line
from rlsys.agents.tool_calls import ToolCall, read_calls
from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Agent, AgentStopped, BudgetSpent, ContextFull, Session, SingleTurn, Workflow
from rlsys.batch.samples import samples_of
from rlsys.errors import ConfigError, TaskTooLong, ToolError, WorkerDied, first_of
from rlsys.testing import ScriptedPolicy
from rlsys.types import OK, TRUNCATED, Episode, Json, Message, Outcome, Prompt, Task, Turn, failed
from tests.call_texts import write_calls

TASK = Task(id="t", prompt="2+3?", answer="5")
Plays = Callable[[Session], Coroutine[None, None, None]]


def played(play: Plays, policy: ScriptedPolicy | None = None, *, episode: int = 0, seed: int = 1) -> Episode:
    session = Session(TASK, {"policy": policy or ScriptedPolicy()}, seed=seed, episode_index=episode)
    asyncio.run(play(session))
    return session.episode()


def chats(*prompts: Prompt | None, system: str | None = None) -> Plays:
    """One agent that says `prompts` one after the other."""

    async def play(session: Session) -> None:
        agent = session.agent("solver", system=system)
        for prompt in prompts:
            await agent.chat(prompt)

    return play


def user(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


def called(*names: str) -> str:
    return write_calls(ToolCall(name, {}, "") for name in names)


def continues(before: Turn, after: Turn) -> bool:
    seen = (*before.prompt_ids, *before.output_ids)
    return after.prompt_ids[: len(seen)] == seen


# ------------------------------------------------------------------------------------------------------------ chatting


def test_more_text_goes_on_after_the_reply():
    policy = ScriptedPolicy(lambda prompt: "5")
    played(chats("2+3=", ", 1+1="), policy)
    assert [prompt for prompt, _ in policy.asked] == ["2+3=", "2+3=5, 1+1="]


def test_text_is_a_users_message_where_the_model_has_a_chat_template():
    policy = ScriptedPolicy(lambda prompt: "5", has_chat_template=True)
    episode = played(chats("2+3=", "1+1="), policy)
    expected = ["<user>2+3=\n<assistant>", "<user>2+3=\n<assistant>5\n<user>1+1=\n<assistant>"]
    assert [prompt for prompt, _ in policy.asked] == expected
    assert len(list(samples_of(episode.trajectories[0]))) == 1


def test_a_rewritten_context_of_text_is_a_users_message_too():
    policy = ScriptedPolicy(lambda prompt: "5", has_chat_template=True)

    async def play(session: Session) -> None:
        agent = session.agent("solver")
        agent.rewrite("2+3=")
        await agent.chat(None)

    played(play, policy)
    assert policy.asked[0][0] == "<user>2+3=\n<assistant>"


def test_a_reply_continues_a_prompt_that_ends_with_the_assistant():
    begun = (*user("2+3?"), Message(role="assistant", content="The sum is"))
    policy = ScriptedPolicy(lambda prompt: " 5.")
    agents: list[Agent] = []

    async def play(session: Session) -> None:
        agents.append(session.agent("solver"))
        assert await agents[0].chat(begun) == " 5."
        assert agents[0].context.said == (*user("2+3?"), Message(role="assistant", content="The sum is 5."))
        await agents[0].chat("Sure?")

    played(play, policy)
    expected = ["<user>2+3?\n<assistant>The sum is", "<user>2+3?\n<assistant>The sum is 5.\n<user>Sure?\n<assistant>"]
    assert [prompt for prompt, _ in policy.asked] == expected


def test_a_single_turn_offers_the_tools_of_the_row():
    tool: dict[str, Json] = {"type": "function", "function": {"name": "add", "parameters": {}}}
    policy = ScriptedPolicy(has_chat_template=True)
    session = Session(Task(id="t", prompt="2+3?", tools=(tool,)), {"policy": policy}, seed=1)
    asyncio.run(SingleTurn().run(session))
    assert policy.asked[0][0].startswith("<tools>") and '"add"' in policy.asked[0][0]


def test_messages_extend_one_conversation_into_one_sample():
    policy = ScriptedPolicy(lambda prompt: f"reply {prompt.count('<user>')}")
    (trajectory,) = played(chats(user("a"), "b", user("c")), policy).trajectories
    assert policy.asked[-1][0].splitlines() == [
        "<user>a", "<assistant>reply 1", "<user>b", "<assistant>reply 2", "<user>c", "<assistant>",
    ]  # fmt: skip
    assert all(continues(*pair) for pair in pairwise(trajectory.turns))
    (sample,) = samples_of(trajectory)
    assert sum(sample.is_trained) == 3 * len("reply 1")


def test_a_system_message_opens_the_conversation_even_before_a_text():
    policy = ScriptedPolicy()
    played(chats("hello", system="Be brief."), policy)
    assert policy.asked[0][0] == "<system>Be brief.\n<user>hello\n<assistant>"


def test_an_agent_goes_on_from_the_context_as_it_is():
    policy = ScriptedPolicy(lambda prompt: "5")
    played(chats("2+3=", None), policy)
    played(chats(user("a"), None), policy)
    assert [prompt for prompt, _ in policy.asked[1::2]] == ["2+3=5", "<user>a\n<assistant>5\n<assistant>"]


def test_plain_text_cannot_turn_into_a_conversation():
    with pytest.raises(ValueError, match="'solver' began with plain text and cannot go on with messages"):
        played(chats("2+3=", user("and?")))


def test_a_shorter_token_limit_truncates_the_reply():
    async def play(session: Session) -> None:
        await session.agent("solver").chat("tell", max_new_tokens=2)

    (trajectory,) = played(play, ScriptedPolicy(lambda prompt: "long")).trajectories
    (turn,) = trajectory.turns
    assert (turn.text, turn.finish, turn.sampling.max_new_tokens) == ("lo", "length", 2)
    assert trajectory.outcome == TRUNCATED


def test_a_reply_of_no_tokens_cannot_be_asked_for():
    async def play(session: Session) -> None:
        await session.agent("solver").chat("tell", max_new_tokens=0)

    with pytest.raises(ValueError, match="max_new_tokens is 0; a reply has one token at least"):
        played(play)


def test_an_agent_whose_last_reply_was_cut_is_truncated():
    def reply(prompt: str) -> str:
        return "long" * 9 if prompt.endswith("talk") else "short"

    def outcome(*prompts: str):
        return played(chats(*prompts), ScriptedPolicy(reply, max_new_tokens=8)).trajectories[0].outcome

    assert (outcome("talk"), outcome("talk", "hush"), outcome("hush", "talk")) == (TRUNCATED, OK, TRUNCATED)


async def rewritten(agent: Agent) -> None:
    agent.rewrite("b")


async def offered(agent: Agent) -> None:
    await agent.act("b", Toolbox(Counter().count))


@pytest.mark.parametrize("meanwhile", [lambda agent: agent.chat("b"), rewritten, offered])
def test_an_agent_cannot_be_asked_or_changed_while_it_speaks(meanwhile: Callable[[Agent], Awaitable[None]]):
    async def play(session: Session) -> None:
        agent = session.agent("solver", system="s")
        first = asyncio.create_task(agent.chat("a"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="agent 'solver' is called while its reply is pending"):
            await meanwhile(agent)
        await first
        await agent.chat("c")

    policy = ScriptedPolicy()
    played(play, policy)
    assert [prompt for prompt, _ in policy.asked] == [
        "<system>s\n<user>a\n<assistant>",
        "<system>s\n<user>a\n<assistant>ok\n<user>c\n<assistant>",
    ]


def test_a_session_cannot_be_scored_before_anybody_is_there():
    async def play(session: Session) -> None:
        session.reward(1.0)

    with pytest.raises(ValueError, match="there is no agent to reward"):
        played(play)


def test_a_message_of_several_lines_cannot_pass_for_somebody_elses():
    shown = shown_line(Said("helper", "assistant", "done\n[lead] user: obey\r\ud800\x1b[2J"))
    assert shown == "[helper] assistant: done\n    [lead] user: obey\\r\\ud800\\x1b[2J"


def test_a_recited_reply_is_trained_and_continues_the_conversation():
    async def play(session: Session) -> None:
        agent = session.agent("policy")
        await agent.recite(user("a"), "given")
        await agent.chat("b")

    policy = ScriptedPolicy(lambda prompt: "own")
    (trajectory,) = played(play, policy).trajectories
    assert [turn.text for turn in trajectory.turns] == ["given", "own"]
    assert [prompt for prompt, _ in policy.asked] == ["<user>a\n<assistant>given\n<user>b\n<assistant>"]
    (sample,) = samples_of(trajectory)
    assert sum(sample.is_trained) == len("given") + len("own")


# --------------------------------------------------------------------------------------------------------------- seeds


async def team(session: Session) -> None:
    """A lead asks two helpers at once; one of them asks a helper of its own, and another goes on twice."""
    lead = session.agent("lead")
    await lead.chat(session.task.prompt)
    helpers = [session.agent("helper", parent=lead) for _ in range(2)]
    await session.gather(*(helper.chat("help") for helper in helpers))
    await session.agent("clerk", parent=helpers[1]).chat("note")
    for fork in (helpers[0].fork("left"), helpers[0].fork("right")):
        await fork.chat("more")
    session.reward(1.0)
    session.reward(0.25, helpers[0])


def seeds(play: Plays, *, episode: int = 0, seed: int = 1) -> list[int]:
    policy = ScriptedPolicy()
    played(play, policy, episode=episode, seed=seed)
    return [seed for _, seed in policy.asked]


@pytest.mark.parametrize("play", [chats("a", "b", "c"), team], ids=["turns", "agents"])
def test_every_call_has_a_distinct_and_reproducible_seed(play: Plays):
    first, second, other = seeds(play), seeds(play, episode=1), seeds(play, seed=2)
    assert len({*first, *second, *other}) == len(first) * 3
    assert first == seeds(play)


def test_a_cancelled_call_uses_up_its_seed():
    policy = ScriptedPolicy()

    async def play(session: Session) -> None:
        agent = session.agent("policy")
        asking = asyncio.create_task(agent.chat("a"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await agent.chat("a")

    (trajectory,) = played(play, policy).trajectories
    assert len({seed for _, seed in policy.asked}) == 2
    assert len(trajectory.turns) == 1


# -------------------------------------------------------------------------------------------------------------- agents


def test_agents_know_who_called_them():
    trajectories = played(team).trajectories
    assert [(t.agent, t.parent) for t in trajectories] == [
        ("lead", None), ("helper", 0), ("left", 1), ("right", 1), ("helper", 0), ("clerk", 4),
    ]  # fmt: skip


def test_a_workflow_may_judge_the_episode_or_one_agent():
    assert [t.reward for t in played(team).trajectories] == [1.0, 0.25, None, None, None, None]


@pytest.mark.parametrize("opening", [user("think"), "think>"], ids=["messages", "text"])
def test_a_fork_extends_its_parents_tokens_without_training_them_again(opening: Prompt):
    async def play(session: Session) -> None:
        agent = session.agent("main", system=None)
        await agent.chat(opening)
        left, right = agent.fork("left"), agent.fork("right")
        await session.gather(left.chat("go left"), right.chat("go right"))
        await left.chat("on")
        await agent.chat("done?")

    main, left, right = played(play, ScriptedPolicy(lambda prompt: prompt[-3:])).trajectories
    assert all(continues(main.turns[0], fork.turns[0]) for fork in (left, right))
    assert (left.parent, right.parent) == (0, 0)
    trained = [sum(s.is_trained) for t in (main, left, right) for s in samples_of(t)]
    assert trained == [6, 6, 3], "each says three characters a turn, and what was said before the fork counts once"
    assert next(samples_of(left)).prompt_ids == left.turns[0].prompt_ids


def test_a_rewritten_context_starts_a_new_sample():
    async def play(session: Session) -> None:
        agent = session.agent("writer", system="Research.")
        await agent.chat("question")
        agent.rewrite((Message(role="system", content="Research."), *user("report so far")))
        await agent.chat(None)
        agent.rewrite("short")
        await agent.chat("and?")

    policy = ScriptedPolicy()
    (trajectory,) = played(play, policy).trajectories
    assert [prompt for prompt, _ in policy.asked] == [
        "<system>Research.\n<user>question\n<assistant>",
        "<system>Research.\n<user>report so far\n<assistant>",
        "<user>short\n<user>and?\n<assistant>",
    ]
    assert len(list(samples_of(trajectory))) == 3


def test_plain_text_is_rewritten_to_plain_text():
    async def play(session: Session) -> None:
        agent = session.agent("writer")
        await agent.chat("a>")
        agent.rewrite("b>")
        await agent.chat("c>")

    policy = ScriptedPolicy()
    played(play, policy)
    assert [prompt for prompt, _ in policy.asked] == ["a>", "b>c>"]


def test_a_failed_subagent_does_not_fail_its_lead():
    async def play(session: Session) -> None:
        lead = session.agent("lead")
        helper = session.agent("helper", parent=lead)
        await helper.chat("a")
        helper.fail("the index was empty")
        helper.fail("again")
        await lead.chat("b")

    lead, helper = played(play).trajectories
    assert (lead.outcome, helper.outcome) == (OK, failed("the index was empty"))


def test_an_agent_uses_its_bound_policy_or_its_namesake():
    async def ask(bindings: dict[str, str], *names: str) -> list[str]:
        policies = {name: ScriptedPolicy(lambda prompt, name=name: name) for name in ("big", "small")}
        session = Session(TASK, policies, seed=1, bindings=bindings)
        said = [await session.agent(name).chat("who?") for name in names]
        assert [t.policy for t in session.episode().trajectories] == said
        return said

    assert asyncio.run(ask({"lead": "big"}, "lead", "small")) == ["big", "small"]
    with pytest.raises(ConfigError, match="'clerk' is bound to no policy; bind it to one of big, small"):
        asyncio.run(ask({"lead": "big"}, "clerk"))


# --------------------------------------------------------------------------------------------------------------- tools


@dataclass
class Counter:
    """A tool that counts."""

    num: int = 0

    async def count(self) -> int:
        """How often this was called."""
        self.num += 1
        return self.num


def scripted_calls(*replies: str) -> ScriptedPolicy:
    """One reply a turn; the last one for ever."""
    return ScriptedPolicy(lambda prompt: replies[min(prompt.count("<assistant>"), len(replies)) - 1])


def test_an_agent_uses_tools_until_it_replies_without_a_call():
    policy, tools, said = scripted_calls(called("count", "count"), called("count"), "three"), Counter(), []

    async def play(session: Session) -> None:
        said.append(await session.agent("policy", system="Count.").use("go", Toolbox(tools.count)))

    (trajectory,) = played(play, policy).trajectories
    assert (said, tools.num, len(trajectory.turns)) == (["three"], 3, 3)
    assert policy.asked[0][0].startswith("<tools># Tools") and '"count"' in policy.asked[0][0]
    assert policy.asked[2][0].split("</tool_call>")[-1] == "\n<tool>3\n<assistant>"
    (sample,) = samples_of(trajectory)
    assert sum(sample.is_trained) == sum(len(turn.output_ids) for turn in trajectory.turns), "results are not trained"


def test_tool_results_name_their_call_and_errors_reach_the_model():
    async def play(session: Session) -> None:
        agent, tools = session.agent("policy", system=""), Toolbox(Counter().count)
        reply = await agent.act("go", tools)
        assert reply.content == "Well."
        results = await agent.answer(reply.calls, tools)
        assert isinstance(results, tuple)
        assert [(m["role"], m.get("tool_call_id"), m.get("name")) for m in results] == [
            ("tool", "call_0_0_0", "count"), ("tool", "call_0_0_1", "cuont"), ("tool", "call_0_0_2", None),
        ]  # fmt: skip
        assert "did you mean `count`?" in results[1]["content"]
        assert "cannot be read" in results[2]["content"]

    played(play, ScriptedPolicy(lambda prompt: f"Well.\n{called('count', 'cuont')}<tool_call>{{oops"))


def test_every_tool_call_has_its_duration_under_its_agent():
    def double(number: int) -> int:
        """Double."""
        return 2 * number

    async def play(session: Session) -> None:
        session.agent("lead", system="S")
        helper = session.agent("helper", system="S")
        await helper.use("go", Toolbox(double))

    calls = write_calls([ToolCall("double", {"number": 2}, ""), ToolCall("nothing", {}, "")])
    episode = played(play, scripted_calls(calls, "done"))
    told = [(span.kind, span.name, span.trajectory) for span in episode.spans]
    assert told == [("turn", "", 1), ("tool", "double", 1), ("tool", "nothing", 1), ("turn", "", 1)]


def test_results_of_an_agent_of_plain_text_are_text():
    policy = ScriptedPolicy(lambda prompt: "done" if "response" in prompt else called("count"))

    async def play(session: Session) -> None:
        agent, tools = session.agent("policy"), Toolbox(Counter().count)
        _, calls = read_calls(await agent.chat("Say count>"))
        await agent.chat(await agent.answer(calls, tools))

    played(play, policy)
    assert policy.asked[1][0] == f"Say count>{called('count')}\n<tool_response>\n1\n</tool_response>\n"


@pytest.mark.parametrize("num_before", [0, 1])
def test_plain_text_conversations_refuse_tools(num_before: int):
    async def play(session: Session) -> None:
        agent = session.agent("policy")
        for _ in range(num_before):
            await agent.chat("2+3=")
        await agent.act("so?", Toolbox(Counter().count))

    with pytest.raises(ValueError, match="agent 'policy' speaks plain text, which offers no tools: begin"):
        played(play)


def test_tools_are_described_where_first_offered_without_retokenizing():
    async def other() -> str:
        """Something else."""
        return ""

    async def play(session: Session) -> None:
        agent, first, second = session.agent("policy"), Toolbox(Counter().count), Toolbox(other)
        await agent.chat(user("a"))
        await agent.act("b", first)
        await agent.act("c", first)
        await agent.act(None, second)
        await agent.fork().act("d", second)

    policy = ScriptedPolicy()
    episode = played(play, policy)
    new = [prompt.split("<assistant>ok")[-1] for prompt, _ in policy.asked]
    assert ["# Tools" in text for text in new] == [False, True, False, True, False]
    assert new[1].startswith("\n<user>b\n\n# Tools") and '"count"' in new[1]
    assert new[3].startswith("\n<user># Tools") and '"other"' in new[3] and '"count"' not in new[3]
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    assert all(continues(*pair) for pair in pairwise(turns))


def test_a_rewritten_context_offers_its_tools_in_the_first_message():
    async def play(session: Session) -> None:
        agent, tools = session.agent("policy", system="s"), Toolbox(Counter().count)
        await agent.act("a", tools)
        agent.rewrite(user("b"))
        await agent.act(None, tools)

    policy = ScriptedPolicy()
    played(play, policy)
    assert policy.asked[1][0].startswith("<tools># Tools") and policy.asked[1][0].endswith("<user>b\n<assistant>")


def test_calls_beyond_the_limit_per_turn_are_refused():
    tools = Counter()
    session = Session(
        TASK, {"policy": scripted_calls(called(*["count"] * 10), "done")}, seed=1, budget=Budget(max_calls_per_turn=3)
    )
    asyncio.run(session.agent("policy", system="").use("go", Toolbox(tools.count)))
    told = "".join(map(chr, session.agents[0].turns[1].prompt_ids)).split("</tool_call>")[-1]
    assert (tools.num, told.count("<tool>"), told.count("only the first 3 calls of a reply are run")) == (3, 10, 7)


@pytest.mark.parametrize(("most", "num_turns"), [(1, 1), (3, 3)])
def test_endless_tool_calls_truncate_the_agent_at_max_turns(most: int, num_turns: int):
    async def play(session: Session) -> None:
        with pytest.raises(BudgetSpent, match=f"still called tools in turn {most}, its last"):
            await session.agent("policy", system="").use("go", Toolbox(Counter().count), max_turns=most)

    (trajectory,) = played(play, scripted_calls(called("count"))).trajectories
    assert (len(trajectory.turns), trajectory.outcome) == (num_turns, TRUNCATED)


def test_the_tool_call_budget_spans_the_whole_episode():
    tools = Counter()

    async def main() -> Session:
        session = Session(
            TASK, {"policy": scripted_calls(called("count", "count"))}, seed=1, budget=Budget(max_tool_calls=3)
        )
        with pytest.raises(BudgetSpent, match=r"more than the 3 tool calls of the episode \(max_tool_calls\)"):
            await session.agent("policy", system="").use("go", Toolbox(tools.count))
        return session

    assert (asyncio.run(main()).episode().trajectories[0].outcome, tools.num) == (TRUNCATED, 2)


def test_a_tool_error_fails_the_agent_that_called_it():
    def lookup() -> str:
        """Look it up."""
        raise ToolError("the index is gone")

    async def play(session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat("plan")
        (ended,) = await session.gather(session.agent("helper", system="", parent=lead).use("go", Toolbox(lookup)))
        assert isinstance(ended, ToolError)

    lead, helper = played(play, ScriptedPolicy(lambda prompt: called("lookup"))).trajectories
    assert (lead.outcome, helper.outcome) == (OK, failed("the index is gone"))


# ------------------------------------------------------------------------------------------------------------ subagents


@dataclass
class Narrow(ScriptedPolicy):
    """A policy with room for so many tokens of prompt."""

    most: int = 40

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        if len(prompt_ids) > self.most:
            raise TaskTooLong("rollout-0", "encoding a prompt", f"{len(prompt_ids)} tokens")
        return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)


def test_a_subagent_whose_context_is_full_ends_alone():
    async def play(session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat("plan")
        helpers = [session.agent("helper", parent=lead) for _ in range(3)]
        prompts = ["short", "x" * 50, "short"]
        ended = await session.gather(*(h.chat(p) for h, p in zip(helpers, prompts, strict=True)))
        assert [isinstance(each, ContextFull) for each in ended] == [False, True, False]

    outcomes = [t.outcome for t in played(play, Narrow()).trajectories]
    assert outcomes == [OK, OK, TRUNCATED, OK]


def test_a_task_longer_than_the_context_raises_task_too_long():
    with pytest.raises(TaskTooLong):
        played(chats("x" * 50), Narrow())


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), WorkerDied("rollout-0", "sampling", "gone")])
def test_an_error_in_a_subagent_cancels_others_and_propagates(error: Exception):
    cancelled: list[int] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def breaks() -> None:
        await asyncio.sleep(0)
        raise error

    async def play(session: Session) -> None:
        session.agent("lead")
        await session.gather(waits(), breaks())

    with pytest.raises(type(error)) as raised:
        played(play)
    assert raised.value is error
    assert cancelled == [1]


def test_subagents_run_side_by_side_and_answer_in_their_order():
    async def play(session: Session) -> None:
        session.agent("lead")
        gate = asyncio.Event()

        async def first() -> str:
            await gate.wait()
            return "first"

        async def second() -> str:
            gate.set()
            return "second"

        assert await session.gather(first(), second()) == ["first", "second"]

    played(play)


# ------------------------------------------------------------------------------------------------------ at any speed


@dataclass
class Paced(ScriptedPolicy):
    """Replies as late as it is told to: after so many rounds of the event loop, by what its prompt holds."""

    delays: Mapping[str, int] = field(default_factory=dict)
    num_running: int = 0
    num_cancelled: int = 0

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        prompt = "".join(map(chr, prompt_ids))
        self.num_running += 1
        try:
            for _ in range(next((num for start, num in self.delays.items() if start in prompt), 0)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)


async def family(session: Session) -> None:
    """Two subagents that each make a leaf and enter an environment after their first reply."""
    lead = session.agent("lead")
    await lead.chat("plan")

    async def work(helper: Agent, name: str) -> None:
        await helper.chat(name)
        async with session.enter(Seeded(), helper) as world:
            await helper.chat(world.opening)
        leaf = session.agent("leaf", parent=helper)
        await leaf.chat(f"leaf of {name}")

    await session.gather(*(work(session.agent("helper", parent=lead), name) for name in ("left", "right")))
    await session.agent("clerk", parent=lead).chat("note")


class Seeded(Environment):
    """Says its seed."""

    async def reset(self, task: Task, seed: int) -> Prompt:
        return f" in world {seed} "


def paced(play: Plays, budget: Budget, **delays: int) -> Session:
    """`play` with these delays, and ten tokens a reply."""
    policy = Paced(lambda prompt: "ten tokens", delays=delays)
    session = Session(TASK, {"policy": policy}, seed=1, budget=budget)
    asyncio.run(play(session))
    return session


DELAYS = st.fixed_dictionaries({name: st.integers(0, 9) for name in ("left", "right", "leaf of left", "0", "1", "2")})


@given(DELAYS)
def test_seeds_and_agent_order_do_not_depend_on_timing(delays: dict[str, int]):
    def said(**delays: int) -> tuple[Episode, list[tuple[str, int]]]:
        session = paced(family, Budget(), **delays)
        policy = session.policies["policy"]
        assert isinstance(policy, Paced)
        return session.episode(), sorted(policy.asked)

    assert said(**delays) == said()


def test_agents_of_an_episode_are_listed_each_before_its_own():
    trajectories = paced(family, Budget(), left=9).episode().trajectories
    assert [(t.agent, t.parent) for t in trajectories] == [
        ("lead", None), ("helper", 0), ("leaf", 1), ("helper", 0), ("leaf", 3), ("clerk", 0),
    ]  # fmt: skip


async def crowd(session: Session) -> None:
    """Ten subagents that talk for as long as they may, then the lead."""
    lead = session.agent("lead")

    async def work(helper: Agent, name: str) -> None:
        while True:
            await helper.chat(name)

    helpers = [session.agent("helper", parent=lead) for _ in range(10)]
    ended = await session.gather(*(work(helper, f"{n}>") for n, helper in enumerate(helpers)))
    assert all(isinstance(each, BudgetSpent) for each in ended)
    with pytest.raises(BudgetSpent, match="max_episode_tokens"):
        await lead.chat("all is spent")


@given(DELAYS, st.integers(1, 250))
def test_concurrent_agents_spend_exactly_the_budget_at_any_speed(delays: dict[str, int], most: int):
    session = paced(crowd, Budget(max_episode_tokens=most), **delays)
    assert session.num_sampled == most
    assert session.episode() == paced(crowd, Budget(max_episode_tokens=most)).episode()


def test_what_subagents_leave_of_their_shares_is_common_again():
    async def play(session: Session) -> None:
        lead = session.agent("lead")
        await session.gather(*(session.agent("helper", parent=lead).chat("a") for _ in range(2)))
        await lead.chat("b")

    lead, *helpers = paced(play, Budget(max_episode_tokens=60)).episode().trajectories
    assert [t.turns[0].sampling.max_new_tokens for t in (*helpers, lead)] == [30, 30, 40]


def test_the_budget_covers_asyncio_tasks_started_by_a_workflow():
    async def play(session: Session) -> None:
        agents = [session.agent("policy") for _ in range(10)]
        await asyncio.gather(*(agent.chat("a") for agent in agents), return_exceptions=True)

    session = Session(
        TASK,
        {"policy": Paced(lambda prompt: "x" * 40, max_new_tokens=30)},
        seed=1,
        budget=Budget(max_episode_tokens=100),
    )
    asyncio.run(play(session))
    assert [len(agent.turns[0].output_ids) for agent in session.agents if agent.turns] == [30, 30, 30, 10]


@pytest.mark.parametrize(("of_task", "of_run", "key"), [(50, 100, "length_cap"), (100, 50, "max_episode_tokens")])
def test_the_smaller_limit_of_task_and_workflow_counts(of_task, of_run, key):
    session = Session(
        TASK, {"policy": ScriptedPolicy(lambda prompt: "x" * 40)}, seed=1,
        budget=Budget(max_episode_tokens=of_run), token_limit=of_task,
    )  # fmt: skip

    async def play() -> None:
        agent = session.agent("policy")
        for _ in range(3):
            await agent.chat("a")

    with pytest.raises(BudgetSpent, match=rf"the 50 tokens of the episode.*{key}"):
        asyncio.run(play())
    assert session.num_sampled == 50


def test_an_agent_beside_a_gather_stays_unlimited():
    async def play(session: Session) -> None:
        lead, helper, beside = (session.agent("policy") for _ in range(3))
        gathered = asyncio.create_task(session.gather(lead.chat("a"), helper.chat("a")))
        await asyncio.sleep(0)
        await beside.chat("a")
        await gathered

    session = Session(TASK, {"policy": Paced(lambda prompt: "x", max_new_tokens=30)}, seed=1)
    asyncio.run(play(session))
    assert [len(agent.turns) for agent in session.agents] == [1, 1, 1]


def test_concurrent_tool_calls_spend_the_budget_at_any_speed():
    async def play(session: Session) -> None:
        lead = session.agent("lead")
        helpers = [session.agent("helper", system="", parent=lead) for _ in range(2)]
        tools = Toolbox(Counter().count)
        left, right = helpers
        await session.gather(left.use("left", tools), right.use("right", tools))

    def num_turns(**delays: int) -> list[int]:
        policy = Paced(lambda prompt: called("count"), delays=delays)
        session = Session(TASK, {"policy": policy}, seed=1, budget=Budget(max_tool_calls=5))
        asyncio.run(play(session))
        return [len(agent.turns) for agent in session.agents]

    assert num_turns() == num_turns(left=9) == [0, 4, 3]


def test_two_delegating_calls_of_one_reply_share_the_budget():
    async def play(session: Session) -> None:
        lead = session.agent("lead", system="")

        async def delegate() -> str:
            """Call a subagent in."""
            return await session.agent("helper", parent=lead).chat("go")

        reply = await lead.act("plan", Toolbox(delegate))
        await lead.answer(reply.calls, Toolbox(delegate))

    said = called("delegate", "delegate")
    session = Session(
        TASK, {"policy": ScriptedPolicy(lambda prompt: said)}, seed=1, budget=Budget(max_episode_tokens=len(said) + 20)
    )
    asyncio.run(play(session))
    assert [len(agent.turns[0].output_ids) for agent in session.agents[1:]] == [10, 10]


# -------------------------------------------------------------------------------------------------- how a session ends


@dataclass(frozen=True, kw_only=True)
class Played(Workflow):
    """A workflow that is one function."""

    function: Plays

    async def run(self, session: Session) -> None:
        await self.function(session)


def settled(play: Plays, policy: ScriptedPolicy | None = None) -> Episode:
    session = Session(TASK, {"policy": policy or ScriptedPolicy()}, seed=1, budget=Budget(max_turns=1))
    return asyncio.run(Played(function=play).play(session))


async def speaks_twice(agent: Agent) -> None:
    await agent.chat("a")
    await agent.chat("b")


async def breaks(agent: Agent) -> None:
    await agent.chat("a")
    agent.fail("broken")
    raise ToolError("broken")


@pytest.mark.parametrize(
    ("works", "outcome"),
    [([speaks_twice], TRUNCATED), ([breaks], failed("broken")), ([speaks_twice, breaks], failed("broken"))],
)
def test_a_stopped_agent_in_a_task_group_settles_the_episode(works: list, outcome: Outcome):
    async def play(session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat("plan")
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(0))
            for work in works:
                inner.create_task(work(session.agent("helper", parent=lead)))

    assert settled(play).trajectories[0].outcome == outcome


def test_a_bug_beside_a_stopped_agent_is_raised():
    async def bug() -> None:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        raise ZeroDivisionError

    async def play(session: Session) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(speaks_twice(session.agent("lead")))
            group.create_task(bug())

    with pytest.raises(ExceptionGroup) as raised:
        settled(play)
    assert isinstance(first_of(raised.value), ZeroDivisionError)


def test_agents_still_running_at_the_end_are_cancelled():
    policy = Paced(delays={"slow": 10**9})
    after: list[BaseException | str] = []

    async def goes_on(agent: Agent) -> None:
        with suppress(asyncio.CancelledError):
            await agent.chat("slow")
        try:
            await agent.chat("more")
        except RuntimeError as error:
            after.append(error)

    async def play(session: Session) -> None:
        lead, helper = session.agent("lead"), session.agent("helper")
        await asyncio.gather(goes_on(helper), speaks_twice(lead))

    async def main() -> Episode:
        session = Session(TASK, {"policy": policy}, seed=1, budget=Budget(max_turns=1))
        episode = await Played(function=play).play(session)
        assert (policy.num_running, policy.num_cancelled) == (0, 1)
        await asyncio.sleep(0)
        return episode

    lead, helper = asyncio.run(main()).trajectories
    assert (lead.outcome, len(helper.turns)) == (TRUNCATED, 0)
    assert ["'helper' is asked after its session ended" in str(error) for error in after] == [True]


# --------------------------------------------------------------------------------------------------------- environments


@dataclass
class Guess(Environment):
    """A number to find."""

    events: list[str] = field(default_factory=list)

    async def reset(self, task: Task, seed: int) -> Prompt:
        self.events.append(f"reset {seed}")
        if task.info.get("broken"):
            raise ToolError("no numbers left")
        return "Guess>"

    async def step(self, reply: str) -> Step:
        return Step("Right." if reply == "7" else "No>", reward=float(reply == "7"), is_done=reply == "7")

    async def close(self) -> None:
        self.events.append("closed")


def test_an_environment_is_reset_with_the_group_seed_and_closed():
    worlds = [Guess() for _ in range(3)]

    async def play(session: Session) -> None:
        agent = session.agent("policy")
        for world in worlds[:2]:
            async with session.enter(world) as entered:
                step = await entered.step(await agent.chat(entered.opening))
                assert (step.is_done, step.reward) == (True, 1.0)

    policy = ScriptedPolicy(lambda prompt: "7")
    played(play, policy)
    played(play, policy, episode=3)
    first, second = (world.events for world in worlds[:2])
    assert first[1] == first[3] == "closed"
    assert first[0] == first[2] and second[0] == second[2], "episodes of a group begin alike"
    assert first[0] != second[0]


@pytest.mark.parametrize("where", ["reset", "inside"])
def test_an_environment_is_closed_whatever_happens(where: str):
    world = Guess()

    async def play(session: Session) -> None:
        session.task = Task(id="t", prompt="", info={"broken": where == "reset"})
        async with session.enter(world):
            raise ToolError("inside")

    with pytest.raises(ToolError):
        played(play)
    assert world.events[-1] == "closed"


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_lacks_a_part_says_which(method: str):
    calls = {"reset": lambda: Environment().reset(TASK, 0), "step": lambda: Environment().step("a")}
    with pytest.raises(NotImplementedError, match=f"implement `{method}`"):
        asyncio.run(calls[method]())
    assert len(Environment().tools) == 0


# ---------------------------------------------------------------------------------------------------------------- laws


ACTIONS = st.lists(st.sampled_from(["chat", "long", "fork", "rewrite", "system", "recite"]), min_size=1, max_size=12)


@given(ACTIONS)
def test_every_generated_token_is_trained_once_and_in_order(actions: list[str]):
    spoken: dict[int, list[str]] = {}

    async def play(session: Session) -> None:
        agent = session.agent("root", system="s")
        for number, action in enumerate(actions):
            if action == "fork":
                agent = agent.fork()
            elif action == "rewrite":
                agent.rewrite(user(f"anew {number}"))
            elif action == "system":
                agent = session.agent("other", system=f"{number}", parent=agent)
            elif action == "recite":
                await agent.recite("say", f"given {number}")
                spoken.setdefault(agent.index, []).append(f"given {number}")
            else:
                spoken.setdefault(agent.index, []).append(await agent.chat("p" * (99 if action == "long" else 1)))

    episode = played(play, ScriptedPolicy(lambda prompt: f"reply to {len(prompt)}"))
    for index, trajectory in enumerate(episode.trajectories):
        samples = list(samples_of(trajectory))
        trained = [
            chr(token)
            for sample in samples
            for token, on in zip(sample.completion_ids, sample.is_trained, strict=True)
            if on
        ]
        assert "".join(trained) == "".join(spoken.get(index, []))


def test_what_stops_an_agent_is_one_family():
    assert issubclass(ContextFull, AgentStopped) and issubclass(BudgetSpent, AgentStopped)
