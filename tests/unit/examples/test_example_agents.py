"""Examples of several agents: their episodes, rewards and warm start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from algorithms.eapo import EAPO
from examples.countdown_parallel import prepare as games
from examples.countdown_parallel import study as parallel_study
from examples.countdown_parallel.countdown import Countdown, solved, solves
from examples.lead_subagents import prepare as tables
from examples.lead_subagents.study import CASES, COMPARISON, figures_of, overrides_of
from examples.lead_subagents.table import TableFilling, item_f1
from examples.research import prepare as questions
from examples.research import study as research_study
from examples.research.chain import Chain, answered, looked_up
from examples.segments import prepare as sorting
from examples.segments import study as segments_study
from examples.study import Result, Trial, append, finished
from examples.tiny_policy import CHARACTERS, WarmStart, batch_of, build_tokenizer
from rlsys.batch.samples import samples_of
from rlsys.config import Config
from rlsys.testing import play_scripted
from rlsys.types import Task, Trajectory
from rlsys.workflows.segments import Segments

TABLE = Task(id="t", prompt="kbqaxe", answer="k47 b12 q80 a05 x31 e77")


def said(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.turns]


# -------------------------------------------------------------------------------------------------------------- table


def team(split: str, looked_up: Callable[[str, int], str] = lambda letters, n: letters[n : n + 1]) -> Callable:
    """A lead that splits the table so, and subagents that look up `looked_up` of their letters."""

    def reply(prompt: str) -> str:
        if prompt.startswith("L"):
            return split
        letters = prompt.removeprefix("S|").partition("=")[0]
        return looked_up(letters, prompt.count(";"))

    return reply


@pytest.mark.parametrize(
    ("width", "split", "reward"),
    [
        (3, "kbqaxe", 1.0),
        (2, "kbqa", 0.8),
        (1, "kb", 0.5),
        (3, "kbkbkb", 0.5),
        (3, "kkqqxx", 2 * 3 / 9),
        (1, "kbqaxe", 0.5),  # two are refused
        (3, "kbqa", 0.8),
        (3, "zz", 0.0),
        (3, "", 0.0),
        (3, "==:\n ", 0.0),
    ],
)
def test_a_table_is_worth_what_its_subagents_can_look_up(width: int, split: str, reward: float):
    lead, *subagents = play_scripted(TableFilling(max_subagents=width), TABLE, team(split)).trajectories
    assert lead.reward == pytest.approx(reward)
    assert [sub.reward for sub in subagents] == [None] * len(subagents), "they share their lead's"
    assert len(subagents) <= width


def test_what_a_subagent_is_told_is_not_trained():
    _, first, *_ = play_scripted(TableFilling(), TABLE, team("kbqaxe")).trajectories
    assert said(first) == ["k", "b"]
    assert "".join(map(chr, first.turns[-1].prompt_ids)) == "S|kb=k47;"
    (sample,) = samples_of(first)
    assert "".join(map(chr, sample.completion_ids)) == "k47;b"
    assert sample.is_trained == (True, False, False, False, True)


def test_rows_that_nobody_asked_for_count_against_a_table():
    assert play_scripted(TableFilling(), TABLE, team("kbqaxe", lambda letters, n: "zk"[n])).trajectories[
        0
    ].reward == pytest.approx(2 / (2 + 6))
    assert item_f1({"k": "48"}, {"k": "47"}) == 0.0


def test_demonstrations_of_tables_have_the_intended_error_rate():
    rng = Random(0)
    for is_careless, share in ((False, 1.0), (True, tables.RIGHT)):
        drawn = [tables.demonstration(rng, is_careless) for _ in range(3000)]
        wide = [(told[3:9], split) for ((told, split), *_) in drawn if told.startswith("L3")]
        right = sum(split == letters for letters, split in wide)
        assert right / len(wide) == pytest.approx(share, abs=0.07)
        assert all(set(told + said) <= set(CHARACTERS) for each in drawn for told, said in each)


# ---------------------------------------------------------------------------------------------------------- countdown


def player(signs: str, second: str, answer: str) -> Callable[[str], str]:
    """A parent that tries these first signs; children who try these second ones."""

    def reply(prompt: str) -> str:
        if prompt.startswith("P"):
            return answer if ">" in prompt else signs
        a, b, c = prompt[1:6].split(",")
        sign = prompt[len("C5,3,2=16")]
        return f"{a}{sign}{b}{second[prompt.count(';')]}{c}"

    return reply


GAME = Task(id="g", prompt="5,3,2=16", answer="")


def test_children_see_the_values_of_their_expressions_until_a_hit():
    parent, *children = play_scripted(Countdown(), GAME, player("-+", "+*-", "5+3*2")).trajectories
    assert [said(child) for child in children] == [["5-3+2", "5-3*2", "5-3-2"], ["5+3+2", "5+3*2"]]
    assert "".join(map(chr, children[0].turns[-1].prompt_ids)) == "C5,3,2=16-5-3+24;5-3*24;"
    assert "".join(map(chr, parent.turns[-1].prompt_ids)) == "P5,3,2=16:-+>5+3*2:"
    assert solved(said(parent)[-1], str(GAME.prompt)) == 1.0


def test_a_parent_of_children_that_find_nothing_is_told_nothing():
    parent, *children = play_scripted(Countdown(), GAME, player("--+*", "+++", "?")).trajectories
    assert len(children) == 3
    assert "".join(map(chr, parent.turns[-1].prompt_ids)) == "P5,3,2=16:--+*>:"
    assert solved(said(parent)[-1], str(GAME.prompt)) == 0.0


@pytest.mark.parametrize(
    ("expression", "is_solved"),
    [("5+3*2", 1), ("3+5*2", 1), ("5*3+2", 0), ("5+3*2*1", 0), ("9+7+0", 0), ("16", 0), ("", 0), ("5++3*2", 0)],
)
def test_a_game_is_solved_by_its_own_digits_alone(expression: str, is_solved: int):
    assert solves(expression, "5,3,2=16") == is_solved


def test_games_held_out_are_not_trained_on(tmp_path: Path):
    recipe = WarmStart(steps=1, batch_size=4, num_eval=5, num_train=5)
    games.prepare(tmp_path, recipe)
    parts = [
        [json.loads(line)["prompt"] for line in (tmp_path / name).open()] for name in ("eval.jsonl", "train.jsonl")
    ]
    rng = Random(recipe.seed)
    every = [games.new_game(rng) for _ in range(10)]
    assert len(set(every)) == 10 and parts == [every[:5], every[5:]]
    marked = (tmp_path / "prepared.json").stat().st_mtime_ns
    games.prepare(tmp_path, recipe)
    assert (tmp_path / "prepared.json").stat().st_mtime_ns == marked
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == 438_400
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "<eos>"  # pyrefly: ignore[missing-attribute]


def test_demonstrations_of_games_hit_unless_careless():
    rng = Random(1)
    for _ in range(200):
        game = games.new_game(rng)
        (_, signs), (told, answer) = games.of_parent(rng, game, is_careless=False)
        assert signs == "+-*" and solves(answer, game) and answer in told
        assert len({said for _, said in games.of_child(rng, game, is_careless=False)}) <= 3
    careless = [games.of_parent(rng, games.new_game(rng), is_careless=True) for _ in range(400)]
    solved = sum(solves(answer, told[1:-1]) for (told, _), (_, answer) in careless) / 400
    assert 0.3 < solved < 0.7


# ---------------------------------------------------------------------------------------------------------- imitation


def test_only_policy_text_and_its_end_token_are_learned():
    tokenizer = build_tokenizer()
    ids, targets = batch_of(tokenizer, [[("S|kb=", "k"), ("47;", "b")], [("S|k=", "")]])
    assert tokenizer.decode(ids[0]) == "S|kb=k<eos>47;b<eos>"
    learned = [tokenizer.decode([token for token in row.tolist() if token != -100]) for row in targets]
    assert learned == ["k<eos>b<eos>", "<eos>"]
    assert ids.shape == targets.shape


# -------------------------------------------------------------------------------------------------------------- study


@pytest.mark.parametrize("case", CASES)
def test_every_case_of_the_study_is_a_configuration(case: str):
    config = Config.load("examples/lead_subagents/run.yaml", overrides_of(case))
    assert isinstance(config.rollout.workflow, TableFilling)
    assert (case, config.rollout.workflow.max_subagents, config.algorithm.frozen_agents) in [
        ("joint-3", 3, ()), ("joint-2", 2, ()), ("joint-1", 1, ()),
        ("lead-3", 3, ("subagent",)), ("subagent-3", 3, ("lead",)),
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", parallel_study.CASES.values())
def test_parallel_work_is_rewarded_in_one_case_of_two(overrides: tuple[str, ...]):
    config = Config.load("examples/countdown_parallel/run.yaml", overrides)
    assert [spec.name for spec in config.reward_functions] in (["solved"], ["solved", "parallel"])
    rows = [
        {"step": s, "reward/by/solved": s / 20, "agents/sequential_tokens": 9.0, "agents/per_episode": 2.0}
        for s in range(1, 21)
    ]
    figures = parallel_study.figures_of([{"step": 0, "eval/held_out/mean": 0.1}, *rows])
    assert (figures["solved_before"], figures["solved"]) == pytest.approx((0.275, 0.775))


@pytest.mark.parametrize("overrides", segments_study.CASES.values())
def test_progress_is_rewarded_in_one_case_of_three(overrides: tuple[str, ...]):
    config = Config.load("examples/segments/run.yaml", overrides)
    assert isinstance(config.rollout.workflow, Segments)
    case = type(config.algorithm).__name__, config.rollout.workflow.probes, not config.rollout.early_ends
    assert case in (("GRPO", 0, True), ("MRT", 1, True), ("GRPO", 0, False))
    rows = [
        {"reward/mean": s / 100, "agents/per_episode": 2.0, "completions/length_mean": 15.625} for s in range(1, 41)
    ]  # 4,000 tokens each
    figures = segments_study.figures_of([{"step": 0, "eval/held_out/mean": 0.1}, *rows])
    assert (figures["at_100000"], figures["at_200000"]) == (pytest.approx(0.205), None)
    assert (figures["last"], figures["tokens"]) == pytest.approx((0.355, 160_000))


@pytest.mark.parametrize("overrides", research_study.CASES.values())
def test_rounds_are_discounted_in_one_case_of_two(overrides: tuple[str, ...]):
    config = Config.load("examples/research/run.yaml", overrides)
    assert isinstance(config.rollout.workflow, Chain)
    assert isinstance(config.algorithm, EAPO) and config.algorithm.gamma in (0.9, 1.0)
    rows = [{"reward/mean": s / 100, "agents/sequential_tokens": float(s)} for s in range(1, 31)]
    figures = research_study.figures_of(rows)
    assert (figures["right"], figures["tokens_before"]) == pytest.approx((0.255, 5.5))


def test_research_goes_on_from_its_report_alone():
    task = Task(id="t", prompt="a3", answer="x", info={"table": "ak,ke,ex"})
    seen: list[str] = []

    def researcher(prompt: str) -> str:
        seen.append(prompt)
        return {"a3;|:": "3a?a", "a3;3a|k:": "2k?k", "a3;2k|e:": "1e?e", "a3;1e|x:": "0x!x"}[prompt]

    episode = play_scripted(Chain(), task, researcher)
    assert len(seen) == 4 and answered(episode.trajectories[0].turns[-1].text, "x") == 1.0
    assert len(list(samples_of(episode.trajectories[0]))) == 4, "a sample for each round"


@pytest.mark.parametrize("reply", ["3a", "?q"])
def test_a_reply_that_is_no_action_ends_and_an_unknown_key_is_told(reply: str):
    task = Task(id="t", prompt="a1", info={"table": "ak"})
    episode = play_scripted(Chain(max_rounds=2), task, lambda prompt: reply)
    assert len(episode.trajectories[0].turns) == (1 if reply == "3a" else 2)
    assert looked_up("ak", "q") == "-"


def test_a_careful_round_of_research_leads_to_the_answer():
    rng = Random(0)
    for _ in range(200):
        ((prompt, reply),) = questions.demonstration(rng, is_careless=False)
        question = prompt.partition(";")[0]
        assert reply[-2] == ("!" if reply[0] == "0" else "?")
        assert int(reply[0]) <= int(question[1])


def test_a_demonstrated_thought_ends_in_order():
    rng = Random(0)
    for _ in range(50):
        ((prompt, reply),) = sorting.demonstration(rng, is_careless=False)
        thought, answer = reply.split(";")
        assert answer == "".join(sorted(prompt[:-1]))
        assert not thought or thought.split(",")[-2] == answer


def test_figures_are_of_the_evaluations_before_and_after():
    rows = [{"step": 0, "eval/held_out/mean": 0.4}, {"step": 1, "reward/mean": 0.5}]
    rows += [{"step": 2, "reward/mean": 0.6}, {"step": 2, "eval/held_out/mean": 0.7}]
    assert figures_of(rows) == {"f1_before": 0.4, "f1_after": 0.7}


def test_finished_runs_are_read_again_and_shown_seed_by_seed(tmp_path: Path):
    found = {s: Result({"f1_before": 0.5, "f1_after": 0.7 + s / 100, "cpu_s": 61.6}) for s in (0, 1)}
    results = {Trial("lead_subagents", overrides_of("lead-3"), seed, 60): each for seed, each in found.items()}
    for trial, result in results.items():
        append(tmp_path / "deep" / "runs.jsonl", trial, result)
    assert finished(tmp_path / "deep" / "runs.jsonl", results, Result) == results
    _, _, *body = COMPARISON.table({("the lead", "3"): found}).splitlines()
    assert body == ["| the lead | 3 | 0 / 1 | 0.500 / 0.500 | 0.700 / 0.710 | 62 / 62 |"]
