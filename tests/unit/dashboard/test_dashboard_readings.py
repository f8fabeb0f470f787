"""Answers of the dashboard for handmade run folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from rlsys.dashboard.http_problems import BadRequest, NoSuch
from rlsys.dashboard.index.series import SeriesColumns
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.responses import Bottleneck, ClusterAnswer, Lane
from rlsys.launch.run_lock import LOCK
from rlsys.monitoring.events import (
    ACTIVITIES,
    EvalDone,
    GroupDropped,
    GroupIssued,
    GroupPlaced,
    GroupReissued,
    GroupRolledOut,
    GroupScored,
    PhaseDone,
    ReplicaSeen,
    RunStarted,
    StepDone,
    WeightsPublished,
    WorkerBusy,
    WorkerFailed,
)
from rlsys.replay.rollout_parquet import read_records, write_records
from rlsys.types import EpisodeSpan
from tests.histories import BEGIN_S, History, Shape, big_run, small_run
from tests.planted import BOTTLENECK, STALE_REPLICA, planted_run
from tests.rollouts import damage, lines_of, rollouts, write_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small run, `small`; to be read only."""
    folder = tmp_path_factory.mktemp("runs")
    small_run(folder / "small")
    return folder


@pytest.fixture
def history(tmp_path: Path) -> History:
    """A run that has taken three steps and goes on, `tmp_path/run`."""
    history = History(tmp_path / "run", Shape(has_subagents=False))
    history.start()
    for _ in range(3):
        history.step()
    return history


def readings_of(history: History, later_s: float = 1.0) -> Readings:
    """Of the folder that the history's run is in, asked so long after its last word."""
    return Readings(history.folder.parent, now=lambda: history.now_s + later_s)


def lane(answer: ClusterAnswer, worker: str) -> Lane:
    return next(lane for lane in answer.lanes if lane.worker == worker)


def test_a_finished_run_is_summed_up_in_a_line(runs: Path) -> None:
    (row,) = Readings(runs).runs().runs
    assert (row.id, row.status, row.model, row.algorithm) == ("small", "finished", "models/tiny-4", "grpo")
    assert (row.step, row.total_steps, row.step_s, row.eta_s) == (30, 30, 2.0, None)
    rewards = Readings(runs).series("small", ["reward/mean"]).series[0].values
    assert row.reward == pytest.approx(fmean(reward for reward in rewards[-20:] if reward is not None))
    assert row.rewards == rewards
    assert row.last_error == "rollout-2 while rolling out group 58: the process ended with SIGKILL"


def test_a_run_is_running_until_it_is_silent_or_ended(history: History) -> None:
    assert readings_of(history).run("run").summary.status == "running"
    assert readings_of(history).run("run").summary.eta_s == pytest.approx(27 * 2.0)
    assert readings_of(history, 59).change("run").status == "running"
    assert readings_of(history, 61).change("run").status == "silent"
    history.end("failed", "RunAborted: out of memory")
    summary = readings_of(history, 61).run("run").summary
    assert (summary.status, summary.last_error) == ("failed", "RunAborted: out of memory")


def test_a_run_whose_process_is_gone_is_silent_at_once(history: History) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock = history.folder / LOCK

    lock.write_text(json.dumps({"host": socket.gethostname(), "pid": ended.pid}))
    killed = readings_of(history, 16).run("run").summary
    lock.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    alive = readings_of(history, 16).run("run").summary
    lock.write_text(json.dumps({"host": "elsewhere", "pid": ended.pid}))
    elsewhere = readings_of(history, 16).run("run").summary

    assert (killed.status, alive.status, elsewhere.status) == ("silent", "running", "running")
    assert killed.last_error is not None
    assert killed.last_error.startswith(f"process {ended.pid} of the run is gone")


def test_long_steps_do_not_hide_a_silence_of_ten_minutes(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(step_s=600.0))
    history.start()
    for _ in range(3):
        history.step()
    assert readings_of(history, 590).change("run").status == "running"
    assert readings_of(history, 610).change("run").status == "silent"


def test_a_run_that_loads_its_models_is_starting(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape())
    assert readings_of(history).change("run").status == "starting"
    assert readings_of(history).cluster("run").lanes == []
    assert readings_of(history).ledger("run").pending == []
    assert readings_of(history).rollouts.groups("run").step is None


def test_an_answer_holds_what_was_written_a_moment_ago(history: History) -> None:
    readings = readings_of(history)
    before = readings.change("run")
    history.step()
    after = readings.change("run")
    assert (before.step, after.step) == (3, 4)
    assert after.revision != before.revision
    assert readings.series("run", ["loss"]).series[0].steps == [1, 2, 3, 4]
    assert readings.rollouts.groups("run").step == 4


def test_the_list_of_runs_changes_with_any_of_them(history: History) -> None:
    readings = readings_of(history)
    before = readings.change().revision
    assert readings.change().revision == before
    history.step()
    assert readings.change().revision != before


def test_a_multi_policy_run_has_the_step_of_its_slowest(tmp_path: Path) -> None:
    shared = History(tmp_path / "run", Shape())
    shared.emit(PhaseDone("start_up", 3.0))
    solver, proposer = (History(tmp_path / "run" / "policies" / name, Shape()) for name in ("solver", "proposer"))
    readings = Readings(tmp_path, now=lambda: solver.now_s + 1)
    for policy in (solver, proposer):
        policy.start()
    before = readings.change("run").revision
    for _ in range(40):
        solver.step()
    proposer.step()
    assert [row.id for row in readings.runs().runs] == ["run", "run/policies/proposer", "run/policies/solver"]
    answer = readings.change("run")
    assert (answer.status, answer.step) == ("running", 1)
    assert answer.revision != before
    rows = {row.id: row for row in readings.runs().runs}
    assert list(readings.run("run").policies) == [rows["run/policies/proposer"], rows["run/policies/solver"]]
    assert (rows["run"].updated_s, rows["run"].step_s) == (rows["run/policies/solver"].updated_s, 2.0)
    assert readings.run("run/policies/solver").policies == []


def test_policies_with_long_steps_are_not_silent_between_them(tmp_path: Path) -> None:
    shared = History(tmp_path / "run", Shape())
    shared.emit(PhaseDone("start_up", 3.0))
    policies = [History(tmp_path / "run" / "policies" / name, Shape(step_s=150.0)) for name in ("solver", "proposer")]
    for policy in policies:
        policy.start()
        for _ in range(3):
            policy.step()
    later = Readings(tmp_path, now=lambda: policies[0].now_s + 140)
    assert {row.id: row.status for row in later.runs().runs}["run"] == "running"
    assert later.change("run").status == "running"
    much_later = Readings(tmp_path, now=lambda: policies[0].now_s + 1600)
    assert much_later.change("run").status == "silent"
    shared.end("finished")
    assert much_later.change("run").status == "finished"


def test_a_run_that_took_every_step_is_finished_without_events(tmp_path: Path) -> None:
    """As those of older versions, which wrote no events."""
    history = History(tmp_path / "old", Shape(steps=5))
    history.start()
    for _ in range(4):
        history.step()
    (history.folder / "events.jsonl").unlink()
    assert readings_of(history, 1000).run("old").summary.status == "silent"
    assert [row.alert for row in readings_of(history, 1000).alerts("old").alerts] == ["no_progress"]
    with (history.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":5,"time_s":%f,"loss":1.0}\n' % history.now_s)
    answer = readings_of(history, 1000)
    assert (answer.run("old").summary.status, answer.run("old").summary.num_alerts) == ("finished", 0)
    assert answer.alerts("old").alerts == []


def test_a_folder_with_only_a_configuration_becomes_silent(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.resolved.yaml").write_text("run:\n  steps: 3\n")
    os.utime(tmp_path / "run" / "config.resolved.yaml", (BEGIN_S, BEGIN_S))
    assert Readings(tmp_path, now=lambda: BEGIN_S + 500).change("run").status == "starting"
    assert Readings(tmp_path, now=lambda: BEGIN_S + 700).change("run").status == "silent"


def test_a_long_run_is_listed_as_it_is_when_opened(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape(steps=60, groups=4, size=2, replicas=2, spans=200, has_subagents=False))
    history.start()
    for _ in range(50):
        history.step()
    assert (history.folder / "events.jsonl").stat().st_size > 5_000_000
    readings, opened = readings_of(history), readings_of(history)
    assert readings.runs().runs[0] == opened.run("run").summary
    history.step()
    history.emit(WorkerFailed("reward-0", "scoring", "it hangs"))
    assert readings.runs().runs[0] == opened.run("run").summary
    history.emit(RunStarted(str(history.folder), 40, 60))
    history.step()
    history.end("interrupted")
    assert readings.runs().runs[0] == opened.run("run").summary
    assert readings_of(history).runs().runs[0].status == "interrupted"


def test_damaged_and_unknown_lines_are_counted_and_skipped(history: History) -> None:
    with (history.folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"step_done","time_s":17\n\xff\xfe\n{"kind":"moon_landed","time_s":1.0}\n')
        file.write(b'{"kind":"worker_busy","time_s":1767225609.0,"worker":"actor","acti\n')
        file.write(b'{"kind":"worker_busy","time_s":1.0,"worker":"a","activity":"b","start_s":1.2.3,"end_s":--}\n')
    history.step()
    answer = readings_of(history).run("run")
    assert (answer.num_corrupt, answer.num_unknown, answer.summary.step) == (4, 1, 4)


def test_damaged_rollout_lines_are_counted_once_read(history: History) -> None:
    path = history.folder / "rollouts" / "step_000002.parquet"
    first, *_ = read_records(path)
    damage(path, 0, 1)
    (history.folder / "events.jsonl").unlink()
    readings = readings_of(history)
    assert readings.run("run").num_corrupt == 0
    assert len(readings.rollouts.groups("run", 2).groups) == 4
    assert readings.run("run").num_corrupt == 2
    with pytest.raises(NoSuch, match="cannot be read"):
        readings.rollouts.group("run", 2, first.key.group_id)
    assert readings.run("run").num_corrupt == 2


def test_a_run_whose_file_was_replaced_is_told_anew(history: History, tmp_path: Path) -> None:
    readings = readings_of(history)
    assert readings.change("run").step == 3
    other = History(tmp_path / "other", Shape())
    other.start()
    other.step()
    (other.folder / "events.jsonl").replace(history.folder / "events.jsonl")
    assert readings.change("run").step == 1
    assert readings.series("run", ["loss"]).series[0].steps == [1]


def test_a_run_with_metrics_alone_shows_its_curves(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_bytes((runs / "small" / "metrics.jsonl").read_bytes())
    readings = Readings(tmp_path, now=lambda: BEGIN_S)
    names = ["reward/mean", "eval/held_out/mean"]
    assert readings.series("old", names) == Readings(runs).series("small", names)
    answer = readings.run("old")
    assert (answer.summary.step, answer.config, answer.has_groups, answer.has_spans) == (30, "", False, False)


def test_groups_without_events_come_from_rollout_files(runs: Path, tmp_path: Path) -> None:
    """Older versions told nothing of groups."""
    (tmp_path / "old" / "rollouts").mkdir(parents=True)
    (tmp_path / "old" / "metrics.jsonl").write_bytes((runs / "small" / "metrics.jsonl").read_bytes())
    for path in (runs / "small" / "rollouts").iterdir():
        (tmp_path / "old" / "rollouts" / path.name).write_bytes(path.read_bytes())
    told, found = Readings(runs).rollouts.groups("small", 20), Readings(tmp_path).rollouts.groups("old", 20)
    assert replace(found, groups=[]) == replace(told, groups=[])
    for row, expected in zip(found.groups, told.groups, strict=True):
        assert row == expected


def test_a_resumed_run_takes_back_the_steps_it_lost(history: History) -> None:
    readings = readings_of(history)
    assert readings.series("run", ["loss"]).series[0].steps == [1, 2, 3]
    lost = readings.rollouts.groups("run", 3).groups[0].group_id
    history.emit(RunStarted(str(history.folder), 2, 30), after_s=30)
    assert readings.change("run").step == 2
    assert readings.series("run", ["loss"]).series[0].steps == [1, 2]
    assert readings.ledger("run").pending == []
    history.emit(GroupIssued(lost, "task-0", 2, 4))
    assert [row.group_id for row in readings.ledger("run").pending] == [lost]


def test_a_series_has_its_unit_and_a_star_matches_families(runs: Path) -> None:
    answer = Readings(runs).series("small", ["time/*", "policy/entropy", "nothing/here"])
    assert [s.name for s in answer.series][-2:] == ["time/wait_permit", "policy/entropy"]
    entropy = answer.series[-1]
    assert (entropy.unit, entropy.num_points) == ("nats", 30)
    assert entropy.help
    assert {m.name for m in Readings(runs).metrics("small").metrics} >= {s.name for s in answer.series}


def test_thinning_keeps_extremes_and_gaps() -> None:
    columns = SeriesColumns()
    for step in range(10_000):
        columns.put(step, {"loss": 100.0 if step == 4567 else -7.0 if step == 8910 else step % 3})
    columns.put(5000, {"loss": float("nan")})
    (series,) = columns.series(["loss"], 200)
    assert len(series.steps) <= 310
    assert series.num_points == 10_000
    points = dict(zip(series.steps, series.values, strict=True))
    assert (points[4567], points[8910], points[5000]) == (100.0, -7.0, None)
    assert {0, 9999} <= set(series.steps)
    assert series.steps == sorted(series.steps)


def test_a_stretch_of_a_series_is_answered_at_full_resolution() -> None:
    columns = SeriesColumns()
    for step in range(10_000):
        columns.put(step, {"loss": step}, since_s=2.0 * step)
    (whole,) = columns.series(["loss"], 100)
    (part,) = columns.series(["loss"], 100, stretch=(500, 560))
    (timed,) = columns.series(["loss"], 100, columns.axis("time"), (1000.0, 1120.0))
    assert len(whole.steps) < 200 and whole.num_points == 10_000
    assert part.steps == timed.steps == list(range(500, 561))
    assert timed.xs == [2.0 * step for step in range(500, 561)]


def test_steps_are_counted_by_the_tokens_they_trained() -> None:
    columns = SeriesColumns()
    assert columns.axis("tokens") is None, "no step told its speed"
    for step in (1, 2, 3):
        columns.put(step, {"loss": 0.5, "perf/tokens_per_s": 100.0, "time/step": 2.0})
    columns.put(0, {"eval/held_out/mean": 0.1})
    (loss, held_out) = columns.series(["loss", "eval/held_out/mean"], 100, columns.axis("tokens"))
    assert (loss.xs, held_out.xs) == ([200.0, 400.0, 600.0], [0.0])


def test_the_later_value_of_a_step_wins_in_any_order() -> None:
    columns = SeriesColumns()
    for step, value in ((1, 1.0), (4, 4.0), (2, 2.0), (4, 5.0)):
        columns.put(step, {"loss": value})
    (series,) = columns.series(["loss"], 100)
    assert (series.steps, series.values) == ([1, 2, 4], [1.0, 2.0, 5.0])


def test_the_groups_of_a_step_can_be_told_apart(runs: Path) -> None:
    readings = Readings(runs)
    answer = readings.rollouts.groups("small", 3)
    assert (answer.previous_step, answer.next_step, answer.first_step, answer.last_step) == (2, 4, 1, 30)
    assert [row.group_id for row in answer.groups] == [12, 13, 14, 15, 16, 17]
    assert [row.staleness for row in answer.groups] == [0, 1, 0, 1, 0, 1]
    assert answer.groups[2].is_zero_std
    assert [row.group_id for row in answer.groups if row.num_failed] == [15]
    assert [row.group_id for row in answer.groups if row.num_truncated] == [16]
    with pytest.raises(NoSuch, match="from 1 to 30"):
        readings.rollouts.groups("small", 31)


def test_groups_are_listed_though_their_rollouts_were_not_written(history: History) -> None:
    for step in (1, 3):
        (history.folder / "rollouts" / f"step_{step:06}.parquet").unlink()
    readings = readings_of(history)
    newest, before = readings.rollouts.groups("run"), readings.rollouts.groups("run", 2)
    assert (newest.step, newest.previous_step, newest.first_step) == (3, 2, 1)
    assert [row.group_id for row in newest.groups] == [12, 13, 14, 15, 16, 17]
    assert {row.has_rollouts for row in newest.groups} == {False}
    assert {row.has_rollouts for row in before.groups} == {True}
    assert readings.run("run").steps_written == (2, 2)
    with pytest.raises(NoSuch, match="see record"):
        readings.rollouts.group("run", 3, 12)


def test_a_group_shows_its_episodes_side_by_side(runs: Path) -> None:
    answer = Readings(runs).rollouts.group("small", 3, 15)
    assert (answer.previous_group_id, answer.next_group_id, answer.task_id) == (14, 16, "task-15")
    assert [row.outcome for row in answer.episodes] == ["ok", "failed", "ok", "ok"]
    failed = answer.episodes[1]
    assert (failed.reward, failed.advantage, failed.agents) == (None, None, ["lead", "subagent"])
    assert failed.reason == "the tool `ask` did not answer within 10 s"
    assert answer.episodes[0].num_turns == 3
    assert answer.episodes[0].text.startswith("The answer is")
    with pytest.raises(NoSuch, match="no group 99"):
        Readings(runs).rollouts.group("small", 3, 99)


def test_a_replay_is_offered_only_of_steps_whose_data_is_there(tmp_path: Path) -> None:
    history = History(tmp_path / "partial", Shape(steps=4, groups=1, size=2))
    history.start()
    for _ in range(4):
        history.step()
    history.end("finished")
    (history.folder / "rollouts" / "step_000002.parquet").unlink()
    assert [bool(Readings(tmp_path).rollouts.episode("partial", n, n - 1, 0).replay) for n in (1, 3, 4)] == [
        True,
        False,
        False,
    ]
    checkpoint = history.folder / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    assert Readings(tmp_path).rollouts.episode("partial", 4, 3, 0).replay, "it begins from the checkpoint of step 3"


def test_an_episode_is_told_token_by_token(runs: Path) -> None:
    answer = Readings(runs).rollouts.episode("small", 3, 15, 0)
    assert answer.replay == f"rlsys replay {runs / 'small'} --step 3"
    lead, subagent = answer.trajectories
    assert (lead.parent, subagent.parent) == (None, 0)
    assert lead.turns[0].tool_calls == [{"name": "ask", "arguments": {"question": "15 + 0"}}]
    record = next(r for r in read_records(runs / "small" / "rollouts" / "step_000003.parquet") if r.key.group_id == 15)
    reading = record.readings[0][0][0]
    for turn in lead.turns:
        assert "".join(turn.pieces) == turn.text
        columns = (turn.logprobs, turn.ratios, turn.entropies, turn.advantages, turn.masks, turn.versions)
        assert {len(column) for column in columns} == {len(turn.pieces)}
    expected = ["left_out" if masked else "trained" for masked in reading.is_masked]
    assert (lead.turns[0].masks, lead.turns[0].said) == (expected, reading.said)
    assert set(Readings(runs).rollouts.episode("small", 3, 15, 1).trajectories[0].turns[0].masks) == {"left_out"}
    with pytest.raises(NoSuch, match="0 to 3"):
        Readings(runs).rollouts.episode("small", 3, 15, 4)


def test_per_token_advantages_replace_the_single_one(history: History) -> None:
    """As with PPO: what a trajectory was assigned is its reward, from which those of its tokens are estimated."""
    path = history.folder / "rollouts" / "step_000003.parquet"
    lines = lines_of(path)
    (reading,) = lines[0]["readings"][0][0]
    reading["advantages"] = [0.25 * i for i in range(len(reading["pieces"]))]
    write_lines(path, lines)
    readings, group_id = readings_of(history), lines[0]["group_id"]
    (trajectory,) = readings.rollouts.episode("run", 3, group_id, 0).trajectories
    assert trajectory.advantage is None
    assert list(trajectory.turns[0].advantages) == reading["advantages"]
    row, other = readings.rollouts.group("run", 3, group_id).episodes[:2]
    assert row.advantage is None
    (trajectory,) = readings.rollouts.episode("run", 3, group_id, 1).trajectories
    assert other.advantage is not None
    assert {other.advantage, trajectory.advantage} == set(trajectory.turns[0].advantages)


def test_a_task_is_followed_over_time(runs: Path) -> None:
    readings = Readings(runs)
    points = readings.rollouts.task("small", "task-1").points
    assert [p.group_id for p in points] == [1, 25, 49, 73, 97, 121, 145, 169]
    assert {p.fate for p in points if p.step is not None} == {"trained"}
    dropped = [(p.group_id, p.fate, p.reason, p.has_rollouts) for p in points if p.step is None]
    assert dropped == [(25, "dropped", "failed", False), (145, "dropped", "failed", False)]
    with pytest.raises(NoSuch):
        readings.rollouts.task("small", "task-99")


def test_the_ledger_lists_pending_groups_with_state_place_and_attempts(history: History) -> None:
    history.emit(GroupPlaced(18, "rollout-3"))
    history.emit(GroupReissued(19, "task-19", "rollout-1 died"))
    history.emit(GroupRolledOut(20, "task-20", "rollout-0", 3, 3, (5,), 0, 1.0, 0.0))
    readings = readings_of(history, 100.0)
    assert readings.ledger("run").num_issued == 21
    pending = {row.group_id: row for row in readings.ledger("run").pending}
    assert [row.state for row in pending.values()] == ["is rolled out", "is lost", "waits for its reward"]
    assert (pending[18].worker, pending[19].last_reason) == ("rollout-3", "rollout-1 died")
    history.emit(GroupIssued(19, "task-19", 3, 4))
    history.emit(GroupDropped(20, "task-20", "zero_advantage"))
    answer = readings.ledger("run")
    assert [row.num_attempts for row in answer.pending] == [1, 2]
    assert answer.dropped == {"zero_advantage": 1}
    assert answer.num_reissued == 1


def test_a_group_that_takes_far_longer_than_others_is_overdue(tmp_path: Path) -> None:
    history = History(tmp_path / "run", Shape())
    history.start()
    for _ in range(40):
        history.step()
    history.emit(GroupIssued(1000, "task-endless", 0, 4))
    for _ in range(31):
        history.step()
    rows = readings_of(history).ledger("run").pending
    assert [row.task_id for row in rows if row.is_overdue] == ["task-endless"]


def test_lanes_tell_what_each_worker_did_in_a_window(history: History) -> None:
    end_s = history.now_s
    answer = readings_of(history).cluster("run", end_s - 2.0, end_s, 1000)
    assert [lane.worker for lane in answer.lanes] == [
        "actor", *(f"rollout-{r}" for r in range(4)), "reward-0", "reward-1"
    ]  # fmt: skip
    actor = lane(answer, "actor")
    assert [span.activity for span in actor.spans][-3:] == ["fetching", "training", "publishing"]
    assert actor.by_activity["training"] == pytest.approx(0.27)
    assert actor.busy_share == pytest.approx(0.31)
    assert actor.by_activity["idle"] == pytest.approx(0.69)
    shown = [span for lane in answer.lanes for span in lane.spans]
    assert all(end_s - 2.0 <= span.start_s <= span.end_s <= end_s for span in shown)
    assert {span.activity for span in shown} <= set(ACTIVITIES)


def test_overlapping_spans_are_not_counted_twice(history: History) -> None:
    for start_s, end_s in ((0.0, 6.0), (2.0, 4.0), (5.0, 8.0)):
        history.now_s = BEGIN_S + 100 + end_s
        history.emit(WorkerBusy("rollout-0", "generating", BEGIN_S + 100 + start_s, BEGIN_S + 100 + end_s))
    answer = readings_of(history).cluster("run", BEGIN_S + 100, BEGIN_S + 110)
    busy = lane(answer, "rollout-0")
    assert busy.busy_share == pytest.approx(0.8)
    assert len(busy.spans) == 1


def test_a_wide_window_and_the_narrow_ones_in_it_agree(tmp_path: Path) -> None:
    """The wide one goes by summaries of blocks, the narrow ones by lines."""
    big_run(tmp_path / "run", num_events=46_000, num_episodes=2_000)
    readings = Readings(tmp_path)
    whole = readings.cluster("run")
    begin_s, end_s = whole.begin_s or 0.0, whole.end_s or 0.0
    wide = readings.cluster("run", begin_s, end_s)
    edges = [begin_s + (end_s - begin_s) * i / 10 for i in range(11)]
    parts = [readings.cluster("run", a, b) for a, b in pairwise(edges)]
    for worker in ("actor", "rollout-0", "rollout-3", "reward-1"):
        narrow = fmean(lane(part, worker).busy_share for part in parts)
        assert lane(wide, worker).busy_share == pytest.approx(narrow, abs=0.01)


def test_a_window_that_ends_before_it_begins_is_refused(runs: Path) -> None:
    with pytest.raises(BadRequest, match="before"):
        Readings(runs).cluster("small", 10.0, 5.0)


def test_a_replica_behind_or_without_answers_is_stale(history: History) -> None:
    for _ in range(8):
        history.step()
    readings = readings_of(history)
    for num_tokens in (80, 90):
        history.emit(ReplicaSeen("rollout-1", 3, False, 1, 0, 0.5, num_tokens))
        assert not any(row.is_stale for row in readings.cluster("run").replicas)
    history.emit(ReplicaSeen("rollout-1", 3, False, 1, 0, 0.5, 100), after_s=10)
    rows = {row.worker: row for row in readings.cluster("run").replicas}
    assert [name for name, row in rows.items() if row.is_stale] == ["rollout-1"]
    assert (rows["rollout-1"].version, rows["rollout-1"].behind, rows["rollout-1"].answers) == (3, 8, True)
    history.now_s += 31
    for name in ("rollout-0", "rollout-2.1"):
        history.emit(ReplicaSeen(name, 11, False, 1, 0, 0.5, 1000))
    rows = {row.worker: row for row in readings.cluster("run").replicas}
    assert [name for name, row in rows.items() if row.is_stale] == ["rollout-1", "rollout-3"]
    assert [name for name, row in rows.items() if not row.answers] == ["rollout-1", "rollout-3"]


def test_a_replica_that_keeps_lagging_is_stale_although_it_updates(history: History) -> None:
    """The run allows one version; who is between two groups may be one further behind."""
    for version in range(4, 12):
        history.emit(WeightsPublished(version, "", 1, 1, 0.0, 0.0), after_s=2.0)
        for name, behind in (("rollout-0", 0), ("rollout-1", 2), ("rollout-2", 3), ("rollout-3", 3 * (version % 2))):
            history.emit(ReplicaSeen(name, version - behind, False, 1, 0, 0.5, 10 * version))
    rows = {row.worker: row for row in readings_of(history).cluster("run").replicas}
    assert (rows["rollout-2"].version, rows["rollout-2"].behind) == (8, 3)
    assert [name for name, row in rows.items() if row.is_stale] == ["rollout-2"]


def test_a_replaced_replica_has_one_row_and_its_restart_listed(runs: Path) -> None:
    answer = Readings(runs).cluster("small")
    assert [(row.worker, row.restarts) for row in answer.replicas] == [
        ("rollout-0", 0), ("rollout-1", 0), ("rollout-2.1", 1), ("rollout-3", 0)
    ]  # fmt: skip
    (restart,) = answer.restarts
    assert (restart.worker, restart.back_s) == ("rollout-2", restart.failed_s)
    assert answer.replicas[0].tokens_per_s is not None


def test_a_worker_that_never_came_back_is_still_failed(history: History) -> None:
    history.emit(WorkerFailed("reward-0", "scoring", "it hangs"))
    assert [row.back_s for row in readings_of(history).cluster("run").restarts] == [None]


_ASYNCHRONOUS = {"rollout": 0.4, "reward": 0.3, "annotate": 0.3, "train": 0.25, "publish": 0.05, "wait_batch": 0.7}
"""Stages overlap, and one of them is at work nearly all the time."""
_SYNCHRONOUS = {"rollout": 0.2, "reward": 0.15, "annotate": 0.1, "train": 0.1, "wait_batch": 0.6, "wait_permit": 0.4}
"""Stages take turns."""


def bottleneck_of(history: History, times: Mapping[str, float]) -> Bottleneck:
    """Of 20 steps of one second that took these times."""
    metrics = {"time/step": 1.0} | {f"time/{name}": value for name, value in times.items()}
    for step in range(4, 24):
        history.emit(StepDone(step, metrics))
    found = readings_of(history).cluster("run").bottleneck
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("who", "times", "remedy"),
    [
        ("rollout", {"rollout": 0.97}, "rollout.replicas"),
        ("reward", {"reward": 0.97}, "reward.workers"),
        ("annotate", {"annotate": 0.97}, "resources.reference.threads"),
        (
            "annotate",
            {"annotate": 0.98, "train": 0.27, "wait_batch": 0.63, "wait_permit": 0.7},
            "resources.reference.threads",
        ),
        ("trainer", {"train": 0.9, "wait_batch": 0.02, "wait_permit": 0.6}, "train.mesh.shard"),
        ("trainer", {"train": 0.35, "checkpoint": 0.5, "wait_batch": 0.1, "wait_permit": 0.6}, "checkpoint.every"),
        ("trainer", {"train": 0.35, "record": 0.5, "wait_batch": 0.1, "wait_permit": 0.6}, "record.rollouts_every"),
        ("trainer", {"train": 0.25, "fetch": 0.25, "columns": 0.2, "publish": 0.22, "rollout": 0.9}, "train.mesh"),
        ("weights", {"weights_wait": 0.9}, "publishing and pulling"),
        ("evaluation", {"eval_wait": 0.8, "wait_batch": 0.1}, "eval.every"),
    ],
)
def test_who_is_at_work_most_holds_the_others_up(
    history: History, who: str, times: Mapping[str, float], remedy: str
) -> None:
    found = bottleneck_of(history, {**_ASYNCHRONOUS, **times})
    assert found.who == who
    assert remedy in found.sentence
    assert "max_staleness" not in found.sentence


@pytest.mark.parametrize("phase", ["rollout", "reward", "annotate", "train", "weights_wait"])
def test_synchronous_runs_name_the_longest_stage_and_max_staleness(history: History, phase: str) -> None:
    found = bottleneck_of(history, {**_SYNCHRONOUS, phase: 0.5})
    assert found.who == {"train": "trainer", "weights_wait": "weights"}.get(phase, phase)
    assert "50 %" in found.sentence
    assert "asynchrony.max_staleness" in found.sentence


def test_a_busier_annotator_is_the_bottleneck_despite_waiting_rollouts(history: History) -> None:
    """The shares of a real run, with a reference on two cores."""
    shares = {"rollout": 0.421, "reward": 0.227, "annotate": 0.71, "train": 0.517, "fetch": 0.025, "publish": 0.049}
    found = bottleneck_of(history, {**shares, "checkpoint": 0.093, "wait_batch": 0.148, "wait_permit": 0.27})
    assert found.who == "annotate"
    assert "the busiest annotator is at work 71 % of it, the trainer 68 %" in found.sentence


def test_where_nobody_waits_much_nobody_is_named(history: History) -> None:
    found = bottleneck_of(history, {**_ASYNCHRONOUS, "train": 0.9, "wait_batch": 0.1, "wait_permit": 0.05})
    assert (found.who, found.sentence[:20]) == ("balanced", "Nobody waits much: t")
    assert "10 %" in found.sentence and "5 %" in found.sentence


def test_faults_planted_in_a_run_are_found(tmp_path: Path) -> None:
    planted_run(tmp_path / "planted")
    answer = Readings(tmp_path).cluster("planted")
    assert answer.bottleneck is not None
    assert (answer.bottleneck.who, answer.bottleneck.shares["reward"]) == (BOTTLENECK, pytest.approx(1.0, abs=0.02))
    assert [row.worker for row in answer.replicas if row.is_stale] == [STALE_REPLICA]


def test_what_two_runs_differ_in_is_told_by_key(tmp_path: Path) -> None:
    for name, shape in (("a", Shape(groups=6)), ("b", Shape(groups=8))):
        history = History(tmp_path / name, shape)
        history.start()
        history.end("interrupted")
    answer = Readings(tmp_path).compare(["a", "b"])
    assert [row.id for row in answer.runs] == ["a", "b"]
    found = {row.key: row.values for row in answer.differences}
    assert found == {"run.name": ["a", "b"], "train.groups_per_step": ["6", "8"]}


def test_an_alert_is_open_until_the_run_is_well_again(history: History) -> None:
    for step in range(4, 20):
        history.emit(StepDone(step, {"loss": float("nan") if step == 10 else 1.0, "time/step": 1.0}), after_s=1.0)
    answer = readings_of(history).alerts("run")
    assert "not_finite" in {row.alert for row in answer.alerts}
    assert all(row.sentence for row in answer.alerts)
    is_open = [row.until_step is None for row in answer.alerts]
    assert is_open == sorted(is_open, reverse=True)
    assert readings_of(history).runs().runs[0].num_alerts == sum(is_open)


def test_thresholds_of_alerts_are_those_of_the_run(history: History) -> None:
    with (history.folder / "config.resolved.yaml").open("a") as file:
        file.write("alerts:\n  equal_groups: null\n  idle_side: 0.25\n")
    rules = {rule.alert: rule.threshold for rule in readings_of(history).alerts("run").rules}
    assert (rules["equal_groups"], rules["idle_side"]) == (None, 0.25)


def test_one_run_can_be_served_by_itself(runs: Path) -> None:
    readings = Readings(runs / "small")
    assert [row.id for row in readings.runs().runs] == ["."]
    assert readings.run(".").summary.name == "small"


def test_threads_may_read_concurrently_while_the_run_continues(history: History) -> None:
    readings, failed = readings_of(history), []

    def ask() -> None:
        try:
            for _ in range(20):
                answer = readings.series("run", ["loss"]).series[0]
                assert answer.steps == list(range(1, len(answer.steps) + 1))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        history.step()
    for thread in threads:
        thread.join()
    assert failed == []
    assert readings.change("run").step == 13


def test_samples_of_an_evaluation_open_like_training_episodes(history: History) -> None:
    history.emit(
        EvalDone(
            3, "held_out", "", 4.0, {"eval/held_out/mean": 0.5, "eval/held_out/failed_frac": 0.25}, {"no judge": 1.0}
        )
    )
    rollouts(history.folder / "evaluations/held_out/step_000003.parquet", (1.0, 0.0, None, 1.0), step=3)
    readings = readings_of(history)
    (row,) = readings.rollouts.evaluations("run").evaluations
    assert (row.scores, row.failures, row.has_samples) == ({"mean": 0.5, "failed_frac": 0.25}, {"no judge": 1.0}, True)
    group = readings.rollouts.group("run", 3, 1, "held_out")
    assert (group.previous_group_id, group.next_group_id, group.episodes[0].reason) == (0, None, "no judge")
    episode = readings.rollouts.episode("run", 3, 1, 1, "held_out")
    assert (episode.reward, episode.replay) == (1.0, "")


@pytest.mark.parametrize("dataset", ["..", "../rollouts", "hard", "/etc"])
def test_only_data_sets_of_the_run_have_samples(history: History, dataset: str) -> None:
    (history.folder / "evaluations/held_out").mkdir(parents=True)
    with pytest.raises(NoSuch, match="no evaluation on"):
        readings_of(history).rollouts.group("run", 3, 0, dataset)


def test_an_episode_has_the_timeline_that_was_recorded(history: History) -> None:
    path = rollouts(history.folder / "rollouts/step_000003.parquet", (1.0, 0.0), step=3)
    (record,) = read_records(path)
    spans = (EpisodeSpan("turn", "", 0, 0.25, 1.5), EpisodeSpan("environment", "step", 0, 1.75, 2.0))
    timed = replace(record.episodes[0], began_s=BEGIN_S, spans=spans)
    write_records(path, [replace(record, episodes=(timed, record.episodes[1]))])
    readings = readings_of(history)
    episode = readings.rollouts.episode("run", 3, 0, 0)
    assert (episode.began_s, episode.seconds, tuple(episode.timeline)) == (BEGIN_S, 3.75, spans)
    assert (episode.trajectories[0].turns[0].start_s, episode.trajectories[0].turns[0].seconds) == (0.25, 1.5)
    untimed = readings.rollouts.episode("run", 3, 0, 1)
    assert (untimed.seconds, untimed.trajectories[0].turns[0].seconds, list(untimed.timeline)) == (None, None, [])
    assert [row.seconds for row in readings.rollouts.group("run", 3, 0).episodes] == [3.75, None]


def test_failed_episodes_are_counted_by_the_text_of_their_exception(history: History) -> None:
    before = readings_of(history).failures("run")
    for group_id, failures in (
        (901, {"KeyError: 'x'": 2.0}),
        (902, {"KeyError: 'x'": 1.0, "took longer than 5 s": 1.0}),
    ):
        history.emit(GroupScored(group_id, f"task-{group_id}", (None, None, 1.0), failures))
    answer = readings_of(history).failures("run")
    shown = [(row.reason, row.num_episodes, row.last_group_id, row.last_task_id) for row in answer.failures]
    assert shown == [("KeyError: 'x'", 3, 902, "task-902"), ("took longer than 5 s", 1, 902, "task-902")]
    assert (answer.num_failed, answer.num_episodes - before.num_episodes) == (4, 6)
