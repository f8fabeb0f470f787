"""Damaged data files: the command line describes them, or refuses them in words."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random

from rlsys.cli import inspect_data
from rlsys.errors import RlsysError
from tests.damage import damage

FILES_PER_CASE = 10
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
FORMS = (
    {"prompt": "2+3?", "answer": 5, "id": "a-{}", "level": "easy"},
    {"prompt": MESSAGES, "ground_truth": [1, {"x": 2.5}], "info": "level {}"},
    {"prompt": MESSAGES, "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"index": "{}"}},
    {"prompt": MESSAGES, "reward_spec": {"method": "rule", "ground_truth": "5"}, "data_source": "{}"},
    {"messages": MESSAGES, "label": True, "info": {"number": "{}"}},
)
COLUMNS = (None, None, ["prompt=prompt"], ["answer=reward_model.ground_truth"], ["id=extra_info.index", "prompt=\x00"])


def test_a_damaged_file_is_described_or_refused_in_words(tmp_path: Path, fuzz_case: int) -> None:
    random = Random(fuzz_case)
    for _ in range(FILES_PER_CASE):
        describe_damaged(tmp_path, random)


def describe_damaged(folder: Path, random: Random) -> None:
    """Write a data file, damage it, and describe it."""
    form = json.dumps(random.choice(FORMS))
    path = folder / random.choice(["rows.jsonl", "rows.json"])
    path.write_text("".join(form.replace("{}", str(i)) + "\n" for i in range(random.randint(1, 9))))
    for _ in range(random.choice([1, 1, 3])):
        damage(path, random)
    with suppress(RlsysError):
        inspect_data(str(path), columns=random.choice(COLUMNS), as_json=random.random() < 0.3)
