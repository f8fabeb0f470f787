"""The workflow `offline` trains completions and labels of a file unchanged, without sampling."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch

from algorithms.kto import KTO
from examples.tiny_policy import build_tokenizer
from rlsys.agents.workflow import SingleTurn
from rlsys.algorithm import Column
from rlsys.batch.packing import plan_batch
from rlsys.batch.samples import samples_in, samples_of
from rlsys.batch.tensors import StepData
from rlsys.config.plugins import WORKFLOWS
from rlsys.data.task_file import load_tasks
from rlsys.errors import ConfigError, DataError, TaskTooLong
from rlsys.testing import ScriptedPolicy
from rlsys.testing import play_scripted as play
from rlsys.types import OK, Assignment, Distribution, Episode, Group, GroupKey, Json, Message, Prompt, Task, VersionSpan
from rlsys.workflows.offline import Demonstrations, Offline
from tests.models import tiny_sorter
from tests.replicas import Shelf, played, replica_of, scripted, sessions_of
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.model.logprobs import score
from workers.text.tokenizer import TextTokenizer
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

SAMPLED = Distribution(1.0)

NUM_NEW = 7


def task(prompt: Prompt = "12>", **info: Json) -> Task:
    return Task(id="t", prompt=prompt, info=info)


def said(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def recorded(row: Task, policy: ScriptedPolicy) -> Episode:
    return play(Offline(), row, policy)


ASK = said("user", "2+3?")


# ------------------------------------------------------------------------------------------------------------ workflow


@pytest.mark.parametrize(("label", "reward"), [(True, 1.0), (False, 0.0), (1, 1.0), (0, 0.0)])
def test_a_recorded_completion_is_a_turn_rewarded_by_its_label(label: bool | int, reward: float) -> None:
    policy = ScriptedPolicy()
    (trajectory,) = recorded(task(completion="012", label=label), policy).trajectories
    (turn,) = trajectory.turns
    assert (trajectory.agent, trajectory.outcome, trajectory.reward) == ("policy", OK, reward)
    assert (turn.prompt_ids, turn.text, turn.finish) == (tuple(map(ord, "12>")), "012", "stop")
    assert policy.asked == []  # nothing was sampled


def test_only_assistant_messages_of_a_recorded_conversation_are_trained() -> None:
    turns: list[Json] = [
        {"role": "assistant", "content": "look up 3"},
        {"role": "tool", "content": "a fact"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "done"},
    ]
    row = task((said("system", "Be brief."), said("user", "go")), completion=turns, label=True)
    (trajectory,) = recorded(row, ScriptedPolicy()).trajectories
    assert [turn.text for turn in trajectory.turns] == ["look up 3", "done"]
    (sample,) = samples_of(trajectory)
    trained = [i for i, on in zip(sample.completion_ids, sample.is_trained, strict=True) if on]
    assert "".join(map(chr, trained)) == "look up 3done"
    everything = "".join(map(chr, (*sample.prompt_ids, *sample.completion_ids)))
    assert "a fact" in everything and "and?" in everything


def test_all_answers_of_a_demonstration_are_trained_with_their_tools_and_calls() -> None:
    call: Json = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages: list[Json] = [
        {"role": "user", "content": "2+?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
        {"role": "assistant", "content": "5"},
    ]
    tool: dict[str, Json] = {"type": "function", "function": {"name": "add", "parameters": {}}}
    row = Task(id="t", prompt=(said("user", "2+?"),), tools=(tool,), info={"messages": messages})
    episode = play(Demonstrations(), row, ScriptedPolicy())
    first, second = episode.trajectories[0].turns
    assert (first.text, second.text) == ('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "5")
    assert '"add"' in "".join(map(chr, first.prompt_ids)).partition("<user>")[0]
    assert episode.trajectories[0].reward == 1.0 and len(list(samples_of(episode.trajectories[0]))) == 1


def test_it_has_a_name_and_evaluations_let_the_policy_answer() -> None:
    assert isinstance(WORKFLOWS.read("offline"), Offline)
    assert isinstance(Offline().in_evaluation(), SingleTurn)
    same = SingleTurn()
    assert same.in_evaluation() is same


def test_preferred_and_rejected_answers_are_two_trajectories_of_an_episode() -> None:
    policy = ScriptedPolicy()
    chosen, rejected = recorded(task(chosen="012", rejected="0"), policy).trajectories
    assert [(t.reward, t.turns[0].text, t.outcome) for t in (chosen, rejected)] == [(1.0, "012", OK), (0.0, "0", OK)]
    assert {t.turns[0].prompt_ids for t in (chosen, rejected)} == {tuple(map(ord, "12>"))}
    assert policy.asked == []  # nothing was sampled


def test_a_label_may_be_of_a_whole_conversation() -> None:
    conversation: list[Json] = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "6"}]
    row = task((ASK,), messages=conversation, label=False)
    Offline().check([row], group_size=1, distribution=Distribution())
    (trajectory,) = recorded(row, ScriptedPolicy()).trajectories
    assert (trajectory.reward, [turn.text for turn in trajectory.turns]) == (0.0, ["6"])


def test_a_demonstration_may_be_the_chosen_answer_of_a_preference() -> None:
    (trajectory,) = play(Demonstrations(), task(chosen="012", rejected="0"), ScriptedPolicy()).trajectories
    assert (trajectory.turns[0].text, trajectory.reward) == ("012", 1.0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [said("assistant", "5")], "rejected": [said("assistant", "6")]},
        {"chosen": [ASK, said("assistant", "5")], "rejected": [ASK, said("assistant", "6")]},
        {"prompt": "2+3?", "chosen": [ASK, said("assistant", "5")], "rejected": [ASK, said("assistant", "6")]},
        {"prompt": [ASK], "chosen": [ASK, said("assistant", "5")], "rejected": [ASK, said("assistant", "6")]},
    ],
    ids=["apart", "in both", "as text too", "as messages too"],
)
def test_rows_of_preferences_have_one_prompt_in_every_form_of_the_field(row: dict[str, Json], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (one,) = load_tasks(path)
    Offline().check([one], group_size=1, distribution=Distribution())
    chosen, rejected = recorded(one, ScriptedPolicy()).trajectories
    assert one.prompt == (ASK,)
    assert [t.turns[0].text for t in (chosen, rejected)] == ["5", "6"]
    assert len({t.turns[0].prompt_ids for t in (chosen, rejected)}) == 1


def test_preferences_that_differ_early_share_the_prompt_before(tmp_path: Path) -> None:
    row = {
        "chosen": [ASK, said("assistant", "5"), said("user", "sure?"), said("assistant", "yes")],
        "rejected": [ASK, said("assistant", "6"), said("user", "sure?"), said("assistant", "no")],
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (one,) = load_tasks(path)
    chosen, rejected = recorded(one, ScriptedPolicy()).trajectories
    assert (one.prompt, [t.text for t in chosen.turns], [t.text for t in rejected.turns]) == (
        (ASK,),
        ["5", "yes"],
        ["6", "no"],
    )


def test_a_column_called_chosen_that_is_no_list_of_messages_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Which?", "answer": "A", "chosen": "A", "rejected": ["B", "C"]}) + "\n")
    (one,) = load_tasks(path)
    assert (one.prompt, one.info["chosen"], one.info["rejected"]) == ("Which?", "A", ["B", "C"])


# ------------------------------------------------------------------------------------------------------------ bad rows


ANSWER: list[Json] = [{"role": "assistant", "content": "x"}]
ASKED = (said("user", "go"),)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (task(label=True), "no `completion`; the row has prompt, label"),
        (task(completion="x", level=1), "no `label`; the row has prompt, completion, level"),
        (task(completion="x", label="yes"), "`label` is 'yes'; give true or false"),
        (task(completion="x", label=0.5), "`label` is 0.5; give true or false"),
        (task(completion="", label=True), "the `completion` is empty"),
        (task(completion=5, label=True), "`completion` is an int; give text or a list of messages"),
        (task(completion=ANSWER, label=True), "the `prompt` is text and the `completion` a list of messages"),
        (task(ASKED, completion=[], label=True), "the `completion` does not end with a message of the assistant"),
        (task(ASKED, completion=[{"role": "user", "content": "x"}], label=True), "does not end with a message of the"),
        (task(ASKED, completion=["x"], label=True), 'message 1 of the `completion` is not of the form {"role"'),
        (task(ASKED, completion=[*ANSWER, *ANSWER], label=True), "a message of the assistant that answers none"),
        (task(ASKED, completion=[{"role": "assistant", "content": ""}], label=True), "the `completion` is empty"),
        (task(chosen="x", rejected=""), "the `rejected` is empty"),
        (task(chosen=None, rejected="x"), "no `chosen`; the row has prompt, chosen, rejected"),
        (task(chosen=ANSWER, rejected=ANSWER), "the `prompt` is text and the `chosen` a list of messages"),
    ],
)
def test_unusable_rows_are_named_before_the_run_starts(row: Task, problem: str) -> None:
    good = task(completion="x", label=True)
    with pytest.raises(DataError) as raised:
        Offline().check([good, row, good], group_size=1, distribution=Distribution())
    first, second = str(raised.value).split("\n")
    assert first == "data.path: 1 row cannot be used by rollout.workflow=offline"
    assert second.startswith("  row 2: ") and problem in second


def test_of_many_bad_rows_ten_are_shown() -> None:
    with pytest.raises(DataError, match=r"12 rows cannot be used(.|\n)*row 10: .*\n  \.\.\. and 2 more$"):
        Offline().check([task(label=True)] * 12, group_size=1, distribution=Distribution())


def test_keys_that_make_no_sense_with_it_are_refused() -> None:
    rows = [task(completion="x", label=True)]
    with pytest.raises(ConfigError, match=r"^algorithm\.group_size: 8 episodes .* set it to 1 with"):
        Offline().check(rows, group_size=8, distribution=Distribution())
    with pytest.raises(ConfigError, match=r"^rollout\.temperature, top_p.* change nothing .* leave them at"):
        Offline().check(rows, group_size=1, distribution=Distribution(0.7))
    with pytest.raises(ConfigError, match="they change nothing that is recorded"):
        Offline().check(rows, group_size=1, distribution=Distribution(top_p=0.9))
    Offline().check(rows, group_size=1, distribution=Distribution())


def test_rows_of_trls_unpaired_preferences_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "12>", "completion": "12", "label": True}, {"prompt": "21>", "completion": "21", "label": False}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = load_tasks(path)
    Offline().check(tasks, group_size=1, distribution=Distribution())
    rewards = [recorded(one, ScriptedPolicy()).trajectories[0].reward for one in tasks]
    assert (rewards, [one.answer for one in tasks]) == ([1.0, 0.0], [None, None])


# ------------------------------------------------------------------------------------------------------------- replica


def local_engine(model: torch.nn.Module) -> LocalEngine:
    spec = EngineSpec(model_path="", slots=4, max_context=60 + NUM_NEW)
    return LocalEngine(model, spec, stop_token_ids=frozenset({1}), name="rollout-0")  # type: ignore[arg-type]


def rolled_out(
    engine: LocalEngine | ScriptedEngine, *rows: Task, shelf: Shelf | None = None
) -> list[tuple[Group, tuple[Episode, ...]]]:
    """The groups of the rows, played with the engine, which is closed after them."""
    replica = replica_of(shelf, engine)
    worker = sessions_of(replica, workflow=Offline(), num_tokens=NUM_NEW)

    async def scenario() -> list[tuple[Group, tuple[Episode, ...]]]:
        assignments = [Assignment(GroupKey(group_id, 1), row, 1, 0, seed=1) for group_id, row in enumerate(rows)]
        done = await asyncio.gather(*(worker.run(one) for one in assignments))
        return [(rolled[0], payload) for rolled, payload in done]

    return played([worker, replica], scenario)


def test_recorded_tokens_have_engine_logprobs_and_the_stop_token() -> None:
    model = tiny_sorter()
    ((group, payload),) = rolled_out(local_engine(model), task(completion="021", label=False))
    (turn,) = payload[0].trajectories[0].turns
    assert turn.output_ids == (*TextTokenizer(build_tokenizer()).encode("021"), 1)
    (expected,) = score(tiny_sorter(), [s for _, s in samples_in(payload)], SAMPLED, max_tokens=64)
    assert turn.logprobs == pytest.approx(expected, abs=1e-5)
    assert group.versions == (VersionSpan(0, 4),)
    assert (turn.text, payload[0].trajectories[0].reward) == ("021", 0.0)


def test_a_completion_that_ends_already_is_not_ended_twice() -> None:
    codec = TextTokenizer(build_tokenizer())
    assert codec.reply("12<eos>") == codec.reply("12") == (*codec.encode("12"), 1)


@pytest.mark.parametrize(("prompt", "completion"), [("12>", "0123456"), ("1" * 60, "012345")])
def test_an_overlong_recorded_completion_is_refused_as_too_long(prompt: str, completion: str) -> None:
    fits = task(prompt, completion=completion[:-1], label=True)
    ((group, _),) = rolled_out(local_engine(tiny_sorter()), fits)
    assert group.num_trained == len(completion)
    with pytest.raises(TaskTooLong, match=r"encoding a recorded completion: . tokens .*rollout\.max_new_tokens"):
        rolled_out(local_engine(tiny_sorter()), task(prompt, completion=completion, label=True))


class Changing(ScriptedEngine):
    """Its weights change under the first scoring."""

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        logprobs = await super().score(token_ids)
        if self.version == 0:
            self.version = 1
            return tuple(-9.0 for _ in logprobs)
        return logprobs


def test_tokens_are_stamped_with_the_version_they_were_scored_under() -> None:
    engine = Changing(lambda request: "", version=0)
    ((group, payload),) = rolled_out(engine, task(completion="021", label=True))
    assert group.versions == (VersionSpan(1, 4),)
    assert payload[0].trajectories[0].turns[0].logprobs == (0.0,) * 4


def test_versions_are_those_that_the_replica_vouches_for() -> None:
    engine = scripted("rollout-0")
    ((group, _),) = rolled_out(engine, task(completion="021", label=True), shelf=Shelf(version=3))
    assert (group.versions, [w.version for w in group.weights]) == ((VersionSpan(3, 4),), [3])


# ------------------------------------------------------------------------------------------------------------ training


def test_kto_learns_offline_and_engine_logprobs_match_the_trainer(tmp_path: Path) -> None:
    model = tiny_sorter()
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    rng = random.Random(0)
    numbers = ["".join(rng.choices("0123456789", k=3)) for _ in range(16)]
    rows = [
        task(f"{n}>", completion="".join(sorted(n, reverse=i % 2 == 1)), label=i % 2 == 0)
        for i, n in enumerate(numbers)
    ]
    done = rolled_out(local_engine(model), *rows)
    groups, payloads = [group for group, _ in done], [payload for _, payload in done]
    kto = KTO(group_size=1, beta=0.5, variant="apo_zero_unpaired")
    settled = kto.finalize_advantages(groups, {})
    assert settled.metrics == {"kto/desirable_frac": 0.5}
    plan = plan_batch(groups, settled.groups, kto.aggregation, num_ranks=1, max_tokens=512)[0]
    columns = [
        {Column.REFERENCE_LOGPROBS: score(tiny_sorter(), [s for _, s in samples_in(payload)], SAMPLED, max_tokens=64)}
        for payload in payloads
    ]
    backend = FsdpBackend(str(tmp_path), OptimizerSettings(lr=1e-2, total_steps=10), RankGroup())
    data = StepData(payloads, columns)
    metrics = [backend.train_step(plan, data, kto, distribution=SAMPLED) for _ in range(8)]
    assert metrics[0]["sampler/logp_diff_max"] < 1e-4
    assert metrics[-1]["kto/margin"] > 0.2 and metrics[-1]["loss"] < metrics[0]["loss"]
