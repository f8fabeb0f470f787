"""The index of a run: what it holds, how it follows the run, and how it is rebuilt."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlsys.dashboard.http_problems import BadQuery
from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.index_cache import index_path, mark_used
from rlsys.dashboard.index.index_followers import IndexFollowers
from rlsys.dashboard.index.index_schema import INDEXED
from rlsys.dashboard.index.run_index import IndexProblem, RunIndex
from rlsys.dashboard.index.sql_query import TableQuery
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.query.query_command import lines_of, query
from rlsys.dashboard.query.table_queries import Tables
from rlsys.dashboard.responses import TableAnswer
from rlsys.monitoring.events import GroupScored, RunStarted, StepDone
from rlsys.util.native_output import native_output_in
from tests.histories import BEGIN_S, History, Shape, small_run
from tests.rollouts import damage, rollouts, write_lines
from tests.rollouts import lines_of as groups_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run; to be read only."""
    return small_run(tmp_path_factory.mktemp("indexed") / "small")


def index_of(run: Path) -> RunIndex:
    """The index of a run, up to date."""
    index = RunIndex(RunFolder(run.parent.resolve(), run.name))
    while not index.update(10.0):
        pass
    return index


def ask(run: Path, text: str, between: tuple[int, int] | None = None) -> TableAnswer:
    """Answer of `rlsys query`."""
    with Path(os.devnull).open("w") as progress:
        return query(run, text, progress, between=between, is_whole=True)


def page(run: Path, table: str, **asked: Any) -> TableAnswer:
    """Answer of a page."""
    readings, indexes = Readings(run), IndexFollowers()
    if table in INDEXED:
        while not indexes.want(readings.folder(".")).update(10.0):
            pass
    return Tables(readings, indexes).page(".", TableQuery(table=table, **asked), None)


def column(run: Path, text: str, between: tuple[int, int] | None = None) -> list:
    """First column of the answer."""
    found = ask(run, text, between)
    return [row[found.columns[0].name] for row in found.rows]


def test_episodes_of_all_steps_are_found_by_what_they_are(small: Path) -> None:
    found = page(
        small,
        "episodes",
        filter="truncated and step > 10",
        order_by="step",
        show="step, outcome, answer, prompt",
        limit=1,
    )
    (row,) = found.rows
    assert found.num_rows == 20
    assert (row["step"], row["outcome"], row["group_id"], row["episode"]) == (11, "truncated", 64, 2)
    record = groups_in(small / "rollouts" / "step_000011.parquet")[4]
    assert row["answer"] == record["episodes"][2]["trajectories"][0]["turns"][0]["text"]
    assert row["prompt"] == "system: Answer with a number.\n\nuser: What is 64 plus zero?"
    assert ask(small, "select * from episodes where failed").num_rows == 30
    assert (
        ask(small, "select * from episodes where agents = 'lead, subagent' and tool_calls = 1 and turns = 3").num_rows
        == 240
    )
    assert column(small, "select count(*) from episodes where staleness in (0, 1)") == [708]


def test_text_is_found_in_prompts_and_answers(small: Path) -> None:
    assert column(small, "select step from episodes where prompt like '%is 64 PLUS%'") == [11] * 4
    assert set(column(small, "select group_id from episodes where answer like '%answer is 64%'")) <= {
        60,
        61,
        62,
        63,
        64,
    }
    short, long = (
        ask(small, f"select * from episodes where answer like '%{text}%'").num_rows for text in ("17", "is 17")
    )
    assert 0 < long < short  # a text of two letters is scanned for


def test_groups_have_their_fate_from_events(small: Path) -> None:
    assert column(small, "select group_id from groups where state = 'dropped' order by group_id") == [25, 85, 145]
    assert column(small, "select group_id from groups where attempts > 1") == [62]
    (row,) = ask(small, "select reward_min, reward_max, equal, staleness, recorded from groups where group_id = 2").rows
    assert row["equal"]
    assert row["recorded"]
    assert row["reward_min"] == row["reward_max"] == 0.0
    assert ask(small, "select * from groups where state = 'issued'").num_rows == 3


def test_steps_and_evaluations_have_their_metrics_as_columns(small: Path) -> None:
    rewards = [json.loads(line).get("reward/mean") for line in (small / "metrics.jsonl").read_text().splitlines()]
    told = column(small, 'select "reward/mean" from steps order by step')
    assert told == [reward for reward in rewards if reward is not None]
    (row, *_) = ask(small, 'select step, dataset, "pass@1" from evaluations order by step').rows
    assert row == {"step": 9, "dataset": "held_out", "pass@1": 0.4}


def test_tasks_that_got_worse_between_two_steps_come_first(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(steps=9))
    history.emit(RunStarted("run", 0, 9))
    rewards = {"worse": 1.0, "better": 0.0, "same": 0.5}
    for step in range(1, 10):
        if step == 5:
            rewards |= {"worse": 0.25, "better": 1.0}
        ids = [10 * step + i for i in range(3)]
        for group_id, (task, reward) in zip(ids, rewards.items(), strict=True):
            history.emit(GroupScored(group_id, task, (reward, reward)))
        history.emit(StepDone(step, {}, tuple(ids)))
    rows = ask(tmp_path / "run", "select * from tasks order by change", between=(4, 8)).rows
    assert [(row["task"], row["reward_before"], row["reward_after"], row["change"]) for row in rows] == [
        ("worse", 1.0, 0.25, -0.75),
        ("same", 0.5, 0.5, 0.0),
        ("better", 0.0, 1.0, 1.0),
    ]
    assert [row["groups"] for row in rows] == [4, 4, 4]
    assert column(tmp_path / "run", "select task from tasks where change < 0") == ["worse"]
    assert column(tmp_path / "run", "select task from tasks", between=(4, 4)) == []


def test_a_crash_of_the_driver_is_among_the_logs(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with pytest.raises(ValueError, match="bad step"), native_output_in(run / "logs" / "driver.log"):
        raise ValueError("bad step")
    texts = column(run, "select text from logs where worker = 'driver' and text like '%bad step%'")
    assert "ValueError: bad step" in texts


def test_the_log_has_events_and_lines_of_log_files(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    log = run / "logs" / "actor.log"
    log.parent.mkdir()
    log.write_text("INFO ready\nTraceback (most recent call last):\n  File\nRuntimeError: no memory\nincomplete")
    os.utime(log, (BEGIN_S, BEGIN_S))
    rows = ask(run, "select time_s, level, text from logs where worker = 'actor' order by time_s").rows
    assert [(row["time_s"], row["level"], row["text"]) for row in rows] == [
        (BEGIN_S, "info", "INFO ready"),
        (BEGIN_S, "error", "Traceback (most recent call last):"),
        (BEGIN_S, "error", "  File"),
        (BEGIN_S, "error", "RuntimeError: no memory"),
    ]
    assert column(run, "select worker from logs where kind = 'worker_failed'") == ["rollout-2"]
    log.write_text("another file of this name\n")
    assert column(run, "select text from logs where worker = 'actor'") == ["another file of this name"]


def test_lines_of_logs_have_the_time_of_a_sample_of_the_worker(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    for folder in ("logs", "machine"):
        (run / folder).mkdir()
    (run / "logs" / "rollout-2.1.log.1").write_text("zero\n")
    (run / "logs" / "rollout-2.1.log").write_text("one\ntwo\n\nthree\n")
    numbers = {"pid": 1, "cpu": 0, "memory": 0, "gpu": None, "gpu_memory": None, "node_cpu": 0, "node_memory": 0}
    node = {"host": "", "node_shm": 0, "node_sent": 0, "node_received": 0}
    sizes = [(5, 0, 10.0), (0, 1, 20.0), (4, 1, 30.0), (8, 1, 40.0), (15, 1, 50.0)]
    samples = [numbers | node | {"log_bytes": size, "log_turn": turn, "time_s": at} for size, turn, at in sizes]
    (run / "machine" / "rollout-2.1.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    rows = ask(run, "select time_s, text from logs where worker = 'rollout-2.1' and kind = 'line' order by time_s").rows
    assert [(row["time_s"], row["text"]) for row in rows] == [(10, "zero"), (30, "one"), (40, "two"), (50, "three")]


def test_the_index_follows_a_run_as_it_goes_on(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(steps=30))
    history.start()
    history.step()
    index = index_of(history.folder)
    history.step()
    assert index.update(10.0)
    assert index.sql("select * from steps").num_rows == 2
    assert index.sql("select * from episodes group by step").num_rows == 2
    index_of(history.folder)  # by another process: nothing is read twice
    assert index.sql("select * from logs where kind = 'run_started'").num_rows == 1


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(steps=30))
    history.start()
    for _ in range(3):
        history.step()
    index_of(history.folder)
    history.emit(RunStarted("run", 1, 30))
    path = history.folder / "rollouts" / "step_000002.parquet"
    write_lines(path, groups_in(path)[:2])
    assert column(history.folder, "select step from steps") == [1]
    assert set(column(history.folder, "select step from groups where step is not null")) == {1}
    assert column(history.folder, "select step from episodes group by step order by step") == [1, 2, 3]
    assert ask(history.folder, "select * from episodes where step = 2").num_rows == 8
    assert ask(history.folder, "select * from episodes where step = 2 and answer like '%answer%'").num_rows == 8
    path.unlink()
    assert ask(history.folder, "select * from episodes where step = 2").num_rows == 0


def test_samples_of_evaluations_are_a_table_of_their_own(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    rollouts(run / "evaluations" / "held_out" / "step_000010.parquet", [1.0, 0.0, None, 1.0])
    found = ask(run, "select * from samples where reward < 1 or failed order by group_id")
    assert [(row["dataset"], row["step"], row["group_id"], row["episode"]) for row in found.rows] == [
        ("held_out", 10, 0, 1),
        ("held_out", 10, 1, 0),
    ]
    assert ask(run, "select * from episodes").num_rows == 708


def test_a_run_whose_events_are_lost_is_indexed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    (run / "events.jsonl").unlink()
    assert ask(run, "select * from episodes where truncated").num_rows == 30
    assert ask(run, 'select * from steps where "reward/mean" > 0').num_rows == 30
    (row,) = ask(run, "select step, state, episodes, failed from groups where group_id = 3").rows
    assert (row["step"], row["state"], row["episodes"], row["failed"]) == (1, "trained", 4, 1)
    assert ask(run, "select * from tasks").num_rows == 24


def test_damaged_files_are_skipped(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    damage(run / "rollouts" / "step_000001.parquet", 2)
    (run / "rollouts" / "step_000002.parquet").write_bytes(b"PAR1 no")
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"step_done"\n{"kind":"of tomorrow","time_s":1}\n[]\n')
    lines = groups_in(run / "rollouts" / "step_000003.parquet")
    lines[0]["episodes"][0]["num_tool_calls"] = 2**64 - 1
    write_lines(run / "rollouts" / "step_000003.parquet", lines)
    assert ask(run, "select * from episodes where step < 4").num_rows == 2 * 5 * 4
    assert ask(run, "select * from steps").num_rows == 30


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0 and then nonsense" * 100, b"nonsense" * 1000])
def test_a_damaged_index_is_built_again(tmp_path: Path, content: bytes) -> None:
    small_run(tmp_path / "run")
    index = RunIndex(RunFolder(tmp_path, "run"))
    index.path.write_bytes(content)
    with suppress(IndexProblem):  # of the damage, which it then removes
        index.update(10.0)
    assert index.update(10.0)
    assert index.sql("select * from episodes").num_rows == 708


def test_an_index_that_is_behind_has_a_reason(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    index_path(run).write_bytes(b"nonsense" * 1000)
    indexes, folder = IndexFollowers(), RunFolder(tmp_path, "run")
    assert "was damaged" in indexes.current(folder).problem
    assert indexes.current(folder).problem == ""


def test_indexes_of_the_runs_last_asked_for_are_kept(tmp_path: Path) -> None:
    indexes = IndexFollowers()
    first, second, *others = (RunFolder(tmp_path, f"run-{number}") for number in range(65))
    kept, dropped = indexes.want(first), indexes.want(second)
    indexes.want(first)
    for folder in others:
        indexes.want(folder)
    assert indexes.want(first) is kept
    assert indexes.want(second) is not dropped


def test_an_index_with_an_error_other_than_damage_is_kept(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    index = RunIndex(RunFolder(tmp_path, "run"))
    index.tables()
    with sqlite3.connect(index.path) as connection:
        connection.execute("CREATE TRIGGER refusal BEFORE INSERT ON files BEGIN SELECT RAISE(ABORT, 'not now'); END")
    connection.close()
    with pytest.raises(IndexProblem, match="cannot be used now: not now"):
        index.update(10.0)
    assert index.path.exists()


def test_an_index_of_another_version_is_built_again(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    index_of(run)
    with sqlite3.connect(index_path(run)) as connection:
        connection.execute("DROP TABLE answers")
        connection.execute("CREATE TABLE elsewhere (name)")
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    assert ask(run, "select * from episodes where answer like '%answer%'").num_rows == 708


def test_nothing_is_written_into_the_folder_of_a_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    assert ask(run, "select * from episodes").num_rows == 708
    assert {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]} == before


def test_a_run_made_anew_at_a_path_has_an_index_of_its_own(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    assert column(run, "select count(*) from steps") == [30]
    run.rename(tmp_path / "earlier")
    history = History(run, Shape())
    history.start()
    history.step()
    assert column(run, "select count(*) from steps") == [1]
    shutil.rmtree(run)
    small_run(run)  # maybe with the same identity: file systems use numbers again
    assert column(run, "select count(*) from steps") == [30]


def test_the_folder_of_indexes_is_private(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = index_path(tmp_path, environ).parent
    assert folder == tmp_path / "cache" / "rlsys" / "indexes"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(OSError, match=r"others can read or change .*: `chmod 700"):
        index_path(tmp_path, environ)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link, or belongs to another user"):
        index_path(tmp_path, environ)


def test_indexes_that_are_not_used_for_a_month_are_deleted(tmp_path: Path) -> None:
    old, used, new = (tmp_path / f"{name}.sqlite" for name in ("old", "used", "new"))
    for path in (old, tmp_path / "old.sqlite-journal", used, tmp_path / "notes"):
        path.touch()
        os.utime(path, (1, 1))
    mark_used(used)
    assert old.exists()
    mark_used(new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "used.sqlite"]


def test_rollouts_that_lead_out_of_the_served_folder_are_left_out(tmp_path: Path) -> None:
    run, other = small_run(tmp_path / "served" / "run"), small_run(tmp_path / "other")
    (run / "evaluations").mkdir()
    (run / "evaluations" / "set").symlink_to(other / "rollouts")
    (run / "rollouts" / "step_000099.parquet").symlink_to(other / "rollouts" / "step_000001.parquet")
    index = index_of(run)
    assert index.sql("select * from samples").num_rows == 0
    assert index.sql("select * from episodes").num_rows == 708


@pytest.mark.slow
def test_the_table_of_runs_has_configuration_keys_and_metrics(tmp_path: Path) -> None:
    for seed in range(4):
        run = small_run(tmp_path / f"seed{seed}")
        config = run / "config.resolved.yaml"
        text = (
            config.read_text().replace("seed: 0", f"seed: {seed}").replace("lr: 0.0003", f"lr: {(seed % 2 + 1) / 1000}")
        )
        config.write_text(text)
    condition = '"train.lr" < 0.002 and "eval/held_out/mean" > 0.5'
    found = ask(tmp_path, f'select "run.seed", reward from runs where {condition} order by "run.seed"')
    assert [row["run.seed"] for row in found.rows] == [0, 2]
    rows = page(tmp_path, "runs", group_by="train.lr, algorithm.clip_high", order_by="train.lr").rows
    assert [(row["train.lr"], row["algorithm.clip_high"], row["num"]) for row in rows] == [
        (0.001, 0.28, 2),
        (0.002, 0.28, 2),
    ]
    assert [row["reward_std"] for row in rows] == [0.0, 0.0]
    assert rows[0]["reward_mean"] == pytest.approx(ask(tmp_path, "select * from runs").rows[0]["reward"])


def test_a_configuration_of_foreign_origin_is_listed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with (run / "config.resolved.yaml").open("a") as file:
        file.write(f'odd: {{half: "\\ud800", large: {10**40}, "a\\"b": 1, none: null, list: [1, 2]}}\n')
    (row,) = ask(tmp_path, 'select "odd.half", "odd.large", "odd.list", id from runs').rows
    assert row == {"odd.half": "?", "odd.large": str(10**40), "odd.list": "[1, 2]", "id": "run"}


def test_short_lists_of_the_pages_are_tables_too(small: Path) -> None:
    assert column(small, "select * from worker_failures") == ["rollout-2"]
    assert column(small, "select * from pending where state = 'waits for a replica' order by group_id") == [
        180,
        181,
        182,
    ]
    assert len(column(small, "select * from replicas where not is_stale")) == 4
    assert column(small, "select * from alerts where until_step is null") == []


def test_tables_without_steps_refuse_some(small: Path) -> None:
    with pytest.raises(BadQuery, match="`logs` has no steps"):
        page(small, "logs", between=(1, 2))


def test_every_table_is_described_with_its_columns(small: Path) -> None:
    tables = Tables(Readings(small.parent), IndexFollowers())
    found = {table.name: table for table in tables.tables("small").tables}
    assert {"runs", "episodes", "samples", "groups", "tasks", "steps", "evaluations", "logs", "alerts"} < found.keys()
    for table in found.values():
        names = [column.name for column in table.columns]
        assert set(table.shown) <= set(names)
        assert all(column.help for column in table.columns)
        assert tables.page("small", TableQuery(table=table.name, limit=1)).table == table.name
    assert "policy/entropy" in {column.name for column in found["steps"].columns}
    assert [table.name for table in tables.tables(None).tables] == ["runs"]


def lines(run: Path, text: str) -> Sequence[str]:
    return list(lines_of(ask(run, text)))


def test_a_query_prints_a_table(small: Path) -> None:
    assert lines(small, "select group_id, task, recorded, reward_max, reward_min from groups where attempts > 1") == [
        "group_id  task     recorded  reward_max  reward_min",
        "      62  task-14       yes           0           0",
    ]
    assert lines(small, "select group_id from groups order by group_id limit 1") == ["group_id", "       0"]
