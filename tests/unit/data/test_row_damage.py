"""Damaged data files: the command line describes them, or refuses them in words."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

from pyarrow import Table, parquet

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
    inside = folder / "inside"
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    path = inside / random.choice(NAMES)
    rows = "".join(form.replace("{}", str(i)) + "\n" for i in range(random.randint(1, 9))).encode()
    path.write_bytes(CONVERSIONS.get("".join(path.suffixes), bytes)(rows))
    for _ in range(random.choice([1, 1, 3])):
        damage(path, random)
    place = inside if path.suffix == ".gz" or random.random() < 0.1 else path
    with suppress(RlsysError):
        inspect_data(str(place), columns=random.choice(COLUMNS), as_json=random.random() < 0.3)


def _parquet(rows: bytes) -> bytes:
    """Lists of mixed types, which Arrow has none of, as text."""
    lines = [json.loads(line) for line in rows.splitlines()]
    texts = [{k: json.dumps(v) if k == "ground_truth" else v for k, v in line.items()} for line in lines]
    out = io.BytesIO()
    parquet.write_table(Table.from_pylist(texts), out)
    return out.getvalue()


def _csv(rows: bytes) -> bytes:
    lines = [json.loads(line) for line in rows.splitlines()]
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0])
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue().encode()


NAMES = (*3 * ("rows.jsonl", "rows.json"), "rows.csv", "rows.parquet", "rows.jsonl.gz", "rows.csv.gz")
CONVERSIONS = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".jsonl.gz": gzip.compress,
    ".csv.gz": lambda rows: gzip.compress(_csv(rows)),
}
"""By the end of a file's name: what it holds, from rows as JSON lines."""
