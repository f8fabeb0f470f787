"""Runs resumed with another configuration: the configuration of each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.launch.config_history import changed_keys, path_at
from rlsys.launch.run_folder import Start
from rlsys.launch.session_files import SessionFiles


class Sessions:
    """Starts of one run."""

    def __init__(self, folder: Path) -> None:
        self._keys = ["model.path=m", "data.path=d", f"run.folder={folder}", "run.steps=9"]
        self.run = folder / "run"

    def begin(self, lr: float, start: int, checkpoints: Path | None = None) -> None:
        checkpoint = (checkpoints or self.run / "checkpoints") / f"step_{start:06d}"
        config = Config.load([], [*self._keys, f"train.lr={lr}"])
        SessionFiles(config, Start(checkpoint if start else None), is_new=False).begin(start)

    def lr_at(self, step: int) -> float:
        return Config.load(path_at(self.run, step)).train.lr

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.run / "configs").glob("*"))


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path)


def test_each_step_has_the_configuration_of_its_session(sessions: Sessions) -> None:
    sessions.begin(lr=1, start=0)
    sessions.begin(lr=2, start=10)
    sessions.begin(lr=2, start=15)
    sessions.begin(lr=1, start=20)
    assert [sessions.lr_at(step) for step in (1, 10, 11, 15, 20, 21)] == [1, 1, 2, 2, 2, 1]
    assert sessions.kept == ["until_step_000010.yaml", "until_step_000020.yaml"]
    assert changed_keys(sessions.run, range(9, 12)) == ("train.lr",)
    assert changed_keys(sessions.run, range(11, 21)) == ()


def test_a_session_that_came_to_no_checkpoint_is_forgotten(sessions: Sessions) -> None:
    sessions.begin(lr=1, start=0)
    sessions.begin(lr=2, start=10)
    sessions.begin(lr=3, start=10)
    assert [sessions.lr_at(step) for step in (10, 11)] == [1, 3]


def test_resuming_from_an_older_checkpoint_discards_later_sessions(sessions: Sessions) -> None:
    sessions.begin(lr=1, start=0)
    sessions.begin(lr=2, start=20)
    sessions.begin(lr=3, start=10)
    assert [sessions.lr_at(step) for step in (10, 11, 21)] == [1, 3, 3]
    assert sessions.kept == ["until_step_000010.yaml"]


def test_unchanged_or_restarted_sessions_are_not_kept(sessions: Sessions, tmp_path: Path) -> None:
    sessions.begin(lr=1, start=0)
    sessions.begin(lr=1, start=10)
    sessions.begin(lr=2, start=0)
    sessions.begin(lr=3, start=10, checkpoints=tmp_path / "another" / "checkpoints")
    assert (sessions.kept, sessions.lr_at(1)) == ([], 3)


def test_only_the_owner_of_a_run_reads_its_configurations(sessions: Sessions) -> None:
    sessions.begin(lr=1, start=0)
    (sessions.run / "config.resolved.yaml").chmod(0o644)
    sessions.begin(lr=2, start=10)
    paths = [sessions.run / "config.resolved.yaml", sessions.run / "configs" / "until_step_000010.yaml"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
