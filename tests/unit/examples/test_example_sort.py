"""The tiny policy's tokenizer, tasks, demonstrations and reward."""

import json

import pytest
from transformers import AutoTokenizer

from algorithms.kto import KTO
from algorithms.sft import SFT
from examples.demo import draw_curve
from examples.sort import mixture, two_stage
from examples.sort.prepare import Recipe, accuracy, demonstrations, draw_prompts, prepare, right_answer
from examples.sort.reward import exact_sort
from examples.study import running_mean
from examples.tiny_policy import CHARACTERS, build_tokenizer, new_model
from rlsys.config import Config

TOY = Recipe(seed=3, steps=1, batch_size=8, num_train=16, num_eval=4)


@pytest.mark.parametrize("case", two_stage.CASES)
def test_the_stages_of_every_case_are_configurations_of_equally_many_steps(case: str):
    stages = two_stage.CASES[case]
    kinds = [type(Config.load("examples/sort/run.yaml", [override]).algorithm) for override, _ in stages]
    assert kinds in ([KTO], [SFT, KTO], [SFT])
    assert sum(share for _, share in stages) == 1


@pytest.mark.parametrize("weights", mixture.WEIGHTS)
def test_a_case_of_the_mixture_has_three_sources_at_equal_weights(weights: str):
    config = Config.load("examples/sort/run.yaml", mixture.CASES[weights,])
    assert [(source.name, source.weight) for source in config.data.sources] == [(n, 1.0) for n in mixture.NAMES]
    assert config.curation.source_weights == weights


def test_one_source_teaches_one_is_solved_and_one_hopeless():
    rows = [{"prompt": right_answer(p)[::-1] + ">", "answer": right_answer(p)} for p in ("385120>", "213>", "98>")]
    sources = mixture.sources_of(rows)
    assert sources["useful"] == [rows[0]]
    assert sources["solved"][0]["prompt"] == sources["solved"][0]["answer"] + ">"
    assert not exact_sort(right_answer(sources["hopeless"][0]["prompt"]), sources["hopeless"][0]["answer"])


def test_every_character_is_one_id_and_comes_back():
    tokenizer = build_tokenizer()
    ids = tokenizer(CHARACTERS).input_ids
    assert len(set(ids)) == len(CHARACTERS) == len(tokenizer) - 2 == 88
    assert tokenizer.decode(ids) == CHARACTERS


def test_a_prompt_is_seven_ids_without_a_start_token():
    assert len(build_tokenizer()("385120>").input_ids) == 7


def test_a_character_outside_the_vocabulary_is_refused():
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer()("é")


def test_decoding_leaves_the_end_token_out():
    tokenizer = build_tokenizer()
    ids = [*tokenizer("012358").input_ids, tokenizer.get_vocab()["<eos>"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "012358"


def test_a_row_is_a_prompt_and_its_sorted_digits():
    assert right_answer("385120>") == "012358"


def test_evaluation_training_and_demonstrations_share_no_prompt():
    parts = draw_prompts(TOY)
    prompts = [prompt for part in parts for prompt in part]
    assert [len(p) for p in parts] == [4, 16, 8]
    assert len(set(prompts)) == len(prompts)


def test_demonstrations_mix_three_modes_in_shares_of_the_recipe():
    recipe = Recipe(seed=0, steps=10, batch_size=100)
    tokenizer = build_tokenizer()
    _, _, prompts = draw_prompts(recipe)
    texts = tokenizer.batch_decode(tokenizer([*demonstrations(prompts, recipe)]).input_ids)
    counts = {"right": 0, "descending": 0, "copy": 0}
    for text in texts:
        asked, _, answered = text.removesuffix("<eos>").partition(">")
        ascending = "".join(sorted(asked))
        counts["right" if answered == ascending else "descending" if answered == ascending[::-1] else "copy"] += 1
        assert answered in (ascending, ascending[::-1], asked)
    assert counts["right"] == pytest.approx(500, abs=50)
    assert counts["descending"] == pytest.approx(250, abs=50)


def test_the_policy_has_0_44_million_parameters():
    model = new_model(build_tokenizer(), seed=0)
    assert sum(p.numel() for p in model.parameters()) == 438_400


def test_only_the_answer_and_nothing_else_is_rewarded():
    assert exact_sort("012358", "012358") == 1.0
    assert exact_sort("012385", "012358") == exact_sort("0123580", "012358") == exact_sort("", "012358") == 0.0


def test_a_policy_that_knows_nothing_scores_nothing():
    tokenizer = build_tokenizer()
    assert accuracy(new_model(tokenizer, seed=0), tokenizer, ["385120>"], greedy=True) == 0.0


def test_preparing_twice_does_the_work_once_with_equal_files(tmp_path):
    figures = prepare(tmp_path, TOY)
    written = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    assert prepare(tmp_path, TOY) == figures
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == written
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == TOY.num_train
    assert set(rows[0]) == {"prompt", "answer"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer is not None
    assert tokenizer("385120>").input_ids == [5, 10, 7, 3, 4, 2, 85]


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "target"), [(4, 0.05), (3, 0.15)])
def test_a_warm_start_ends_at_its_target_whatever_the_seed(tmp_path, seed: int, target: float):
    figures = prepare(tmp_path, Recipe(seed=seed, target=target, num_eval=256))
    assert figures["expected"] == pytest.approx(target, abs=0.01)
    standard_error = (target * (1 - target) / 256) ** 0.5
    assert figures["sampled"] == pytest.approx(figures["expected"], abs=3 * standard_error)


def test_a_running_mean_covers_what_there_is_so_far():
    assert running_mean([1, 3, 5], window=2) == [1, 2, 4]


def test_the_reward_curve_is_drawn_into_the_run_directory(tmp_path):
    rows = [{"step": step, "reward/mean": step / 10} for step in range(1, 5)]
    rows.insert(2, {"step": 0, "eval/held_out/mean": 0.2})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw_curve(tmp_path, "title").read_bytes().startswith(b"\x89PNG")
