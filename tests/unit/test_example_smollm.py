"""SmolLM2's tasks; the model itself is converted by the demo."""

import json

from examples.smollm.prepare import SHOTS, Recipe, chat, draw_triples, write_rows
from rlsys.data.rows import load_tasks

TOY = Recipe(num_train=64, num_eval=16)


def test_triples_are_distinct_two_digit_and_never_a_shot():
    triples = draw_triples(TOY)
    assert len(set(triples)) == len(triples) == 80
    assert all(10 <= number <= 99 for triple in triples for number in triple)
    assert all(len(set(triple)) == 3 for triple in triples)
    assert not set(triples) & set(SHOTS)


def test_the_chat_shows_two_solved_examples_and_ends_with_the_question():
    messages = chat((59, 63, 15))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in messages[1:]] == ["12 47 31", "47", "85 20 66", "85", "59 63 15"]


def test_the_rows_load_as_tasks_whose_answer_is_the_largest(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [(59, 63, 15)])
    assert json.loads((tmp_path / "rows.jsonl").read_text())["answer"] == "63"
    (task,) = load_tasks(tmp_path / "rows.jsonl")
    assert task.answer == "63"
    assert task.prompt == tuple(chat((59, 63, 15)))
