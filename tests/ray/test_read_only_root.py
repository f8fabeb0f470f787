"""A run confined as the pods of `deploy/kuberay` are: only a home, /tmp and the folder of runs can be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes import requires_bubblewrap
from tests.ray.commands import RLSYS, ROOT, Command, job_in


@pytest.mark.nightly
def test_a_run_writes_nothing_outside_its_folder_home_and_tmp(
    model_path: Path, data_path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    requires_bubblewrap()
    job = job_in(tmp_path, model_path, data_path)
    (home := tmp_path / "home").mkdir()
    read_only = [
        tmp_path_factory.getbasetemp(),
        ROOT,
        Path(sys.prefix).resolve(),
    ]  # what of these lies in /tmp stays visible
    confined = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--unshare-pid", "--proc", "/proc", "--tmpfs", "/tmp"]
    confined += [word for path in read_only for word in ("--ro-bind", str(path), str(path))]
    confined += ["--bind", str(tmp_path), str(tmp_path), "--setenv", "HOME", str(home), "--setenv", "TMPDIR", "/tmp"]
    with Command(*confined, "--cap-drop", "ALL", RLSYS, "train", job.file, *job.keys, "run.steps=2") as command:
        ended = command.end()
    assert ended.code == 0, ended.stderr
    assert job.steps == [1, 2]
