"""Sinks: the files of a run, and the console lines."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from rlsys.monitoring.events import (
    CautionRaised,
    CheckpointSaved,
    EngineChosen,
    EvalDone,
    EventLost,
    FileSkipped,
    GroupDropped,
    GroupReissued,
    PhaseDone,
    RunEnded,
    RunStarted,
    StepDone,
    WeightsPublished,
    WorkerRestarted,
    ZeroAdvantageWarning,
)
from rlsys.monitoring.trackers.console import ConsoleSink, duration, figures
from rlsys.monitoring.trackers.jsonl import MAX_WAITING, JsonlSink

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

METRICS = {
    "reward/mean": 0.7126,
    "async/staleness_max": 1.0,
    "perf/tokens_per_s": 1934.4,
    "time/step": 0.2,
    "time/wait_batch": 0.122,
    "time/wait_permit": 0.048,
}


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def shown_on(out: io.StringIO) -> list[str]:
    """Lines on the screen at the end, in order; of a line that was drawn again, also its earlier forms."""
    texts = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()))
    return [text.rstrip() for text in texts if text.strip()]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_and_every_step_a_row(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run")
    sink.handle(WeightsPublished(1, "ab", 8, 6, 0.5, 0.25), 10.0)
    sink.handle(StepDone(1, MappingProxyType({"loss": 0.25, "reward/mean": float("nan")})), 11.5)
    assert rows(tmp_path / "run" / "events.jsonl") == [
        {
            "kind": "weights_published",
            "time_s": 10.0,
            "version": 1,
            "hash": "ab",
            "num_bytes": 8,
            "num_sent": 6,
            "stall_s": 0.5,
            "seconds": 0.25,
        },
        {
            "kind": "step_done",
            "time_s": 11.5,
            "step": 1,
            "metrics": {"loss": 0.25, "reward/mean": None},
            "group_ids": [],
        },
    ], "lines are there before the sink is closed"
    assert rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "time_s": 11.5, "loss": 0.25, "reward/mean": None}]
    sink.close()


def test_an_evaluation_is_a_row_of_metrics_of_its_own(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.handle(StepDone(3, {"loss": 0.25}), 10.0)
    sink.handle(EvalDone(2, "hard", "ab", 1.5, {"eval/hard/mean": 0.5}), 11.0)
    assert rows(tmp_path / "metrics.jsonl")[1] == {"step": 2, "time_s": 11.0, "eval/hard/mean": 0.5}
    assert rows(tmp_path / "events.jsonl")[1] == {
        "kind": "eval_done",
        "time_s": 11.0,
        "step": 2,
        "dataset": "hard",
        "hash": "ab",
        "seconds": 1.5,
        "metrics": {"eval/hard/mean": 0.5},
        "failures": {},
    }
    sink.close()


def test_a_resumed_run_starts_on_a_new_line(tmp_path: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes(b'{"kind":"step_done","ti')
    sink = JsonlSink(tmp_path)
    sink.handle(StepDone(2, {"loss": 0.25}), 2.0)
    sink.close()
    for name in ("events.jsonl", "metrics.jsonl"):
        cut, line = (tmp_path / name).read_text().splitlines()
        assert cut == '{"kind":"step_done","ti'
        assert json.loads(line)["step"] == 2


def test_nothing_that_a_model_wrote_can_steer_the_terminal() -> None:
    out = io.StringIO()
    sink = ConsoleSink(0, out, policy="so\x1blver")
    sink.handle(GroupDropped(7, "task\x1b]0;owned\x07", "failed", "\x1b[2Jgone\u202e\r\nnext line"), 1.0)
    sink.handle(EvalDone(1, "hard", "ab", 1.0, {"eval/hard/pass@\x1b[2J": 0.5}), 2.0)
    assert out.getvalue() == (
        "so�lver: dropped group 7 (task task�]0;owned�): failed: �[2Jgone��\nnext line\n"
        "so�lver: step 1 on hard: pass@�[2J 0.500 (1.0 s)\n"
    )


@dataclass
class Disk:
    """A disk with room for so many bytes; None: any number."""

    room: int | None = None

    def opens(self, path: Path) -> FileIO:
        return FileOnDisk(self, path)


class FileOnDisk(FileIO):
    def __init__(self, disk: Disk, path: Path) -> None:
        super().__init__(path, "a+b")
        self.disk = disk

    def write(self, data: ReadableBuffer, /) -> int:
        if self.disk.room is None:
            return super().write(data)
        if not self.disk.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(memoryview(data)[: self.disk.room])
        self.disk.room -= written
        return written


@pytest.mark.parametrize("room", [0, 30, 100, 150])
def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], room: int) -> None:
    disk = Disk()
    sink = JsonlSink(tmp_path, disk.opens)
    sink.handle(StepDone(1, {"loss": 1.0}), 1.0)
    disk.room = room
    for step in (2, 3, 4):
        sink.handle(StepDone(step, {"loss": 1.0}), float(step))
    disk.room = None
    sink.handle(WorkerRestarted("rollout-0", 1.0), 8.0)
    sink.handle(StepDone(5, {"loss": 1.0}), 9.0)
    sink.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    events = rows(tmp_path / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step_done"] == [1, 2, 3, 4, 5]
    gaps = [event for event in events if event["kind"] == "file_stalled"]
    assert {gap["path"] for gap in gaps} == {"events.jsonl", "metrics.jsonl"}
    for gap in gaps:
        assert gap["problem"] == "No space left on device"
        assert gap["seconds"] in (4.0, 5.0, 6.0)
        assert gap["num_lost"] == 0
    assert capsys.readouterr().err.count("No space left on device; its lines wait") == 2


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("leaves", [lambda path: path.rename(f"{path}.1"), Path.unlink], ids=["moved", "removed"])
def test_a_file_that_is_moved_or_removed_begins_anew(tmp_path: Path, name: str, leaves: Callable[[Path], object]):
    sink, path = JsonlSink(tmp_path), tmp_path / name
    for step in (1, 2):
        sink.handle(StepDone(step, {"loss": 1.0}), float(step))
    leaves(path)
    for step in (3, 4):
        sink.handle(StepDone(step, {"loss": 1.0}), float(step))
    sink.close()
    assert [row["step"] for row in rows(path) if "step" in row] == [3, 4]
    replaced = [event for event in rows(tmp_path / "events.jsonl") if event["kind"] == "file_replaced"]
    assert [event["path"] for event in replaced] == [name]


def test_a_file_that_fails_is_opened_again(tmp_path: Path):
    files: list[FileIO] = []

    def opens(path: Path) -> FileIO:
        files.append(path.open("a+b", buffering=0))
        return files[-1]

    sink = JsonlSink(tmp_path, opens)
    sink.handle(StepDone(1, {}), 1.0)
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), files[0].fileno())
    for step in (2, 3):
        sink.handle(StepDone(step, {}), float(step))
    sink.close()
    events = rows(tmp_path / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "step_done"] == [1, 2, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"this user cannot mount: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_real_full_disk_loses_no_step(small_disk: Path) -> None:
    sink, ballast = JsonlSink(small_disk / "run"), small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(128 * 1024))
    for step in range(1, 101):
        sink.handle(StepDone(step, {"loss": 1.0}), float(step))
    ballast.unlink()
    sink.handle(WorkerRestarted("rollout-0", 1.0), 101.0)
    assert [row["step"] for row in rows(small_disk / "run" / "metrics.jsonl")] == list(range(1, 101))
    sink.close()


def test_lines_that_wait_take_bounded_memory(tmp_path: Path) -> None:
    disk, text = Disk(room=0), "x" * (MAX_WAITING // 4)
    sink = JsonlSink(tmp_path, disk.opens)
    for number in range(6):
        sink.handle(FileSkipped(str(number), text), 1.0)
    disk.room = None
    sink.handle(WorkerRestarted("rollout-0", 1.0), 2.0)
    sink.close()
    first, second, third, *_, gap = rows(tmp_path / "events.jsonl")
    assert [first["path"], second["path"], third["path"]] == ["0", "1", "2"]
    assert (gap["kind"], gap["num_lost"]) == ("file_stalled", 3)


def test_what_a_full_disk_never_took_is_told_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonlSink(tmp_path, Disk(room=0).opens)
    sink.handle(StepDone(1, {}), 1.0)
    sink.close()
    told = f"the last 1 lines of {tmp_path / 'events.jsonl'} are lost: No space left on device"
    assert told in capsys.readouterr().err


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path)
        sink.handle(StepDone(step, {}), float(step))
        sink.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_progress_line_shows_waits_and_remaining_time() -> None:
    out = io.StringIO()
    sink = ConsoleSink(150, out, every_s=0)
    sink.handle(StepDone(41, METRICS), 8.0)
    sink.handle(StepDone(42, METRICS), 8.2)
    first, second = out.getvalue().splitlines()
    shown = "reward 0.713  staleness 1  1,934 tokens/s"
    assert first == f"step  41/150  0:22 left  {shown}"
    assert second == f"step  42/150  0:22 left  {shown}"


def test_no_progress_line_is_wider_than_80_columns_or_without_its_end() -> None:
    out = io.StringIO()
    sink = ConsoleSink(1_000_000, out, every_s=0, policy="a_policy_with_a_long_name")
    sink.handle(StepDone(99_998, METRICS), 0.0)
    sink.handle(StepDone(99_999, METRICS), 3600.0)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[1] == "a_policy_with_a_long_name: step   99999/1000000  900001:00:00 left  reward 0.713"


@pytest.mark.parametrize("columns", [80, 40, 160])
def test_a_terminal_shows_the_remaining_time_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    sink = ConsoleSink(150, out)
    sink.handle(StepDone(41, METRICS), 8.0)
    sink.handle(StepDone(42, METRICS), 8.2)
    sink.close()
    last = shown_on(out)[-1]
    assert len(last) <= columns and "step  42/150  0:22 left" in last
    assert ("trainer waits" in last) == (columns == 160)


def test_nothing_of_the_progress_follows_the_end_and_its_next_commands() -> None:
    for out in (io.StringIO(), Terminal()):
        sink = ConsoleSink(8, out, run_dir="runs/my run")
        for step in (6, 7, 8):
            sink.handle(StepDone(step, {"reward/mean": step / 10}), float(step))
        sink.handle(RunEnded(8, "finished"), 9.0)
        sink.close()
        *_, progress, end, reward, next_, dashboard, report, evaluation, export = shown_on(out)
        assert "step 8/8" in progress
        assert (end, reward, next_) == ("finished after step 8", "reward 0.700, mean of the last 3 steps", "next:")
        assert [dashboard, report, evaluation, export] == [
            "  rlsys dashboard 'runs/my run'",
            "  rlsys report 'runs/my run' -o report.html",
            "  rlsys eval 'runs/my run' --data FILE",
            "  rlsys export 'runs/my run' --to FOLDER",
        ]


def test_a_run_of_several_policies_is_not_told_to_export_them_as_one() -> None:
    out = io.StringIO()
    ConsoleSink(0, out, run_dir="runs/team").handle(RunEnded(8, "finished"), 9.0)
    assert [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("  rlsys")] == [
        "dashboard",
        "report",
    ]


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"loss": 0.25, "reward/mean": 0.5}, ["reward 0.500"]),
        ({"loss": 0.25, "reward/mean": 1.0, "policy/nll": 0.25}, ["loss 0.250"]),
        ({"loss": 0.25, "reward/mean": 0.0, "distill/kl": 0.1}, ["loss 0.250"]),
        ({"loss": 0.25, "reward/mean": 0.5, "kto/margin": 0.1}, ["loss 0.250", "reward 0.500"]),
        ({"loss": 0.25, "reward/mean": 1.0, "dpo/margin": 0.1}, ["loss 0.250", "reward 1.000"]),
    ],
)
def test_a_loss_on_answers_as_such_is_shown(metrics: dict[str, float], shown: list[str]) -> None:
    assert figures(metrics) == shown


def test_an_interrupted_run_says_how_it_goes_on() -> None:
    out = io.StringIO()
    ConsoleSink(8, out, run_dir="runs/mine").handle(RunEnded(3, "interrupted"), 9.0)
    assert out.getvalue().splitlines()[1:] == [
        "next:",
        "  rlsys train runs/mine/config.resolved.yaml run.resume=auto",
        "  rlsys dashboard runs/mine",
    ]


def test_engines_of_a_kind_are_one_line() -> None:
    out = io.StringIO()
    sink = ConsoleSink(8, out)
    for worker in ("rollout-0", "rollout-1", "rollout-2", "eval-0"):
        sink.handle(EngineChosen(worker, "local", "there is no GPU"), 1.0)
    sink.handle(EngineChosen("rollout-3", "vllm", "a GPU"), 1.0)
    sink.close()
    assert out.getvalue().splitlines() == [
        "rollout-0 to rollout-2, eval-0 generate with local: there is no GPU",
        "rollout-3 generates with vllm: a GPU",
    ]


def test_start_up_shows_the_time_since_the_command() -> None:
    out = io.StringIO()
    sink = ConsoleSink(8, out)
    sink.handle(PhaseDone("load_data", 0.5), 100.5)
    sink.handle(PhaseDone("start_workers", 5.0), 107.25)
    assert out.getvalue().splitlines() == ["   0.5 s  load data", "   7.2 s  start workers (5.0 s)"]
    screen = Terminal()
    ConsoleSink(8, screen).close()
    assert "starting  0:00" in screen.getvalue()


def test_figures_that_are_missing_are_left_out() -> None:
    out = io.StringIO()
    ConsoleSink(10, out).handle(StepDone(1, {"reward/mean": 0.5, "time/wait_batch": 1.0}), 1.0)
    assert out.getvalue() == "step  1/10  reward 0.500\n"


def test_plain_progress_is_rate_limited_and_keeps_the_last_line() -> None:
    out = io.StringIO()
    sink = ConsoleSink(8, out, every_s=5)
    for step in range(1, 9):
        sink.handle(StepDone(step, {}), 2.0 * step)
    sink.close()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 1/8",
        "step 4/8",
        "step 7/8",
        "step 8/8",
    ]


def test_what_a_person_should_know_is_said_at_once() -> None:
    out = io.StringIO()
    sink = ConsoleSink(8, out)
    sink.handle(RunStarted("runs/7", 4, 8), 0.0)
    sink.handle(PhaseDone("load_model", 1.25), 1.0)
    sink.handle(GroupDropped(3, "t9", "too_long"), 2.0)
    sink.handle(GroupReissued(4, "t8", "its node is gone"), 2.0)
    sink.handle(ZeroAdvantageWarning(100, 1000, "group 9 has equal rewards: [0.0]"), 2.0)
    sink.handle(CheckpointSaved(8, "runs/7/checkpoints/step_8", 0.1), 3.0)
    sink.handle(WeightsPublished(8, "ab", 8, 8, 0.5, 0.25), 3.0)
    sink.handle(EventLost("step_done", "TypeError('x')"), 3.0)
    sink.handle(CautionRaised("asynchrony.max_staleness: 4 is more"), 3.0)
    measures = {"mean": 0.5, "mean_ci95": 0.125, "pass@1": 0.5, "pass@4": 0.75, "failed_frac": 0.0}
    sink.handle(EvalDone(8, "hard", "ab", 1.5, {f"eval/hard/{k}": v for k, v in measures.items()}), 3.0)
    sink.handle(EvalDone(8, "one", "ab", 1.5, {"eval/one/mean": 1.0}), 3.0)
    sink.handle(RunEnded(8, "finished"), 4.0)
    assert out.getvalue().splitlines() == [
        "run directory: runs/7, resuming after step 4",
        "   1.2 s  load model",
        "dropped group 3 (task t9): too_long",
        "group 4 (task t8) is issued again: its node is gone",
        (
            "100 groups one after the other had nothing to learn in them, and 1000 end the run; look at rewards and "
            "tasks. The last: group 9 has equal rewards: [0.0]"
        ),
        "checkpoint of step 8: runs/7/checkpoints/step_8",
        "an event step_done is lost: TypeError('x')",
        "caution: asynchrony.max_staleness: 4 is more",
        "step 8 on hard: mean 0.500 ± 0.125, pass@1 0.500, pass@4 0.750 (1.5 s)",
        "step 8 on one: mean 1.000 (1.5 s)",
        "finished after step 8",
    ]


def test_a_terminal_gets_progress_and_notes_on_its_stream(capsys: pytest.CaptureFixture[str]) -> None:
    out = Terminal()
    sink = ConsoleSink(150, out)
    sink.handle(StepDone(149, METRICS), 8.0)
    sink.handle(GroupDropped(3, "[t9]", "stale"), 2.0)
    sink.handle(StepDone(150, METRICS), 8.2)
    sink.close()
    text = out.getvalue()
    assert "dropped group 3 (task [t9]): stale" in text
    assert "step 150/150  0:00 left  reward 0.713" in text
    assert capsys.readouterr() == ("", "")


def test_where_no_steps_are_taken_a_terminal_gets_notes_alone() -> None:
    out = Terminal()
    sink = ConsoleSink(0, out)
    sink.handle(WorkerRestarted("eval-0", 1.5), 1.0)
    sink.close()
    assert out.getvalue() == "eval-0 is back after 1.5 s\n"


def test_durations_read_like_a_clock() -> None:
    assert [duration(s) for s in (0.4, 21, 125.2, 7380)] == ["0:00", "0:21", "2:05", "2:03:00"]
