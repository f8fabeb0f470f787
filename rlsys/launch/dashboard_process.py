"""Child process of a run that serves its dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsys.config import Config
from rlsys.config.run_sections import dashboard_address
from rlsys.errors import ConfigError

_GOODBYE_S = 3.0


@contextmanager
def dashboard_beside(config: Config) -> Iterator[None]:
    """Serve a dashboard of this run from a child process while the block runs, if the configuration sets its address.

    The URL is written to stderr; a URL with a token goes only to `RUN/logs/dashboard.url`, readable by the owner of the
    run. The output of the dashboard goes to `RUN/logs/dashboard.log`. A failing dashboard cannot fail the run: its
    error is one line on stderr. The run waits only for the lookup of the name of its host, because the port is
    bound before the child starts. The child ends when its standard input closes, also if this process is killed.
    """
    try:
        child = _start_dashboard(config, config.dashboard) if config.dashboard else None
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"rlsys: the dashboard did not start, training continues: {error}\n")
        child = None
    try:
        yield
    finally:
        if child is not None:
            _end(child, config.run_dir / "logs" / "dashboard.log")


def _start_dashboard(config: Config, address: str) -> subprocess.Popen[bytes]:
    from rlsys.dashboard.listener import Listener  # a slow import

    log = config.run_dir / "logs" / "dashboard.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    listener = Listener.bind(*dashboard_address(address))
    url = listener.url if listener.access.token is None else f"see {_write_url(listener.url, log.parent)}"
    fd = listener.socket.fileno()
    with listener.socket, log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlsys.cli", "dashboard", str(config.run_dir), "--fd", str(fd)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **listener.environ},
            pass_fds=[fd],
            start_new_session=True,  # Ctrl-C is for the run, which needs time to save
        )
        sys.stderr.write(f"dashboard: {url}  (its output: {log})\n")
    return child


def _write_url(url: str, folder: Path) -> Path:
    """Write the URL to a file that only the owner of the run can read, because others may read the stderr of a job."""
    path = folder / "dashboard.url"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{url}\n")
    return path


def _end(child: subprocess.Popen[bytes], log: Path) -> None:
    if child.poll() is not None:
        sys.stderr.write(f"rlsys: the dashboard ended before the run, with status {child.returncode}; see {log}\n")
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
