"""Files that the dashboard reads: incomplete, damaged, of other versions, or misplaced."""

from __future__ import annotations

import os
from math import isnan
from pathlib import Path

import pytest

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.event_decoding import UnknownKind, Unreadable, decode, decode_metrics
from rlsys.dashboard.index.folders import all_runs, find_run
from rlsys.dashboard.index.run_files import CHUNK_BYTES, Tail
from rlsys.monitoring.events import EvalDone, GroupScored, StepDone, WeightsPublished, WorkerBusy
from tests.histories import small_run


def lines_of(tail: Tail) -> list[bytes]:
    return [line for chunk in tail.read() for line in chunk.lines]


def a_run(folder: Path) -> None:
    """The least that makes a folder a run."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()


def test_a_tail_returns_new_complete_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert lines_of(tail) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert lines_of(tail) == [b"one", b"two"]
    assert lines_of(tail) == []
    with path.open("ab") as file:
        file.write(b"ee\nfour\n")
    assert lines_of(tail) == [b"three", b"four"]


def test_a_tail_has_the_offsets_of_lines_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [b"a" * 10, b"b" * (3 * CHUNK_BYTES), b"c" * 10]
    path.write_bytes(b"\n".join(lines) + b"\n")
    chunks = list(Tail(path).read())
    assert [line for chunk in chunks for line in chunk.lines] == lines
    data = path.read_bytes()
    assert all(data[c.offset : c.offset + len(c.data)] == c.data for c in chunks)


def test_a_file_that_shrank_or_was_replaced_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\n")
    shrunk, replaced = Tail(path), Tail(path)
    assert lines_of(shrunk) == lines_of(replaced) == [b"one", b"two"]
    assert not shrunk.was_replaced
    os.truncate(path, 2)
    assert shrunk.was_replaced
    other = tmp_path / "other"
    other.write_bytes(b"one\ntwo\nthree\n")
    other.replace(path)
    assert replaced.was_replaced


def test_a_line_is_read_as_the_event_that_was_written() -> None:
    line = b'{"kind":"worker_busy","time_s":2.5,"worker":"actor","activity":"training","start_s":1,"end_s":2.0}'
    assert decode(line) == (WorkerBusy("actor", "training", 1, 2.0), 2.5)
    scored = b'{"kind":"group_scored","time_s":1,"group_id":3,"task_id":"t","rewards":[1.0,null]}'
    assert decode(scored) == (GroupScored(3, "t", (1.0, None)), 1)


def test_unknown_fields_are_ignored_and_unknown_kinds_raise() -> None:
    event, _ = decode(b'{"kind":"step_done","time_s":1.0,"step":3,"metrics":{"loss":null},"new_field":[]}')
    assert isinstance(event, StepDone)
    assert (event.step, event.group_ids) == (3, ())
    assert isnan(event.metrics["loss"])
    with pytest.raises(UnknownKind):
        decode(b'{"kind":"moon_landed","time_s":1.0}')


def test_events_of_an_older_version_get_defaults_for_missing_fields() -> None:
    event, _ = decode(b'{"kind":"weights_published","time_s":1.0,"version":7,"hash":"ab","num_bytes":9,"stall_s":0.5}')
    assert isinstance(event, WeightsPublished)
    assert (event.version, event.hash, event.num_bytes, event.num_sent, event.stall_s) == (7, "ab", 9, 0, 0.5)
    assert isnan(event.seconds)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"weights_published","time_s":1.0,"hash":"ab","num_bytes":9,"stall_s":0.5}',
        b'{"kind":"worker_busy","time_s":1.0,"activity":"training","start_s":1,"end_s":2.0}',
        b'{"kind":"step_done","time_s":1.0,"st',
        b"\x00\xff",
        b"[]",
        b"3",
        b'{"time_s":1.0}',
        b'{"kind":"step_done","step":1,"metrics":{}}',
        b'{"kind":"step_done","time_s":1.0,"metrics":{}}',
        b'{"kind":"step_done","time_s":1.0,"step":"three","metrics":{}}',
        b'{"kind":"step_done","time_s":1.0,"step":3,"metrics":[]}',
        b'{"kind":["step_done"],"time_s":1.0}',
    ],
)
def test_a_damaged_line_is_unreadable(line: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(line)


def test_rows_of_metrics_stand_for_events_where_there_are_none() -> None:
    assert decode_metrics(b'{"step":3,"time_s":2.0,"loss":1.5}') == (StepDone(3, {"loss": 1.5}), 2.0)
    event, _ = decode_metrics(b'{"step":2,"time_s":2.0,"eval/held_out/mean":0.5}')
    assert event == EvalDone(2, "held_out", "", 0.0, {"eval/held_out/mean": 0.5})
    with pytest.raises(Unreadable):
        decode_metrics(b'{"time_s":2.0,"loss":1.5}')


def test_runs_are_found_in_folders_and_under_policies(tmp_path: Path) -> None:
    a_run(tmp_path / "lab" / "a")
    a_run(tmp_path / "b")
    a_run(tmp_path / "b" / "policies" / "solver")
    (tmp_path / "notes").mkdir()
    assert [folder.id for folder in all_runs(tmp_path)] == ["b", "b/policies/solver", "lab/a"]
    assert [folder.id for folder in all_runs(tmp_path / "lab" / "a")] == ["."]


@pytest.mark.parametrize("run", ["", "..", "../b", "a/../../b", "/etc", "a\0", "nowhere", "a/rollouts", "//b", "link"])
def test_nothing_but_a_run_below_the_root_is_one(tmp_path: Path, run: str) -> None:
    a_run(tmp_path / "root" / "a")
    a_run(tmp_path / "b")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "b")
    with pytest.raises(NoSuch):
        find_run(tmp_path / "root", run)
    assert [folder.id for folder in all_runs(tmp_path / "root")] == ["a"]


def test_files_that_lead_outside_the_root_are_ignored(tmp_path: Path) -> None:
    run = small_run(tmp_path / "root" / "a")
    secret = tmp_path / "secret"
    secret.write_text('{"step":1,"group_id":0,')
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").symlink_to(secret)
    (run / "rollouts" / "step_000099.parquet").symlink_to(secret)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    folder = find_run(tmp_path / "root", "a")
    assert folder.file("events.jsonl") is None
    assert folder.file("rollouts", "step_000099.parquet") is None
    assert folder.file("metrics.jsonl") is None
