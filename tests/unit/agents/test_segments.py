"""Thinking in segments: a reply that goes on from its own tokens, and probes that answer at every cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlsys.agents.workflow import Session, Workflow
from rlsys.batch.samples import samples_of
from rlsys.testing import FakeRun, ScriptedPolicy, play_scripted
from rlsys.types import Episode, Message, Prompt, Task
from rlsys.workflows.segments import Segments

TASK = Task(id="t", prompt="9 + 4?", answer="13")
THOUGHT = "aaaabbbbcc</think>"


class Thinker(ScriptedPolicy):
    """A policy that ends its replies with `$`."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return ("$",)


def thinking(thought: str = THOUGHT, answer: str = "13$") -> Callable[[str], str]:
    """Reply that thinks `thought`, wherever its thinking is cut, and answers after the thinking."""

    def reply(prompt: str) -> str:
        if prompt.endswith(">: "):
            return answer
        said = prompt.removeprefix("9 + 4?").rpartition("<assistant>")[2]
        return thought[len(said) :]

    return reply


def thought(reply: Callable[[str], str], *, has_chat: bool = False, **settings: object) -> Episode:
    chosen: dict[str, object] = {"segment_tokens": 4, "cue": ": ", **settings}
    return play_scripted(Segments(**chosen), TASK, Thinker(reply, has_chat_template=has_chat))  # type: ignore[arg-type]


def shown(episode: Episode) -> list[str]:
    """Last prompt and answer of each probe."""
    last = [t.turns[-1] for t in episode.trajectories[1:]]
    return ["".join(map(chr, turn.prompt_ids)) + turn.text for turn in last]


@pytest.mark.parametrize("has_chat", [False, True])
def test_a_reply_goes_on_from_its_own_tokens_as_one_sample(has_chat):
    root = thought(thinking(), has_chat=has_chat).trajectories[0]
    assert [turn.text for turn in root.turns] == ["aaaa", "bbbb", "cc</", "thin", "k>", "13$"]
    (sample,) = samples_of(root)
    trained = "".join(chr(i) for i, own in zip(sample.completion_ids, sample.is_trained, strict=True) if own)
    assert trained == THOUGHT + "13$"
    assert [turn for turn, _ in sample.turns] == list(range(len(root.turns)))
    assert sum(num for _, num in sample.turns) == sum(sample.is_trained)


def test_probes_answer_at_every_cut():
    episode = thought(thinking("aaaabbbbcccc"), max_segments=2)
    begin = "9 + 4?"
    assert shown(episode) == [
        f"{begin}</think>: 13$",
        f"{begin}aaaa</think>: 13$",
        f"{begin}aaaabbbb</think>: 13$",
    ]
    root, *probes = episode.trajectories
    assert [turn.text for turn in root.turns] == ["aaaa", "bbbb", "13$"]
    assert all(probe.is_judged and probe.parent == 0 and len(probe.turns) == 1 for probe in probes)


def test_a_thought_that_ends_is_cut_there():
    episode = thought(thinking("aa</think>"), segment_tokens=40)
    assert [turn.text for turn in episode.trajectories[0].turns] == ["aa</think>", "13$"]
    assert shown(episode) == ["9 + 4?</think>: 13$", "9 + 4?aa</think>: 13$"]


def test_a_policy_that_ends_its_reply_while_it_thinks_has_answered():
    episode = thought(thinking("aaaa13$"))
    assert [turn.text for turn in episode.trajectories[0].turns] == ["aaaa", "13$"]
    assert len(episode.trajectories) == 1 + 2  # cuts before, and after the first segment


def test_an_evaluation_has_no_probes():
    workflow = Segments(segment_tokens=4, cue=": ").in_evaluation()
    assert len(play_scripted(workflow, TASK, Thinker(thinking())).trajectories) == 1


def test_an_opened_thought_is_closed_once():
    prompt: Prompt = (Message(role="user", content="Q"), Message(role="assistant", content="<think>\n"))
    task = Task(id="t", prompt=prompt)
    asked: list[str] = []

    def reply(text: str) -> str:
        asked.append(text)
        return "13$" if text.endswith(">: ") else "aa</think>"

    play_scripted(Segments(segment_tokens=40, cue=": "), task, Thinker(reply))
    assert all(text.count("</think>") <= 1 for text in asked)


class ResumesTooEarly(Workflow):
    async def run(self, session: Session) -> None:
        await session.agent("policy").resume("more")


class ResumesEnded(Workflow):
    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        await agent.resume()


@pytest.mark.parametrize(
    ("workflow", "told"), [(ResumesTooEarly(), "has no reply to resume"), (ResumesEnded(), "has ended its reply")]
)
def test_only_a_cut_reply_can_be_resumed(workflow, told):
    with pytest.raises(Exception, match=told):
        play_scripted(workflow, TASK, Thinker(lambda prompt: "13$"))


def test_rewards_judge_probes_and_progress_is_trained(tmp_path):
    def solver(prompt: str) -> str:
        """Right only after a thought of two segments."""
        return ("13" if "bbbb" in prompt else "12") if prompt.endswith(": ") else THOUGHT[len(prompt) - len("9 + 4?") :]

    run = FakeRun(
        tmp_path,
        reply=solver,
        tasks=[Task(id="t", prompt="9 + 4?", answer="13")],
        algorithm="mrt",
        rollout={"workflow": {"type": "segments", "segment_tokens": 4, "max_segments": 2, "cue": ": "}},
        reward={"fn": "exact"},
        run={"steps": 1},
        train={"groups_per_step": 1},
    )
    assert run.train() == 1
    ((_, group),) = run.world.trained
    rewards = [t.reward for t in group.episodes[0].trajectories]
    assert rewards == [1.0, 0.0, 0.0, 1.0]
