"""Monitoring settings of a configuration, and the dashboard that a run starts."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from rlsys.config import Config
from rlsys.dashboard.listener import Listener
from rlsys.errors import ConfigError
from rlsys.launch.dashboard_process import dashboard_beside
from tests.histories import small_run

pytestmark = pytest.mark.slow


def config_of(folder: Path, *overrides: str) -> Config:
    file = folder / "job.yaml"
    file.write_text(
        f"run: {{steps: 10, folder: {folder}}}\nmodel: {{path: some/model}}\ndata: {{path: rows.jsonl}}\n"
        "dashboard: 127.0.0.1:0\n"
    )
    return Config.load(file, overrides)


def status(url: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", "/api/run?run=.", headers={"Authorization": f"Bearer {url.partition('token=')[2]}"})
    return connection.getresponse().status


def url_in(text: str) -> str:
    """The address on the one line that was told."""
    (line,) = text.splitlines()
    assert line.startswith("dashboard: http://127.0.0.1:")
    return line.split()[1]


def test_the_dashboard_is_served_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    small_run(config.run_dir)
    with dashboard_beside(config):
        url = url_in(capsys.readouterr().err)
        assert status(url) == 200
    with pytest.raises(ConnectionRefusedError):
        status(url)
    assert (config.run_dir / "logs" / "dashboard.log").read_text() == ""


def test_one_that_wants_none_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dashboard_beside(config_of(tmp_path, "dashboard=")):
        assert capsys.readouterr().err == ""


def test_a_port_that_is_taken_costs_the_run_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = Listener.bind("127.0.0.1", 0, {})
    port = taken.socket.getsockname()[1]
    with dashboard_beside(config_of(tmp_path, f"dashboard=127.0.0.1:{port}")):
        pass
    taken.socket.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlsys: the dashboard did not start, training continues: cannot listen on port {port} ")


def test_an_invalid_dashboard_host_costs_only_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dashboard_beside(config_of(tmp_path, "dashboard=my..host:0")):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "rlsys: the dashboard did not start, training continues: cannot listen on port 0 of my..host: "
    )
    assert "set the host of `dashboard`" in line


def test_the_address_with_its_token_is_readable_by_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, "dashboard=0.0.0.0:0")
    small_run(config.run_dir)
    address = config.run_dir / "logs" / "dashboard.url"
    for _ in ("once", "again, as a run that is resumed"):
        with dashboard_beside(config):
            told, url = capsys.readouterr().err, address.read_text().strip()
            assert told.startswith(f"dashboard: see {address}")
            assert url.partition("token=")[2] not in told
            assert address.stat().st_mode & 0o777 == 0o600
            assert status(f"http://127.0.0.1:{urlsplit(url).port}/?{urlsplit(url).query}") == 200


def test_a_dashboard_that_dies_early_is_reported_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    before = set(psutil.Process().children())
    with dashboard_beside(config):
        (child,) = {*psutil.Process().children()} - before
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    log = config.run_dir / "logs" / "dashboard.log"
    ended = f"rlsys: the dashboard ended before the run, with status -9; see {log}"
    assert capsys.readouterr().err.splitlines()[1:] == [ended]


def test_a_run_that_is_killed_takes_its_dashboard_with_it(tmp_path: Path) -> None:
    small_run(config_of(tmp_path).run_dir)
    program = f"""
import sys
from rlsys.config import Config
from rlsys.launch.dashboard_process import dashboard_beside

with dashboard_beside(Config.load({str(tmp_path / "job.yaml")!r})):
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        url = url_in(run.stderr.readline())
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        bearer = {"Authorization": f"Bearer {url.partition('token=')[2]}"}
        connection.request("GET", "/api/stream?run=.", headers=bearer)
        stream = connection.getresponse()
        assert stream.readline().startswith(b"id: ")
        run.kill()
        with suppress(http.client.IncompleteRead):
            stream.read()  # to its end, which is that of the dashboard


def test_alert_thresholds_are_set_by_name_and_disabled_with_null(tmp_path: Path) -> None:
    config = config_of(tmp_path, "alerts={entropy_collapse: 0.1, idle_side: null}", "alerts.kl_tail=2")
    assert config.alerts == {"entropy_collapse": 0.1, "idle_side": None, "kl_tail": 2.0}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("alerts.entropy_colapse=0.1", "alerts.entropy_colapse: no such alert; did you mean `entropy_collapse`?"),
        ("alerts.x=1", "alerts.x: no such alert; there are: reward_drop, evaluation_drop, "),
        ("alerts.kl_tail=much", "alerts.kl_tail: "),
        ("alerts.kl_tail=.nan", "alerts.kl_tail: "),
        ("dashboard=127.0.0.1:70000", "dashboard: should be HOST:PORT, such as 127.0.0.1:8321"),
        ("dashboard=true", "dashboard: input should be a valid string"),
        ("dashboard.port=1", "dashboard.port: no such key: set `dashboard: HOST:PORT`"),
    ],
)
def test_what_is_wrong_with_them_is_named(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, override)
    assert told in str(caught.value)
