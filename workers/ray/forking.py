"""Start of workers by a fork: the server of this machine, and the environment that lets Ray use it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlsys.util.importing import search_path
from workers.ray import fork_client, fork_server

LONGEST_FOLDER = 39
"""Letters of a folder that leave room for a session and a socket in it, of which Linux takes 107."""
FORKED, PLAIN = "forked", "plain"
"""Scripts in a server's folder: Python for a worker that is forked, and for one that is not."""
_EITHER = '[ -x "$0" ] && exec "$0" "$@"; exec "$PYTHON" "$@"'
"""Python of a worker: the script, or, on a machine without one, that of the driver."""


@dataclass(frozen=True, slots=True)
class ForkServer:
    """Process of `workers.ray.fork_server`. Workers without a GPU that start while it is open are forked by it."""

    process: subprocess.Popen[bytes]
    folder: Path
    before: str | None = None
    """Socket of the server that this process used before."""

    @classmethod
    def start(cls, folder: Path | None = None) -> Self:
        """Start the process, with its socket in `folder` or a new one, for all workers that this process starts from
        now on."""
        if folder is None:
            temporary = tempfile.gettempdir()
            short = temporary if len(temporary) <= LONGEST_FOLDER else "/tmp"  # the name of a socket is short
            folder = Path(tempfile.mkdtemp(prefix="rlsys-forks-", dir=short))
        else:
            folder.mkdir(mode=0o700)
        path = folder / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(128)
            number = listener.fileno()
            words = [sys.executable, "-P", "-m", fork_server.__name__, str(number)]
            env = _environment_of_forks(os.environ)
            # A process group of its own: Ctrl-C is not for it.
            process = subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0, env=env, pass_fds=[number])
        _write_script(folder / PLAIN, sys.executable, "-P")
        _write_script(folder / FORKED, sys.executable, "-I", "-S", fork_client.__file__)
        before, os.environ[fork_client.SERVER] = os.environ.get(fork_client.SERVER), str(path)
        return cls(process, folder, before)

    def close(self) -> None:
        """End it. Workers that it has forked go on."""
        if os.environ.get(fork_client.SERVER) == str(self.folder / "socket"):
            del os.environ[fork_client.SERVER]
            os.environ.update({fork_client.SERVER: self.before} if self.before else {})
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def fork_environment(environment: Mapping[str, str], *, has_gpu: bool) -> dict[str, object]:
    """Runtime environment of a worker: it is forked if it has no GPU and this process uses a server.

    It does not search the current folder for modules, nor do its own processes, except on a machine without a server.
    """
    if (path := os.environ.get(fork_client.SERVER)) is None:
        return {"env_vars": dict(environment)}
    script = Path(path).with_name(PLAIN if has_gpu else FORKED)
    python = shlex.join(["env", f"PYTHON={sys.executable}", "sh", "-c", _EITHER, str(script)])
    forks = {} if has_gpu else {fork_client.SERVER: path}
    return {"env_vars": {**environment, **forks}, "py_executable": python}


def _write_script(path: Path, *words: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o700)


def _environment_of_forks(environment: Mapping[str, str]) -> dict[str, str]:
    return {fork_server.FIRST: "1", **environment, "PYTHONPATH": search_path()}
