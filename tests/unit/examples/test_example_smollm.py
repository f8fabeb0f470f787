"""SmolLM2's tasks; the model itself is converted by the demo."""

from examples.smollm.prepare import Recipe, chat, draw_tasks, draw_triples
from examples.tiny_policy import write_tasks
from rlsys.data.task_file import load_tasks

TOY = Recipe(num_train=64, num_eval=16)


def test_triples_are_distinct_and_of_distinct_two_digit_numbers():
    triples = draw_triples(TOY)
    assert len(set(triples)) == len(triples) == 3 * 80
    assert all(10 <= number <= 99 for triple in triples for number in triple)
    assert all(len(set(triple)) == 3 for triple in triples)


def test_the_chat_has_two_solved_examples_before_the_question():
    messages = chat([(12, 47, 31), (85, 20, 66)], (59, 63, 15))
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in messages] == [
        "Max of 12, 47, 31?",
        "47",
        "Max of 85, 20, 66?",
        "85",
        "Max of 59, 63, 15?",
    ]


def test_the_rows_load_as_tasks_whose_answer_is_the_largest(tmp_path):
    write_tasks(tmp_path, draw_tasks(TOY), TOY.num_eval)
    train, evaluation = load_tasks(tmp_path / "train.jsonl"), load_tasks(tmp_path / "eval.jsonl")
    assert (len(train), len(evaluation)) == (64, 16)
    for task in (*train, *evaluation):
        assert isinstance(task.prompt, tuple)
        numbers = task.prompt[-1]["content"].removeprefix("Max of ").removesuffix("?").split(", ")
        assert task.answer == max(numbers)
