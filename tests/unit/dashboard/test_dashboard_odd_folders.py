"""Odd folders among runs: each affects at most itself, never the list of runs."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.http_server import Answer
from rlsys.dashboard.index.folders import EVENTS, METRICS, RunFolder
from rlsys.dashboard.query.configs import modification_stamp, read_config
from rlsys.dashboard.query.queries import MOST_OPENED, Readings
from rlsys.dashboard.query.run_preview import Glimpse
from rlsys.util.files import CONFIG
from tests.histories import History, Shape, small_run

pytestmark = pytest.mark.slow


class Vanishing(RunFolder):
    """One whose files are deleted between being found and being read."""

    def file(self, *parts: str) -> Path | None:
        return self.path / "deleted" / parts[-1]


def listed(root: Path) -> list[str]:
    """The ids of all runs, as the address `/api/runs` answers."""
    return [row["id"] for row in orjson.loads(Answer(Readings(root).runs()).body)["runs"]]


def test_a_folder_whose_name_is_no_text_is_left_out(tmp_path: Path) -> None:
    small_run(tmp_path / "good")
    small_run(tmp_path / "odd").rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert listed(tmp_path) == ["good"]


def test_runs_below_such_a_folder_are_answered(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"caf\xe9")
    root.mkdir()
    small_run(tmp_path / "good").rename(root / "good")
    assert listed(root) == ["good"]
    readings = Readings(root)
    assert b"caf\xef\xbf\xbd/good" in Answer(readings.run("good")).body
    assert Answer(readings.rollouts.episode("good", 30, readings.rollouts.groups("good").groups[0].group_id, 0)).body


@pytest.mark.parametrize("text", ["a: 2024-99-99", "a: &x {b: *x}", "a: {b", "- 1", "a: \x00", "[" * 400, "x: é"])
@pytest.mark.parametrize("has_metrics", [True, False], ids=["at a glance", "opened"])
def test_an_unreadable_configuration_is_shown_as_text(tmp_path: Path, text: str, has_metrics: bool) -> None:
    run = small_run(tmp_path / "odd")
    (run / CONFIG).write_text(text)
    if not has_metrics:
        (run / METRICS).unlink()
    assert listed(tmp_path) == ["odd"]
    readings = Readings(tmp_path)
    assert readings.run("odd").config == text
    assert readings.compare(["odd"]).differences == []


def test_files_deleted_during_a_read_count_as_missing(tmp_path: Path) -> None:
    folder = Vanishing(tmp_path, ".")
    assert (read_config(folder).text, modification_stamp(folder)) == ("", (-1, -1))
    run = small_run(tmp_path / "run")
    glimpse = Glimpse(RunFolder(tmp_path, "run"), run / EVENTS, run / METRICS)
    for name in (EVENTS, METRICS):
        (run / name).unlink()
    glimpse.look()
    assert glimpse.history.step == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_files_of_somebody_else_are_not_there(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    for name in (CONFIG, EVENTS):
        (run / name).chmod(0)
    assert listed(tmp_path) == ["run"]
    assert Readings(tmp_path).run("run").config == ""


def test_rollouts_on_another_disk_are_named_as_that(tmp_path: Path) -> None:
    run = small_run(tmp_path / "root" / "run")
    (run / "rollouts").rename(tmp_path / "disk")
    (run / "rollouts").symlink_to(tmp_path / "disk")
    readings = Readings(tmp_path / "root")
    assert not any(row.has_rollouts for row in readings.rollouts.groups("run").groups)
    with pytest.raises(NoSuch, match=r"`rollouts` leads out of .*/root, the folder that is served: serve"):
        readings.rollouts.group("run", 30, 0)
    assert Readings(tmp_path).rollouts.groups("root/run").last_step == 30


def test_a_file_of_rollouts_that_leads_out_is_not_listed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "root" / "run")
    (run / "rollouts" / "step_000099.parquet").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text('{"step":99,"group_id":0,')
    assert Readings(tmp_path / "root").rollouts.groups("run").last_step == 30


def test_the_run_list_agrees_with_the_opened_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    whole = (run / CONFIG).read_text()
    anchored = "base: &base {path: another}\nmodel: *base\nalerts: {idle_side: null}\n"
    for config in (whole, "{model: {path: another}, alerts: {idle_side: null}}", anchored):
        (run / CONFIG).write_text(config)
        (row,) = Readings(tmp_path).runs().runs
        assert row == Readings(tmp_path).run("run").summary


def test_a_glance_notices_another_configuration(tmp_path: Path) -> None:
    run, readings = small_run(tmp_path / "run"), Readings(tmp_path)
    assert readings.runs().runs[0].model == "models/tiny-4"
    (run / CONFIG).write_text("model: {path: another}\n")
    assert readings.runs().runs[0].model == "another"


def test_a_multi_policy_run_is_listed_with_its_policies_step(tmp_path: Path) -> None:
    History(tmp_path / "run", Shape()).start()
    policy = History(tmp_path / "run" / "policies" / "solver", Shape())
    policy.start()
    policy.step()
    assert {row.id: row.step for row in Readings(tmp_path).runs().runs} == {"run": 1, "run/policies/solver": 1}


def test_runs_beyond_the_limit_leave_memory_and_can_reopen(tmp_path: Path) -> None:
    opened = Readings(tmp_path)
    for number in range(MOST_OPENED + 3):
        History(tmp_path / f"run{number}", Shape()).start()
        opened.run(f"run{number}")
    assert opened.num_opened == MOST_OPENED
    assert opened.run("run0").summary.name == "run0"
