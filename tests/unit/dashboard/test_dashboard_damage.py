"""Run folders with damaged files: every question is answered, or refused in words."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from rlsys.cli import export, replay
from rlsys.config.changed_keys import changed_keys
from rlsys.dashboard.http_server import Answer
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.report.html_report import report_of
from rlsys.dashboard.tail import tail
from rlsys.errors import RlsysError
from tests.damage import damage
from tests.histories import small_run

FOLDERS_PER_CASE = 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("whole") / "run")


def answers(readings: Readings) -> Iterator[object]:
    """Ask every question about the run, and those whose answers lie in its first, middle and last step."""
    for question in (readings.run, readings.metrics, readings.alerts, readings.cluster, readings.ledger):
        with suppress(RlsysError):
            yield question("run")
    for ask in (
        readings.runs,
        lambda: readings.series("run", ["reward/mean", "*", "eval/*"]),
        lambda: readings.cluster("run", -1e300, 1e300),
        lambda: readings.compare(["run", "run"]),
        lambda: readings.rollouts.groups("run"),
        lambda: readings.rollouts.task("run", "task-1"),
        lambda: readings.change("run"),
    ):
        with suppress(RlsysError):
            yield ask()
    for step in (1, 15, 30):
        for group_id in (0, 4 * step - 4):
            for about in (
                lambda step=step: readings.rollouts.groups("run", step),
                lambda step=step, group_id=group_id: readings.rollouts.group("run", step, group_id),
                lambda step=step, group_id=group_id: readings.rollouts.episode("run", step, group_id, 1),
            ):
                with suppress(RlsysError):
                    yield about()


@pytest.mark.slow
def test_questions_about_damaged_runs_are_answered_or_refused(whole: Path, tmp_path: Path, fuzz_case: int) -> None:
    random = Random(fuzz_case)
    for i in range(FOLDERS_PER_CASE):
        read_damaged(whole, tmp_path / str(i), random)


@pytest.mark.parametrize("value", ["!!bool x", "0x" + "f" * 5000, "2024-99-99"])
def test_an_odd_value_of_a_configuration_is_shown(whole: Path, tmp_path: Path, value: str) -> None:
    for name, seed in (("a", value), ("b", "1")):
        shutil.copytree(whole, tmp_path / name)
        (tmp_path / name / "config.resolved.yaml").write_text(f"run:\n  seed: {seed}\nmodel:\n  path: {seed}\n")
    readings = Readings(tmp_path)
    assert all(Answer(answer).body for answer in (readings.run("a"), readings.compare(["a", "b"])))


def test_aliases_that_grow_without_bound_are_shown_in_part(whole: Path, tmp_path: Path) -> None:
    grown = ", ".join(f"a{i}: &a{i} [{', '.join(8 * [f'*a{i - 1}' if i else 'x'])}]" for i in range(20))
    for name in "ab":
        shutil.copytree(whole, tmp_path / name)
        (tmp_path / name / "config.resolved.yaml").write_text(f"run: {{name: {name}, {grown}}}\n")
    readings = Readings(tmp_path)
    assert all(Answer(answer).body for answer in (readings.run("a"), readings.compare(["a", "b"])))


@pytest.mark.parametrize("value", ["1e308", "-1e308"])
def test_a_run_with_enormous_metrics_is_shown(whole: Path, tmp_path: Path, value: str) -> None:
    shutil.copytree(whole, tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    events.write_bytes(
        re.sub(rb'("metrics":\{.*?"gac/cosine":)[^,}]+', rb"\g<1>" + value.encode(), events.read_bytes())
    )
    assert value.encode() in events.read_bytes()
    assert Answer(Readings(tmp_path).run("run")).body


def read_damaged(whole: Path, folder: Path, random: Random) -> None:
    """Copy a run into a folder, damage files of it, and let every reader read it."""
    run = folder / "run"
    shutil.copytree(whole, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for _ in range(random.choice([1, 1, 2, 4])):
        damage(random.choice([*3 * [path for path in files if path.parent == run], *files]), random)
    readings = Readings(run.parent)
    assert all(Answer(answer).body for answer in answers(readings))
    with suppress(RlsysError):
        report_of(Readings(run), changed_keys)
    with suppress(RlsysError):
        tail(run, io.StringIO(), once=True)
    with suppress(RlsysError):
        export(run, folder / "model")
    with suppress(RlsysError):
        replay(run, step=1)
