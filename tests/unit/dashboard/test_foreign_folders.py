"""Run folders from someone else: attempts on whoever reads them, each of which fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlsys.dashboard.index.index_cache import index_path
from rlsys.dashboard.query.queries import Readings
from rlsys.loop.checkpoint_files import problem_of
from rlsys.replay.rollout_parquet import ROLLOUT_FORMAT
from tests.by_day import first_by_day
from tests.foreign import Reading, foreign_configuration, foreign_index, foreign_run, problems_of, read_all, spoil

pytestmark = pytest.mark.slow

FOLDERS_PER_CASE = 3
CONFIGURATIONS_PER_CASE = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_run(tmp_path_factory.mktemp("foreign") / "run")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "runs" / "run")


def read(run: Path, *commands: str) -> Sequence[Reading]:
    """Let commands read the run; they may not take much, or end with an error that is none of ours."""
    found = read_all(run, run.parent.parent / "out", commands)
    assert found
    assert problems_of(found) == []
    return found


@pytest.mark.parametrize("case", first_by_day(range(1000)))
def test_no_spoilt_folder_harms_its_reader(whole: Path, tmp_path: Path, case: int) -> None:
    for number in range(FOLDERS_PER_CASE * case, FOLDERS_PER_CASE * (case + 1)):
        home = tmp_path / str(number)
        run = shutil.copytree(whole, home / "runs" / "run")
        (home / "mine").write_text("mine")
        spoil(run, Random(number), home / "mine")
        before = {path: path.lstat().st_mtime_ns for path in [run, *run.rglob("*")]}
        assert problems_of(read_all(run, home / "out")) == [], f"folder {number}"
        assert {path: path.lstat().st_mtime_ns for path in [run, *run.rglob("*")]} == before
        assert sorted(path.name for path in home.iterdir()) == ["mine", "out", "runs"]
        assert (home / "mine").read_text() == "mine"
        assert {path.name for path in (home / "out").iterdir()} <= {"cache", "report.html", "profile.yaml", "template"}
        shutil.rmtree(home)


@pytest.mark.parametrize("case", first_by_day(range(20)))
def test_what_a_foreign_configuration_names_is_neither_run_nor_read(
    whole: Path, tmp_path: Path, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(CONFIGURATIONS_PER_CASE * case, CONFIGURATIONS_PER_CASE * (case + 1)):
        home = tmp_path / str(number)
        run, private = shutil.copytree(whole, home / "runs" / "run"), home / "private"
        private.write_text("SECRET") if number % 2 else os.mkfifo(private)  # who opens a pipe waits for ever
        foreign_configuration(run, Random(number), private, home / "ran")
        monkeypatch.chdir([run, run.parent, home][number % 3])
        before = sorted(run.rglob("*"))
        assert problems_of(read_all(run, home / "out")) == [], f"configuration {number}"
        assert sorted(run.rglob("*")) == before
        assert sorted(path.name for path in home.iterdir()) == ["out", "private", "runs"]
        assert not [path for path in (home / "out").rglob("*") if path.is_file() and b"SECRET" in path.read_bytes()]


def test_a_whole_folder_is_read_by_every_command(run: Path) -> None:
    assert len(read(run)) > 30


def test_an_index_in_a_run_is_neither_opened_nor_changed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    foreign_index(run, tmp_path / "mine")
    before = {path: path.read_bytes() for path in run.glob("index.sqlite*")}
    read(run, "query", "page")
    assert (tmp_path / "mine").read_text() == "mine"
    assert {path: path.read_bytes() for path in run.glob("index.sqlite*")} == before


def test_a_step_of_billions_takes_no_memory(run: Path) -> None:
    events = run / "events.jsonl"
    step = {"kind": "step_done", "time_s": 1.8e9, "step": 4_000_000_000, "metrics": {"reward/mean": 1.0}}
    back = {"kind": "rolled_back", "time_s": 1.8e9, "restored": 0, "version": 4_000_000_000, "total_steps": 9}
    with events.open("ab") as file:
        file.writelines(orjson.dumps(row) + b"\n" for row in (step, back, {**step, "step": 2, "group_ids": [3, 4, 5]}))
    (run / "rollouts" / "step_000003.parquet").rename(run / "rollouts" / "step_4000000000.parquet")
    shutil.copy(run / "rollouts" / "step_000002.parquet", run / "rollouts" / f"step_{'9' * 200}.parquet")
    read(run)


def test_a_span_of_billions_of_tokens_takes_no_memory(run: Path) -> None:
    from tests.rollouts import lines_of, write_lines

    path = run / "rollouts" / "step_000001.parquet"
    groups = lines_of(path)
    for group in groups:
        for trajectory in group["episodes"][0]["trajectories"]:
            for turn in trajectory["turns"]:
                turn["versions"][0]["num_tokens"] = 4_000_000_000
    write_lines(path, groups)
    read(run)


def _grown(parts: str, depth: int) -> str:
    """Aliases of aliases: eight times as many values with each level."""
    return ", ".join(f"a{i}: &a{i} {parts.replace('*', f'*a{i - 1}' if i else '1')}" for i in range(depth))


@pytest.mark.parametrize(
    "text",
    [
        f"run: {{name: x, {_grown('{' + ', '.join(f'{key}: *' for key in 'abcdefgh') + '}', 7)}}}\n",
        f"run: {{name: x, {_grown('{' + ', '.join(f'{key}: *' for key in 'abcdefgh') + '}', 40)}}}\n",
        f"run: {{name: x, {_grown('[' + ', '.join('*' * 8) + ']', 40)}}}\n",
        "run: {name: x, a0: &a0 {b: 1}, "
        + ", ".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 8)}]}}" for i in range(1, 12))
        + "}\n",
        f"run: {{name: x, long: &long {'y' * 100_000}, many: [{', '.join(['*long'] * 9000)}]}}\n",
        f"run: {{name: x, long: &long {{{'y' * 1000}: 1}}, many: [{', '.join(['*long'] * 9000)}]}}\n",
        "a: [" + "b, " * 60_000 + "]\n",
        "a: &a {b: *a}\n",
        "- " * 50_000,
        "x" * 100_000_000,
    ],
    ids=["mappings", "deeper", "lists", "merged", "long texts", "long keys", "dense", "itself", "nested", "large"],
)
def test_a_configuration_that_grows_is_shown_as_text(run: Path, text: str) -> None:
    (run / "config.resolved.yaml").write_text(text)
    read(run, "page", "export")
    shown = Readings(run.parent).run("run").config
    assert shown == ("" if len(text) > 2**20 else text)


def _rollout_file(path: Path, num_rows: int, *, is_plain: bool = False, **texts: str) -> None:
    """Write a small file whose rows are alike."""
    (row,) = pq.read_table(path).slice(0, 1).to_pylist()
    row |= texts
    schema = pq.read_schema(path)
    table = pa.Table.from_pylist([row], schema)
    many = pa.concat_tables([table] * num_rows).combine_chunks() if num_rows > 1 else table
    many = many.replace_schema_metadata({b"rlsys.record_v": str(ROLLOUT_FORMAT).encode()})
    pq.write_table(many, path, compression="zstd", row_group_size=2**30, use_dictionary=not is_plain)


def test_pages_that_decode_to_more_than_the_file_says_are_not_read(run: Path) -> None:
    path = run / "rollouts" / "step_000001.parquet"
    _rollout_file(path, 1, is_plain=True, text="t" * 600_000_000)
    row_group = pq.read_metadata(path).row_group(0)
    column = next(c for c in map(row_group.column, range(row_group.num_columns)) if c.path_in_schema == "text")
    true_size = _thrift_integer(column.total_uncompressed_size)
    data = path.read_bytes()
    assert data.count(true_size) == 1
    path.write_bytes(data.replace(true_size, _thrift_integer(100, len(true_size))))
    read(run, "query", "profile", "page")


def _thrift_integer(value: int, num_bytes: int = 0) -> bytes:
    """A number as Thrift's compact protocol writes it, in more bytes than it needs where `num_bytes` says so."""
    left, found = 2 * value, bytearray()
    while left or len(found) < max(1, num_bytes):
        found.append(left & 127 | 128)
        left >>= 7
    found[-1] &= 127
    return bytes(found)


@pytest.mark.parametrize("is_plain", first_by_day([True, False]))
@pytest.mark.parametrize(
    ("num_rows", "texts"),
    first_by_day(
        [
            (40_000, {}),
            (2_000, {"session": '{"episode": ' + "[" * 100_000}),
            (20_000, {"prompt": "p" * 10_000}),
            (200_000, {}),
            (1, {"text": "t" * 200_000_000}),
            (1, {"session": "[" + "[]," * 30_000_000 + "1]"}),
        ],
        3,
    ),
)
def test_a_small_file_of_rollouts_does_not_grow_when_it_is_read(
    run: Path, tmp_path: Path, num_rows: int, texts: dict[str, str], is_plain: bool
) -> None:
    _rollout_file(run / "rollouts" / "step_000001.parquet", num_rows, is_plain=is_plain, **texts)
    read(run, "query", "profile", "page")
    cache = tmp_path / "out" / "cache"
    index = index_path(run, {"XDG_CACHE_HOME": str(cache)})
    assert index.stat().st_size < 2**28


FILES = (
    "events.jsonl", "checkpoints/step_000002/actor/other.safetensors", "checkpoints/step_000002/manifest.json",
    "rollouts/step_000001.parquet", "config.resolved.yaml", "metrics.jsonl", "run.lock", "logs/rollout-0.log",
    "machine/rollout-0.jsonl", "evaluations/held_out/step_000002.json", "checkpoints/latest",
    "checkpoints/step_000002/driver.json", "checkpoints/step_000002/groups.jsonl",
    "checkpoints/step_000002/actor/model.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", first_by_day(FILES, 4))
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_not_waited_for(run: Path, name: str, kind: str) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    read(run)
    problem = problem_of(run / "checkpoints" / "step_000002")
    assert (problem is not None) == ("step_000002/" in name and "checkpoints" in name)


@pytest.mark.parametrize("name", ["/dev/zero", "../../../mine", "actor/../../../../mine"])
def test_a_manifest_lists_no_file_elsewhere(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("")
    manifest = run / "checkpoints" / "step_000002" / "manifest.json"
    listed = orjson.loads(manifest.read_bytes()) | {
        name: {"num_bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
    }
    manifest.write_bytes(orjson.dumps(listed))
    read(run, "export")
    assert "which is not in its folder" in (problem_of(manifest.parent) or "")


@pytest.mark.parametrize("name", first_by_day(["events.jsonl", "metrics.jsonl", "logs/rollout-0.log"]))
@pytest.mark.parametrize("line", [b"\0", b"[", b'{"kind":"step_done",'], ids=["zeros", "brackets", "beginnings"])
def test_a_line_without_an_end_takes_little_memory(run: Path, name: str, line: bytes) -> None:
    with (run / name).open("ab") as file:
        file.write(line * (100_000_000 // len(line)))
    read(run, "query", "tail", "profile", "page")
    assert Readings(run.parent).run("run").summary.step == 3


def test_a_log_that_is_a_hole_takes_little_time(run: Path) -> None:
    os.truncate(run / "logs" / "rollout-0.log", 2**30)
    read(run, "query")


def test_a_last_line_with_an_odd_time_is_passed_over(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind":"step_done","time_s":1.7.6}\n')
    read(run)
    assert Readings(run.parent).runs().runs[0].status == "finished"


@pytest.mark.nightly
def test_metrics_of_any_number_of_names_are_kept_in_part(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as metrics, (run / "events.jsonl").open("ab") as events:
        for step in range(4, 24):
            values = {f"m{step}-{number}": 1.0 for number in range(50_000)}
            row = {"kind": "step_done", "time_s": 1.8e9, "step": step, "metrics": values}
            events.write(orjson.dumps(row) + b"\n")
            metrics.write(orjson.dumps({"step": step, "time_s": 1.8e9, **values}) + b"\n")
    read(run)


def test_a_worker_may_have_a_number_of_any_length(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        for worker in ("rollout-" + "9" * 5000, "rollout-٣", "rollout-³"):
            file.write(f'{{"kind":"worker_busy","time_s":1767225601.0,"worker":"{worker}","activity":"generating",')
            file.write('"start_s":1767225600.0,"end_s":1767225601.0}\n')
    read(run, "page", "report")


@pytest.mark.parametrize("value", ["NaN", "-1e300", "1e300", "[]", "{}", '"x"', "null"])
def test_events_with_odd_values_are_no_error_of_a_profile(run: Path, value: str) -> None:
    with (run / "events.jsonl").open("a") as file:
        for row in ("{}", "1", "[1]", f'{{"kind": {value}}}', f'{{"kind": "step_done", "metrics": {value}}}'):
            file.write(row + "\n")
    read(run, "profile")
