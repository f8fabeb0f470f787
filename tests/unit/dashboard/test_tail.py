"""`rlsys tail`: the latest events, then new ones, in a terminal."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.tail import tail
from rlsys.launch.run_lock import LOCK
from rlsys.monitoring.events import AlertRaised, EvalDone, Events, GroupDropped, PhaseDone, RunEnded, StepDone
from rlsys.monitoring.trackers.jsonl import JsonlSink
from tests.histories import History, Shape, small_run

pytestmark = pytest.mark.slow


def tailed(run: Path, *, once: bool = False) -> list[str]:
    """Its lines; whoever waits for more than there is fails."""
    shown = io.StringIO()
    tail(run, shown, once=once, sleep=lambda _: pytest.fail("it waits"))
    return shown.getvalue().splitlines()


def begun(folder: Path) -> History:
    history = History(folder, Shape(), begin_s=time.time())
    history.start()
    return history


def test_the_last_notes_and_steps_of_an_ended_run_appear(tmp_path: Path) -> None:
    lines = tailed(small_run(tmp_path / "run"))
    assert "rollout-2.1 is back after 4.2 s" in lines
    end = lines.index("finished after step 30")
    assert lines[end - 1].startswith("step 30/30  0:00 left  reward ")
    assert lines[end + 2 :][:2] == ["next:", f"  rlsys dashboard {tmp_path}/run"]
    assert len([line for line in lines[: end + 1] if not line.startswith("step ") or " on " in line]) <= 20


def test_a_run_is_followed_until_it_ends(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    shown = io.StringIO()
    rests = iter([history.step, history.step, lambda: history.end("failed", "out of memory")])
    tail(history.folder, shown, sleep=lambda _: next(rests)())
    lines = shown.getvalue().splitlines()
    assert [line[:12] for line in lines if line.startswith("step")] == ["step  1/30  ", "step  2/30  "]
    assert "failed after step 2: out of memory" in lines


def test_a_run_that_went_on_after_its_end_is_followed(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.end("interrupted")
    Events([JsonlSink(history.folder)]).emit(StepDone(1, {}))
    shown = io.StringIO()
    resumed = Events([JsonlSink(history.folder)])
    tail(history.folder, shown, sleep=lambda _: resumed.emit(RunEnded(1, "finished")))
    assert "finished after step 1" in shown.getvalue()


def test_a_run_has_ended_whatever_alert_comes_after_its_end(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.end("finished")
    Events([JsonlSink(history.folder)]).emit(AlertRaised("no_progress", 0, 1.0, 1.0, "Late."))
    assert "alert no_progress at step 0: Late." in tailed(history.folder)


def test_a_run_of_several_policies_that_is_resumed_is_followed(tmp_path: Path) -> None:
    shared = Events([JsonlSink(tmp_path)])
    for event in (RunEnded(1, "interrupted"), PhaseDone("start_up", 3.0)):
        shared.emit(event)
    shown = io.StringIO()
    tail(tmp_path, shown, sleep=lambda _: shared.emit(RunEnded(2, "finished")))
    assert "finished after step 2" in shown.getvalue()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_replaced_file_is_shown_from_its_beginning(tmp_path: Path, is_new: bool) -> None:
    history, other = begun(tmp_path / "run"), begun(tmp_path / "other")
    history.step()
    other.end("failed", "out of memory")
    path, shown = history.folder / "events.jsonl", io.StringIO()

    def replace() -> None:
        if is_new:
            (other.folder / "events.jsonl").replace(path)
        else:
            path.write_bytes((other.folder / "events.jsonl").read_bytes())

    looks = iter([replace])
    tail(history.folder, shown, sleep=lambda _: next(looks)())
    assert "failed after step 0: out of memory" in shown.getvalue()


def test_what_there_is_can_be_shown_without_waiting(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.step()
    assert tailed(history.folder, once=True)[-1].startswith("step  1/30  ")


def test_a_run_that_makes_no_progress_says_so(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(), begin_s=time.time() - 1000)
    history.start()
    for _ in range(3):
        history.step()
    (told,) = [line for line in tailed(history.folder, once=True) if "no_progress" in line]
    assert told.startswith("alert no_progress at step 3: No step was done for ")


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.step()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (history.folder / LOCK).write_text(json.dumps({"host": socket.gethostname(), "pid": ended.pid}))

    (told,) = [line for line in tailed(history.folder, once=True) if "no_progress" in line]

    assert told.startswith(f"alert no_progress at step 1: process {ended.pid} of the run is gone")


def test_no_progress_is_shown_once_when_also_reported(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(), begin_s=time.time() - 1000)
    history.start()
    for _ in range(3):
        history.step()
    history.now_s = time.time()
    raised = AlertRaised("no_progress", 3, 500.0, 10.0, "No step was done for long after step 3.")
    rests = iter([history.step, lambda: history.emit(raised), lambda: history.end("finished")])
    shown = io.StringIO()
    tail(history.folder, shown, sleep=lambda _: next(rests)())
    assert len([line for line in shown.getvalue().splitlines() if line.startswith("alert no_progress")]) == 1


def test_thresholds_are_those_of_the_run(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(), begin_s=time.time() - 1000)
    history.start()
    for _ in range(3):
        history.step()
    (history.folder / "config.resolved.yaml").write_text("alerts: {no_progress: null}")
    assert [line for line in tailed(history.folder, once=True) if "no_progress" in line] == []


def test_one_that_does_is_not_called_silent(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.step()
    assert [line for line in tailed(history.folder, once=True) if "no_progress" in line] == []


def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"step_done"\n\xff\xfe\n{"kind":"of_tomorrow","time_s":1}\n{"kind":"step_do')
    assert "finished after step 30" in tailed(run)


def test_an_evaluation_without_the_usual_measures_is_shown(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.emit(EvalDone(1, "a/b", "hash", 1.0, {"of_tomorrow": 1.0}))
    assert [line for line in tailed(history.folder, once=True) if line.startswith("step 1 on a/b")]


def test_the_policies_of_a_run_are_shown_by_name(tmp_path: Path) -> None:
    shared = Events([JsonlSink(tmp_path)])
    for policy in ("solver", "proposer"):
        history = begun(tmp_path / "policies" / policy)
        history.step()
        history.end("finished")
    shared.emit(RunEnded(1, "finished"))
    lines = tailed(tmp_path)
    assert [line[:21] for line in lines if " reward " in line] == ["proposer: step  1/30 ", "solver: step  1/30  0"]
    assert "finished after step 1" in lines


def test_nothing_that_a_model_wrote_can_steer_the_terminal(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    history.emit(GroupDropped(7, "task\x1b]0;owned\x07", "failed", "\x1b[2Jgone\u202e\r\nnext line"))
    shown = "\n".join(tailed(history.folder, once=True))
    assert "dropped group 7 (task task�]0;owned�): failed: �[2Jgone��\nnext line" in shown


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuch, match=r"has no events\.jsonl: give the directory of a run that has begun"):
        tail(tmp_path, io.StringIO())


def test_the_command_shows_a_run_on_stdout(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    command = [sys.executable, "-m", "rlsys.cli", "tail", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "finished after step 30" in done.stdout
    assert done.stderr == ""


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    history = begun(tmp_path / "run")
    as_in_a_terminal = ["env", "--default-signal=INT"]  # a script that starts these tests with `&` has SIGINT ignored
    command = [*as_in_a_terminal, sys.executable, "-m", "rlsys.cli", "tail", str(history.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("run directory" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
