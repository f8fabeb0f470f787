"""Ready-made workflows with a scripted policy: prompts, failures, and trained tokens."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from algorithms.eapo import EAPO
from algorithms.kto import KTO
from rlsys.agents.tool_calls import ToolCall
from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Agent, AgentStopped, ContextFull, Session
from rlsys.algorithm import Aggregation, TrajectoryAdvantage
from rlsys.batch.packing import plan_batch
from rlsys.batch.samples import meta_of, samples_of
from rlsys.config import Config
from rlsys.errors import ConfigError, TaskTooLong, ToolError
from rlsys.testing import ScriptedPolicy, play_scripted
from rlsys.types import OK, Episode, Json, Message, OutcomeKind, Score, Task, Trajectory
from rlsys.workflows.lead_subagents import LeadSubagents
from rlsys.workflows.parallel_drafts import ANSWER, DISTILL, DRAFT, ParallelDrafts
from rlsys.workflows.reconfiguring import Reconfiguring
from rlsys.workflows.research import Research
from rlsys.workflows.self_play import INVALID, SelfPlay
from rlsys.workflows.spawn_join import NOTHING, SpawnJoin
from rlsys.workflows.tool_use import ToolUse, move, opening_messages
from tests.call_texts import write_calls
from tests.groups import group

pytestmark = pytest.mark.slow

TASK = Task(id="t", prompt="the riddle", answer="42")
HERE = "tests.unit.agents.test_ready_made_workflows"
TRUNCATED = OutcomeKind.TRUNCATED


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def halve(number: int) -> int:
    """Half of a number."""
    return number // 2


def terminate(answer: str) -> str:
    """A tool that is called as a move is."""
    return answer


def breaks(why: str) -> str:
    """Never works."""
    raise ToolError(f"the server is gone: {why}")


def is_even(task: str, reply: str) -> float:
    return float(int(reply) % 2 == 0)


def call(name: str, **arguments: Json) -> str:
    return write_calls([ToolCall(name, arguments, "")])


def calls(*texts: str) -> str:
    return "\n".join(texts)


def last(prompt: str) -> str:
    """What was said to the policy last."""
    return re.split(r"<(?:user|tool|assistant)>", prompt.removesuffix("<assistant>"))[-1].strip()


def said(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.turns]


def read(trajectory: Trajectory, turn: int = -1) -> str:
    """All that the policy had before it in a turn."""
    return "".join(map(chr, trajectory.turns[turn].prompt_ids))


# ------------------------------------------------------------------------------------------------------- opened, moves


def test_a_conversation_opens_with_one_system_and_one_user_message():
    prompt = (Message(role="system", content="theirs"), Message(role="user", content="ask"))
    expected = [("system", "ours\n\ntheirs"), ("user", "ask\n\nmore")]
    assert [(m["role"], m["content"]) for m in opening_messages("ours", prompt, "more")] == expected
    assert [m["content"] for m in opening_messages("ours", "ask")] == ["ours", "ask"]


def test_bugs_in_moves_raise_and_wrong_arguments_reach_the_model():
    async def leap(far: int) -> str:
        """Leap."""
        return str(1 // far)

    def run(*made: ToolCall) -> list[str]:
        return [result.content for result in asyncio.run(Toolbox(move(leap)).run(made))]

    assert run(ToolCall("leap", {"far": 1}, "")) == ["1"]
    (told,) = run(ToolCall("leap", {"far": "near"}, ""))
    assert "far" in told and "valid integer" in told
    with pytest.raises(ZeroDivisionError):
        run(ToolCall("leap", {"far": 0}, ""))


class Held:
    """Whom the moves of a session hold on to."""


def moves_of(held: Held, word: str) -> Toolbox:
    async def outer() -> str:
        """Say the word."""
        assert held
        return word

    async def inner() -> str:
        """Break as a bug does."""
        raise KeyError(word)

    return Toolbox(move(outer), move(inner))


def test_nested_moves_run_within_their_own_session():
    for word in ("one", "two"):
        moves = moves_of(Held(), word)
        assert [result.content for result in asyncio.run(moves.run([ToolCall("outer", {}, "")]))] == [word]
        with pytest.raises(KeyError, match=word):
            asyncio.run(moves.run([ToolCall("inner", {}, "")]))


def test_what_moves_hold_on_to_ends_with_their_session():
    def begun() -> tuple[weakref.ref[Held], Toolbox]:
        held = Held()

        async def hold() -> str:
            """Hold on."""
            return str(held)

        return weakref.ref(held), Toolbox(move(hold))

    seen, moves = begun()
    assert len(moves) == 1 and seen() is not None
    del moves
    gc.collect()
    assert seen() is None


def test_results_of_moves_are_bounded_and_valid_unicode():
    async def long() -> str:
        """Say much."""
        return "\ud800" + "x" * 1_000_000

    (result,) = asyncio.run(Toolbox(move(long)).run([ToolCall("long", {}, "")]))
    assert result.is_cut and len(result.content) < 30_000
    assert result.content.encode().startswith(b"?x")


def test_a_default_of_a_move_is_that_of_this_session():
    def moves_from(start: int) -> Toolbox:
        async def count(first: int = start) -> str:
            """Count."""
            return str(first)

        return Toolbox(move(count))

    for start in (1, 2):
        (result,) = asyncio.run(moves_from(start).run([ToolCall("count", {}, "")]))
        assert result.content == str(start)


NEEDED = ["run.steps=1", "model.path=m", "data.path=d"]


@pytest.mark.parametrize(
    ("workflow", "problem"),
    [
        (f"{{type: '{ToolUse.__module__}:ToolUse'}}", "tools: required, and not given"),
        (
            f"{{type: '{ToolUse.__module__}:ToolUse', tools: [no_such:tool]}}",
            "cannot import tool 'no_such:tool': ModuleNotFoundError",
        ),
        (f"{{type: '{ToolUse.__module__}:ToolUse', tools: ['{HERE}:call']}}", "the tool .* has no docstring"),
        (
            f"{{type: '{ToolUse.__module__}:ToolUse', tools: ['{HERE}:double', '{HERE}:double']}}",
            "two tools are called",
        ),
        (f"{{type: '{SelfPlay.__module__}:SelfPlay', judge: '{HERE}:TASK'}}", "is no function"),
    ],
)
def test_unusable_tools_and_judges_are_refused_in_the_configuration(workflow: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        Config.load([], [*NEEDED, f"rollout.workflow={workflow}"])


# ------------------------------------------------------------------------------------------------------------ tool use


def test_parallel_tool_calls_are_answered_from_their_results():
    def reply(prompt: str) -> str:
        if "<tool>" not in prompt:
            return calls("Let me see.", call("double", number=4), call("double", number=5))
        return "so " + " and ".join(re.findall(r"<tool>(\d+)", prompt))

    (trajectory,) = play_scripted(ToolUse(tools=(f"{HERE}:double",)), TASK, reply).trajectories
    assert said(trajectory)[-1] == "so 8 and 10"
    assert '"name": "double"' in read(trajectory, 0)
    (sample,) = samples_of(trajectory)
    assert sum(sample.is_trained) == sum(map(len, said(trajectory)))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("<tool_call>{", "cannot be read"),
        (call("doubles", number=1), "No tool is called `doubles`; did you mean `double`?"),
        (call("double", number="x"), "wrong arguments"),
    ],
)
def test_a_wrong_call_is_told_and_the_episode_goes_on(written: str, told: str):
    answer = play_scripted(ToolUse(tools=(f"{HERE}:double",)), TASK, lambda p: "sorry" if told in last(p) else written)
    assert (said(answer.trajectories[0]), answer.trajectories[0].outcome) == ([written, "sorry"], OK)


def test_an_agent_that_never_stops_is_truncated():
    workflow = ToolUse(tools=(f"{HERE}:double",), max_turns=3)
    (endless,) = play_scripted(workflow, TASK, lambda p: call("double", number=1)).trajectories
    assert (len(endless.turns), endless.outcome.kind) == (3, TRUNCATED)


@pytest.mark.parametrize("kind", ["tools: ['broken_at_import:f']", "judge: 'broken_at_import:f'"])
def test_import_errors_of_user_modules_name_the_tool_or_judge(kind, tmp_path):
    (tmp_path / "broken_at_import.py").write_text("limit = 1 / 0\n")
    name = f"{ToolUse.__module__}:ToolUse" if "tools" in kind else f"{SelfPlay.__module__}:SelfPlay"
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"cannot import (tool|judge) 'broken_at_import:f': ZeroDivisionError"):
            Config.load([], [*NEEDED, f"rollout.workflow={{type: '{name}', {kind}}}"])
    finally:
        sys.path.remove(str(tmp_path))


# ---------------------------------------------------------------------------------------------------- lead, subagents


def lead_of(*tasks: str) -> Callable[[str], str]:
    """A lead that delegates these once; subagents answer with their task in capitals."""

    def reply(prompt: str) -> str:
        if "You lead" not in prompt:
            return last(prompt).upper()
        return "done" if "Subagent" in last(prompt) else call("delegate", tasks=[*tasks])

    return reply


def test_a_lead_reads_only_the_answers_of_its_subagents():
    def reply(prompt: str) -> str:
        if "You lead" in prompt or "<tool>" in prompt:
            return lead_of("a", "b")(prompt) if "You lead" in prompt else "eight"
        return call("double", number=4)

    lead, *subagents = play_scripted(LeadSubagents(tools=(f"{HERE}:double",)), TASK, reply).trajectories
    assert [(sub.agent, sub.parent, said(sub)[-1]) for sub in subagents] == [("subagent", 0, "eight")] * 2
    assert said(lead)[-1] == "done"
    assert last(read(lead)) == "Subagent 1: eight\n\nSubagent 2: eight"
    assert all("the riddle" not in read(sub) for sub in subagents)
    assert '"double"' not in read(lead)


def test_subagents_above_the_last_level_delegate_as_the_lead_does():
    def reply(prompt: str) -> str:
        asked = last(prompt)
        if "Subagent" in asked:
            return f"both: {asked.split()[2]}"
        if "You lead" in prompt:
            return call("delegate", tasks=["upper"])
        return call("delegate", tasks=["a", "b"]) if "upper" in prompt else asked.upper()

    deep = play_scripted(LeadSubagents(max_depth=2), TASK, reply)
    assert [(t.agent, t.parent, said(t)[-1]) for t in deep.trajectories] == [
        ("lead", None, "both: both:"),
        ("subagent", 0, "both: A"),
        ("subagent", 1, "A"),
        ("subagent", 1, "B"),
    ]
    flat = play_scripted(LeadSubagents(), TASK, reply)
    assert [(t.agent, t.parent) for t in flat.trajectories] == [("lead", None), ("subagent", 0)]
    assert said(flat.trajectories[0])[-1] == "both: failed:"


@dataclass
class TogetherOnly(ScriptedPolicy):
    """Answers of subagents come only once two are asked: one after the other they would wait for ever."""

    def __post_init__(self) -> None:
        self.both = asyncio.Barrier(2)

    async def sample(self, prompt_ids, seed, max_new_tokens=None, stop=(), tell=None):
        if "You lead" not in "".join(map(chr, prompt_ids)):
            await self.both.wait()
        return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)


@pytest.mark.timeout(10)
def test_subagents_run_concurrently():
    episode = play_scripted(LeadSubagents(), TASK, TogetherOnly(lead_of("a", "b")))
    assert [said(t)[-1] for t in episode.trajectories] == ["done", "A", "B"]


def test_thoughts_of_subagents_stay_hidden_and_run_no_calls():
    def reply(prompt: str) -> str:
        if "You lead" in prompt:
            return lead_of("a")(prompt)
        return f"<think>perhaps {call('breaks', why='it was only thought of')}</think>\n\neight"

    lead, subagent = play_scripted(LeadSubagents(tools=(f"{HERE}:breaks",)), TASK, reply).trajectories
    assert last(read(lead)) == "Subagent 1: eight"
    assert (len(subagent.turns), subagent.outcome) == (1, OK)


def test_limits_of_subagents_are_told_to_the_lead():
    def lead(prompt: str) -> str:
        if "You lead" not in prompt:
            return "ok"
        return "done" if prompt.count("<assistant>") == 3 else call("delegate", tasks=["a", "b", "c"])

    episode = play_scripted(LeadSubagents(max_subagents=2, max_subagents_in_all=3), TASK, lead)
    assert len(episode.trajectories) == 4
    told = re.findall(r"Subagent \d: (\w+)", read(episode.trajectories[0]))
    assert told == ["ok", "ok", "refused", "ok", "refused", "refused"]


def test_a_subagent_with_broken_tools_fails_alone():
    def reply(prompt: str) -> str:
        if "You lead" not in prompt and "bad" in prompt:
            return call("breaks", why="unplugged")
        return lead_of("bad", "good")(prompt)

    episode = play_scripted(LeadSubagents(tools=(f"{HERE}:breaks",)), TASK, reply)
    lead, bad, good = episode.trajectories
    assert (lead.outcome, good.outcome) == (OK, OK)
    assert bad.outcome.is_failed and "the server is gone: unplugged" in bad.outcome.reason
    assert last(read(lead)) == "Subagent 1: failed: a tool broke\n\nSubagent 2: GOOD"
    scored = group(0, episodes=meta_of((episode,)))
    assert [place for place, _ in scored.trajectories()] == [(0, 0), (0, 2)]


def test_an_endless_subagent_is_truncated_and_reported_to_the_lead():
    def reply(prompt: str) -> str:
        return lead_of("x")(prompt) if "You lead" in prompt else call("double", number=1)

    workflow = LeadSubagents(tools=(f"{HERE}:double",), max_subagent_turns=2)
    lead, endless = play_scripted(workflow, TASK, reply).trajectories
    assert (len(endless.turns), endless.outcome.kind, lead.outcome) == (2, TRUNCATED, OK)
    assert "failed: it ran out" in last(read(lead))


def test_a_lead_that_never_stops_is_truncated():
    def reply(prompt: str) -> str:
        return call("delegate", tasks=["again"]) if "You lead" in prompt else "ok"

    lead, *_ = play_scripted(LeadSubagents(max_lead_turns=3), TASK, reply).trajectories
    assert (len(lead.turns), lead.outcome.kind) == (3, TRUNCATED)


class Overflows(ScriptedPolicy):
    """A subagent whose task is `long` has no room for it."""

    async def sample(self, prompt_ids, seed, max_new_tokens=None, stop=(), tell=None):
        if "<user>long" in "".join(map(chr, prompt_ids)):
            raise TaskTooLong("rollout-0", "encoding a prompt", "5000 tokens")
        return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)


def test_an_overlong_subtask_is_reported_to_the_lead():
    lead, long, _ = play_scripted(LeadSubagents(), TASK, Overflows(lead_of("long", "short"))).trajectories
    assert (lead.outcome, long.outcome.kind, long.turns) == (OK, TRUNCATED, ())
    assert last(read(lead)) == "Subagent 1: failed: it ran out of turns or room\n\nSubagent 2: SHORT"


@dataclass(frozen=True, kw_only=True)
class Buggy(LeadSubagents):
    async def work(self, session: Session, subagent: Agent, task: str) -> str:
        raise KeyError("a bug of the author's")


def test_a_bug_in_a_subclass_is_raised():
    with pytest.raises(KeyError, match="a bug of the author's"):
        play_scripted(Buggy(), TASK, lead_of("a"))


# ------------------------------------------------------------------------------------------------- weights (WideSeek)


def token_weights(*episodes: Episode) -> dict[tuple[int, int], float]:
    """What each agent's tokens count together."""
    scored = group(0, episodes=meta_of(episodes))
    assigned = [TrajectoryAdvantage(e, t, 1.0) for (e, t), _ in scored.trajectories()]
    (plan,) = plan_batch([scored], [assigned], Aggregation("agents"), num_ranks=1, max_tokens=10_000)
    weights: dict[tuple[int, int], float] = {}
    for ref in (ref for part in plan.micro_batches for ref in part.samples):
        sample = scored.episodes[ref.episode].trajectories[ref.trajectory].samples[ref.sample]
        place = ref.episode, ref.trajectory
        weights[place] = weights.get(place, 0.0) + ref.token_weight * sample.num_trained
    return weights


def test_agents_of_an_episode_share_its_weight_equally():
    narrow, wide = (play_scripted(LeadSubagents(), TASK, lead_of(*tasks)) for tasks in ("a", ("bcd", "ef", "g")))
    weights = token_weights(narrow, wide)
    assert sum(share for (e, _), share in weights.items() if e == 0) == pytest.approx(1 / 2)
    assert [weights[1, t] for t in range(4)] == pytest.approx([1 / 8] * 4)


def test_one_more_subagent_scales_the_other_weights_by_count():
    def one(*tasks: str) -> dict[tuple[int, int], float]:
        return token_weights(play_scripted(LeadSubagents(), TASK, lead_of(*tasks)))

    before, after = one("abc", "de"), one("abc", "de", "de")
    for place, weight in before.items():
        assert after[place] == pytest.approx(weight * 3 / 4)


# --------------------------------------------------------------------------------------------------------- spawn, join


def parent_of(*contexts: str) -> Callable[[str], str]:
    """A parent that spawns these once; a child thinks about its context for a turn, then joins `found CONTEXT`."""

    def reply(prompt: str) -> str:
        if "spawn a child" in prompt:
            return "answer" if "Child 1:" in prompt else call("spawn", contexts=[*contexts])
        if "<tool>" in prompt:
            return call("join", text=f"found {re.findall('<user>(.*)', prompt)[0]}")
        return "musing\n" + call("recall", what="nothing")

    return reply


def test_a_parent_reads_only_the_texts_its_children_join():
    parent, *children = play_scripted(SpawnJoin(), TASK, parent_of("x", "y")).trajectories
    assert [(child.agent, child.parent) for child in children] == [("child", 0), ("child", 0)]
    assert last(read(parent)) == "Child 1: found x\n\nChild 2: found y"
    assert read(parent).startswith(read(parent, 0) + said(parent)[0])
    assert "musing" not in read(parent) and "the riddle" not in read(children[0])
    (sample,) = samples_of(parent)
    assert sum(sample.is_trained) == sum(map(len, said(parent)))


def test_a_child_that_never_joins_returns_nothing():
    def reply(prompt: str) -> str:
        if "spawn a child" in prompt:
            return "answer" if "Child 1:" in prompt else call("spawn", contexts=["silent", "endless", "good"])
        if "silent" in prompt:
            return "I keep it to myself"
        return call("join", text="here") if "good" in prompt else call("no", such="tool")

    parent, silent, endless, good = play_scripted(SpawnJoin(max_child_turns=2), TASK, reply).trajectories
    assert last(read(parent)) == f"Child 1: {NOTHING}\n\nChild 2: {NOTHING}\n\nChild 3: here"
    assert [len(child.turns) for child in (silent, endless, good)] == [1, 2, 1]
    assert [child.outcome.kind for child in (silent, endless, good)] == ["ok", TRUNCATED, "ok"]


def test_contexts_beyond_the_limit_are_refused():
    parent, *children = play_scripted(SpawnJoin(max_children=1), TASK, parent_of("x", "y")).trajectories
    assert len(children) == 1
    assert "Child 2: (refused: at most 1 children at once)" in read(parent)


@dataclass(frozen=True, kw_only=True)
class Told(SpawnJoin):
    """Plain text: the parent says contexts with a bar between them; a child's reply is what it joins."""

    async def solve(self, session: Session, parent: Agent) -> None:
        texts = (await parent.chat("P=")).split("|")
        for _ in range(2):
            texts = await self.spawn(session, parent, texts)
        await parent.chat(">" + "|".join(texts))
        session.log.append(session.log[0])
        session.reward(session.num_sequential)

    async def explore(self, child: Agent, context: str) -> str | None:
        if context == "zz":
            raise AgentStopped
        return await child.chat(f"C{context}=")


def test_the_critical_path_counts_the_longest_child_per_spawn():
    script = {"P=": "a|bbb", "Ca=": "a", "Cbbb=": "bb", "Cbb=": "b"}
    episode = play_scripted(Told(), TASK, lambda prompt: script.get(prompt, "end"))
    parent, *children = episode.trajectories
    assert said(parent) == ["a|bbb", "end"] and read(parent) == "P=a|bbb>a|b"
    assert [said(child) for child in children] == [["a"], ["bb"], ["a"], ["b"]]
    assert parent.reward == len("a|bbb") + len("bb") + len("b") + len("end") < len("a|bbbabbabend")
    (meta,) = meta_of((episode,))
    assert meta.num_sequential == episode.num_sequential == parent.reward
    (scored,) = group(0, episodes=[meta]).with_scores((Score(1.0),)).episodes
    assert scored.num_sequential == parent.reward


def test_calls_of_all_agents_are_counted():
    def reply(prompt: str) -> str:
        if "You lead" in prompt or "<tool>" in prompt:
            return lead_of("a", "b")(prompt) if "You lead" in prompt else "eight"
        return calls(call("double", number=4), call("double", number=5))

    episode = play_scripted(LeadSubagents(tools=(f"{HERE}:double",)), TASK, reply)
    assert meta_of((episode,))[0].num_tool_calls == 1 + 2 * 2


def test_the_transcript_of_a_stopped_episode_has_sequential_tokens():
    workflow = SpawnJoin(max_parent_turns=1)
    session = workflow.session(TASK, {"policy": ScriptedPolicy(parent_of("x", "y"))}, 1, 0, {})
    asyncio.run(workflow.play(session))
    lengths = [sum(len(turn.output_ids) for turn in agent.turns) for agent in session.agents]
    expected = f"sequential tokens: {lengths[0] + max(lengths[1:])} of {sum(lengths)}"
    assert session.log[-1].text == expected


# -------------------------------------------------------------------------------------------------------------- drafts


def test_drafts_think_alone_and_the_answer_reads_them_all():
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return f"draft{len(seen)}" if len(seen) <= 3 else "42"

    episode = play_scripted(ParallelDrafts(num_drafts=3), TASK, reply)
    root, *drafts = episode.trajectories
    assert [said(draft) for draft in drafts] == [["draft1"], ["draft2"], ["draft3"]] and said(root) == ["42"]
    assert all("draft" not in prompt.replace(DRAFT, "") for prompt in seen[:3])
    assert all(f"Attempt {i}: draft{i}" in seen[3] for i in (1, 2, 3))
    assert episode.num_sequential == len("draft1") + len("42")


def test_a_distiller_keeps_the_notes_of_all_rounds_small():
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return "n" * 99 if DISTILL in prompt else "attempt" if DRAFT in prompt else "42"

    episode = play_scripted(ParallelDrafts(num_drafts=2, num_rounds=2, distills=True, max_note_chars=10), TASK, reply)
    assert [t.agent for t in episode.trajectories] == ["policy", *2 * ["draft", "draft", "distiller"]]
    second, last = seen[3], seen[-1]
    assert all(f"Notes:\n{'n' * 10}" in prompt and "n" * 11 not in prompt for prompt in (second, last))
    assert "attempt" not in last.replace(ANSWER, "") and "attempt" in seen[2]
    assert episode.num_sequential == 2 * (len("attempt") + 99) + len("42")


def test_a_stopped_draft_is_left_out_of_the_notes():
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        if len(seen) == 1:
            raise AgentStopped
        return "ok"

    episode = play_scripted(ParallelDrafts(num_drafts=2), TASK, reply)
    assert "Attempt 2: ok" in seen[-1] and "Attempt 1" not in seen[-1]
    assert len(episode.trajectories) == 3


def test_what_a_draft_said_up_to_its_limit_is_in_the_notes():
    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return "far too long" if len(seen) == 1 else "ok"

    episode = play_scripted(ParallelDrafts(num_drafts=2, max_episode_tokens=12), TASK, reply)
    assert "Attempt 1: far to\n\nAttempt 2: ok" in seen[-1]
    assert episode.trajectories[1].outcome.kind == TRUNCATED


# ------------------------------------------------------------------------------------------------------------ research


def rounds_of(number: int) -> Callable[[str], str]:
    """A researcher that calls a tool in every round but the last."""

    def reply(prompt: str) -> str:
        count = len(re.findall(r"note", prompt))
        report = "<report>" + "note " * (count + 1) + "</report>"
        return f"{report}\nThe answer." if count + 1 == number else report + "\n" + call("double", number=count)

    return reply


def test_research_rounds_start_from_question_report_and_last_result():
    (trajectory,) = play_scripted(Research(tools=(f"{HERE}:double",)), TASK, rounds_of(3)).trajectories
    assert [len([*samples_of(trajectory)]), len(trajectory.turns)] == [3, 3]
    third = read(trajectory, 2)
    assert "the riddle" in third and "Your report so far:\nnote note\n" in third
    assert '"number": 1' in third and third.rstrip().endswith("2\n<assistant>"), "the last action and its result"
    assert '"number": 0' not in third, "and none before"


def test_the_workspace_does_not_grow_with_the_rounds():
    def reply(prompt: str) -> str:
        return "<report>" + "x" * 500 + "</report>" + call("double", number=1)

    workflow = Research(tools=(f"{HERE}:double",), max_rounds=20, max_report_chars=100)
    (trajectory,) = play_scripted(workflow, TASK, reply).trajectories
    lengths = [len(turn.prompt_ids) for turn in trajectory.turns]
    assert len(lengths) == 20 and len({*lengths[1:]}) == 1
    assert "x" * 100 in read(trajectory) and "x" * 101 not in read(trajectory)
    assert trajectory.outcome.kind is TRUNCATED


def test_a_round_without_a_report_keeps_the_one_before():
    def reply(prompt: str) -> str:
        if "known" in prompt.partition("Your report")[2]:
            return "done" if prompt.count("4") else call("double", number=2)
        return "<report>known</report>" + call("double", number=1)

    (trajectory,) = play_scripted(Research(tools=(f"{HERE}:double",)), TASK, reply).trajectories
    assert len(trajectory.turns) == 3 and "Your report so far:\nknown\n" in read(trajectory)


def test_first_rounds_of_shorter_successes_have_larger_advantages():
    def scored(number: int, reward: float) -> Episode:
        (trajectory,) = play_scripted(Research(tools=(f"{HERE}:double",)), TASK, rounds_of(number)).trajectories
        return Episode((Trajectory("policy", trajectory.turns, OK, reward),))

    step = group(0, episodes=meta_of((scored(4, 1.0), scored(2, 1.0), scored(3, 0.0))))
    first = {a.episode: a.advantage for a in EAPO(gamma=0.9).advantages(step) if a.sample == 0}
    assert first[1] > first[0] > first[2]


# ------------------------------------------------------------------------------------------------------- reconfiguring


def stages(mode: str) -> Callable[[str], str]:
    """One tool call, one reconfiguration, then the end."""

    def reply(prompt: str) -> str:
        if "Sub-goal: finish" in prompt:
            return call("terminate", answer="42")
        if "<tool>" not in prompt:
            return "secret\n" + call("double", number=21)
        return call("reconfigure", sub_goal="finish", strategy="fast", tools=[], knowledge="it is 42", mode=mode)

    return reply


@pytest.mark.parametrize(("mode", "num_samples"), [("basic", 1), ("truncation", 2)])
def test_the_next_stage_begins_with_the_new_configuration(mode: str, num_samples: int):
    (trajectory,) = play_scripted(Reconfiguring(tools=(f"{HERE}:double",)), TASK, stages(mode)).trajectories
    assert len([*samples_of(trajectory)]) == num_samples
    final = read(trajectory)
    assert "the riddle" in final and "Knowledge: it is 42\nTools: reconfigure, terminate" in final
    assert ("secret" in final) is (mode == "basic")
    assert said(trajectory)[-1] == call("terminate", answer="42")


def test_a_stage_has_its_tools_in_new_and_continued_contexts():
    """Stage 1 has both, stage 2 begins anew with `double`, stage 3 goes on with `halve`."""
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) == 3:
            return "done"
        mode = "truncation" if len(asked) == 1 else "basic"
        tools: list[Json] = ["double" if len(asked) == 1 else "halve"]
        return call("reconfigure", sub_goal="s", strategy="s", tools=tools, knowledge="k", mode=mode)

    workflow = Reconfiguring(tools=(f"{HERE}:double", f"{HERE}:halve"))
    (trajectory,) = play_scripted(workflow, TASK, reply).trajectories
    assert [text.count('"name": "double"') for text in asked] == [1, 1, 1]
    assert [text.count('"name": "halve"') for text in asked] == [1, 0, 1]
    assert len([*samples_of(trajectory)]) == 2, "the third stage goes on from the tokens of the second"


def test_a_tool_named_like_a_move_is_refused():
    with pytest.raises(ValueError, match="two tools are called 'terminate'"):
        Reconfiguring(tools=(f"{HERE}:terminate",))


def test_all_stages_share_one_label():
    (trajectory,) = play_scripted(Reconfiguring(tools=(f"{HERE}:double",)), TASK, stages("truncation")).trajectories
    labelled = Episode((Trajectory("policy", trajectory.turns, OK, 1.0),))
    (assigned,) = KTO().advantages(group(0, episodes=meta_of((labelled,))))
    assert (assigned.advantage, assigned.sample) == (1.0, None)


def test_a_stage_runs_only_the_tools_it_chose():
    def reply(prompt: str) -> str:
        if "No tool is called `double`" in prompt:
            return "I see"
        if "Sub-goal: finish" in prompt:
            return call("double", number=1)
        return stages("truncation")(prompt)

    (trajectory,) = play_scripted(Reconfiguring(tools=(f"{HERE}:double",)), TASK, reply).trajectories
    assert (said(trajectory)[-1], trajectory.outcome) == ("I see", OK)


def test_reconfiguring_with_an_unknown_tool_is_refused():
    def reply(prompt: str) -> str:
        wrong = call("reconfigure", sub_goal="s", strategy="s", tools=["magic"], knowledge="k", mode="truncation")
        return "done" if "There are no tools magic; there are double" in last(prompt) else wrong

    (trajectory,) = play_scripted(Reconfiguring(tools=(f"{HERE}:double",)), TASK, reply).trajectories
    assert len(trajectory.turns) == 2 and "Sub-goal: Solve the task." in read(trajectory)


def test_an_agent_that_only_reconfigures_is_truncated():
    def reply(prompt: str) -> str:
        return call("reconfigure", sub_goal="s", strategy="s", tools=[], knowledge="k", mode="truncation")

    (trajectory,) = play_scripted(Reconfiguring(tools=(), max_turns=5), TASK, reply).trajectories
    assert (len(trajectory.turns), trajectory.outcome.kind) == (5, TRUNCATED)


# ----------------------------------------------------------------------------------------------------------- self-play


@dataclass
class Solvers(ScriptedPolicy):
    """A proposer of one task, and solvers whose replies are counted up from 1."""

    proposal: str = "<task>Say an even number.</task>"
    num: int = 0

    def __post_init__(self) -> None:
        self.reply = self.say

    def say(self, prompt: str) -> str:
        if "Make one task" in prompt:
            return self.proposal
        self.num += 1
        return str(self.num)


@pytest.mark.parametrize(("attempts", "learnable"), [(1, 0.0), (2, 1.0), (3, 2 / 3), (4, 1.0)])
def test_solvers_are_rewarded_for_correctness_and_proposers_for_learnability(attempts, learnable):
    proposer, *solvers = play_scripted(
        SelfPlay(judge=f"{HERE}:is_even", attempts=attempts), TASK, Solvers()
    ).trajectories
    assert [solver.reward for solver in solvers] == [float(n % 2 == 0) for n in range(1, attempts + 1)]
    assert proposer.reward == pytest.approx(learnable)
    assert all("Say an even number." in read(s) and "the riddle" not in read(s) for s in solvers)


@pytest.mark.parametrize("proposal", ["no task at all", "<task> </task>", "<task>not closed"])
def test_a_proposal_without_a_task_earns_the_lowest_reward(proposal: str):
    episode = play_scripted(SelfPlay(judge=f"{HERE}:is_even"), TASK, Solvers(proposal=proposal))
    assert [t.reward for t in episode.trajectories] == [INVALID]


def test_a_task_that_was_only_thought_of_is_not_proposed():
    workflow = SelfPlay(judge=f"{HERE}:is_even", attempts=1)
    thought = "<think>what of <task>Say 1.</task>?</think><task>Say 2.</task>"
    assert workflow.read(thought) == "Say 2."
    assert workflow.read("<think><task>Say 1.</task>") is None


@dataclass(frozen=True, kw_only=True)
class SomeStop(SelfPlay):
    """The first solver has no room left, the tools of the second break."""

    async def solve(self, solver: Agent, task: str) -> str:
        if solver.index == 1:
            raise ContextFull("no room")
        if solver.index == 2:
            raise ToolError("gone")
        return await super().solve(solver, task)


def test_stopped_solvers_are_wrong_and_broken_ones_count_for_nothing():
    workflow = SomeStop(judge=f"{HERE}:is_even", attempts=4)
    proposer, stopped, broken, *others = play_scripted(workflow, TASK, Solvers()).trajectories
    assert stopped.reward == 0.0 and broken.reward is None and broken.outcome.is_failed
    assert [other.reward for other in others] == [0.0, 1.0]
    assert proposer.reward == pytest.approx(1 - abs(1 - 2 / 3))
