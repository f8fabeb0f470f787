"""Wishes of `rlsys scale`, and the run that hears them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.errors import ConfigError
from rlsys.launch.run_folder import make_run_dir, write_run_dir
from rlsys.launch.run_lock import lock_run
from rlsys.launch.scaling import WISH, follow, scale
from tests.jobs import config_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = config_of(tmp_path, tmp_path / "tasks.jsonl", tmp_path, [])
    make_run_dir(config)
    write_run_dir(config)
    return config.run_dir


@pytest.mark.parametrize("wishes", [[], ["rollouts=0"], ["rollouts=-1"], ["rollouts=two"], ["rollouts=99999"],
                                    ["replicas=2"], ["rollouts=2", "rollouts=3"]])  # fmt: skip
def test_any_other_wish_is_refused(run: Path, wishes: list[str]):
    with pytest.raises(ConfigError, match=r"give rollouts=N, a number of replicas from 1 to 10,000; .* was given"):
        scale(run, wishes)


def test_a_folder_without_a_running_run_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no run is running in .*rollout\.replicas=2"):
        scale(run, ["rollouts=2"])
    with pytest.raises(ConfigError, match="is not a run directory"):
        scale(tmp_path / "nothing", ["rollouts=2"])
    assert not (run / WISH).exists()


def test_a_run_on_servers_of_its_own_is_refused(tmp_path: Path):
    keys = ["rollout.engine={urls: ['http://127.0.0.1:1']}"]
    config = config_of(tmp_path, tmp_path / "tasks.jsonl", tmp_path, keys)
    make_run_dir(config)
    write_run_dir(config)
    with pytest.raises(ConfigError, match="samples at the servers"):
        scale(config.run_dir, ["rollouts=2"])


def test_a_run_hears_each_wish_once_and_refuses_what_is_none(run: Path):
    (run / WISH).write_text("rollouts=7")  # of an earlier session
    heard: asyncio.Queue[int | str] = asyncio.Queue()

    async def main() -> None:
        async with follow(run, heard.put_nowait, heard.put_nowait):
            with lock_run(run):
                assert scale(run, ["rollouts=3"]) == 3
                assert await heard.get() == 3
                (run / WISH).write_bytes(b"\xff")
                assert "cannot be followed" in str(await heard.get())
                scale(run, ["rollouts=1"])
                assert await heard.get() == 1
        assert heard.empty() and not (run / WISH).exists()

    asyncio.run(asyncio.wait_for(main(), 60))
