"""Files of mutated rows in five formats: each is read as its text says, or refused by the place of a row."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import ArrowInvalid, ArrowTypeError

from rlsys.data.row_adapters import json_text
from rlsys.data.task_file import load_tasks
from rlsys.errors import DataError
from tests.unit.data.test_row_files import WRITERS, Rows, cell_of, write_lines

Row = dict[str, Any]
FILES = 300
TEXTS = (
    "2+3?", "012358", "1.50", "NA", "\u202eabc", "\U0001f600" * 40, "a\tb\nc", '"quoted", and more', "x" * 100_000,
    "\0",
)  # fmt: skip
BLANK = ("", "  \n", None)
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]
ODD = (5, True, [], [5], {"a": None}, [{"role": "user"}], [{"content": "x"}], IMAGE)
ANSWERS = ("5", "05", " 5 ", 5, -7, 0.5, 3.0, True, False, None, ["5", 6], {"b": 1, "a": [None]}, 2.0**60)


def write_packed(path: Path, rows: Rows) -> None:
    write_lines(path.with_suffix(""), rows)
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    path.with_suffix("").unlink()


FORMATS: dict[str, Callable[[Path, Rows], None]] = {**WRITERS, "rows.jsonl.gz": write_packed}


def mutated(rng: random.Random) -> list[Row]:
    """Rows of one kind of prompt, of which some are mutated."""
    conversation = rng.random() < 0.3
    rows: list[Row] = []
    for _ in range(rng.randint(1, 6)):
        text = rng.choice(TEXTS[:4])
        row: Row = {"prompt": [{"role": "user", "content": text}] if conversation else text, "answer": "5"}
        for _ in range(rng.choice([0, 0, 1, 2])):
            mutation = rng.randrange(6)
            if mutation == 0:
                row["prompt"] = rng.choice(TEXTS)
            elif mutation == 1 and rng.random() < 0.3:
                row["prompt"] = rng.choice((*BLANK, *ODD))
            elif mutation == 2:
                row["answer"] = rng.choice(ANSWERS)
            elif mutation == 3:
                del row["answer"]
                row["answer"] = None
            elif mutation == 4:
                nest: Any = rng.choice(TEXTS[:8])
                for _ in range(rng.randint(1, 60)):
                    nest = [nest]
                row["level"] = nest
            else:
                row[rng.choice(["näme", "level", "messages_", "Prompt"])] = rng.choice(TEXTS[:8])
        rows.append(row)
    return rows


def as_cells(row: Row) -> Row:
    """The row as CSV says it: every value is text, but for lists of messages; an empty one is nothing."""
    cells = {name: cell_of(value) or None for name, value in row.items()}
    is_messages = isinstance(row["prompt"], list) and row["prompt"] and isinstance(row["prompt"][0], dict)
    return {**cells, "prompt": row["prompt"]} if is_messages else cells


def expected(row: Row) -> tuple[Any, str | None] | None:
    """The prompt and the answer of a row's task; None if it is refused."""
    prompt, answer = row["prompt"], row.get("answer")
    if isinstance(prompt, list):
        is_valid = bool(prompt) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
        prompt = tuple(prompt)
    else:
        is_valid = isinstance(prompt, str) and bool(prompt.strip())
    if not is_valid or (isinstance(answer, float) and abs(answer) >= 2.0**53):
        return None
    if isinstance(answer, bool | list | dict):
        return prompt, json_text(answer)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return prompt, None if answer is None else str(answer)


def read(path: Path) -> list[tuple[Any, str | None]] | str:
    try:
        return [(task.prompt, task.answer) for task in load_tasks(path, {"id": None})]
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_mutated_rows_is_read_as_it_says_or_refused_by_the_place_of_a_row(name: str, tmp_path: Path) -> None:
    num_read = num_refused = 0
    for seed in range(FILES // len(FORMATS)):
        rows, path = mutated(random.Random(seed)), tmp_path / f"{seed}-{name}"
        try:
            FORMATS[name](path, rows)
        except (ArrowInvalid, ArrowTypeError):
            continue  # Arrow has no columns of mixed types
        wanted: Sequence[Any] = [expected(as_cells(row) if name == "rows.csv" else row) for row in rows]
        found = read(path)
        if None in wanted:
            assert isinstance(found, str), (seed, rows)
            first = list(wanted).index(None) + 1
            is_named = f"{path}: row {first}: " in found or f"{path}:{first}: " in found
            assert is_named or name == "rows.csv", (seed, found)  # its lines are not its rows
            num_refused += 1
        else:
            assert found == list(wanted), (seed, json.dumps(rows)[:500])
            num_read += 1
    assert num_read > 20 and num_refused > 0
