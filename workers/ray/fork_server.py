"""A process that has imported the large libraries, and forks the workers of a node.

    python -m workers.ray.fork_server LISTENER

Importing torch and transformers takes a worker seconds of a processor, and all workers of a machine import the same.
Ray starts each worker without a GPU by `workers.ray.fork_client`, which asks this server for a fork: it has the
libraries already, and shares their memory. A local cluster has one server, a joined cluster one on each node. Ray is
not imported here, because its constants depend on the environment, nor are our modules that import Ray. A process with
a GPU is never forked: CUDA does not survive it. Tests fork short programs, too.

LISTENER is the descriptor of a socket that listens. When standard input ends, whose writer is the process that started
the server, it removes the folder of the socket and ends. A forked worker ends with its client, which is the process
that the raylet knows until the worker reports its own.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module

from workers.ray.fork_client import BEGUN

PRELOADED = (
    "numpy", "pydantic", "safetensors.torch", "torch", "torch.distributed.fsdp", "torch.distributed.tensor",
    "transformers.modeling_utils", "transformers.integrations.sdpa_attention", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_fast",
    "google.protobuf.message", "jsonschema", "psutil", "requests", "yaml",
    "rlsys.config", "rlsys.rewards", "rlsys.agents.session", "rlsys.loop.checkpoint", "rlsys.weight_sync.relay",
)  # fmt: skip
"""Modules that workers use, or Ray in them; one that is not installed is left out."""
FIRST = "RLSYS_FORKED"
"""First variable of the server's environment."""
EXITS = "exits"
"""Folder beside the socket: a file for each worker that ended badly."""
NUM_STREAMS = 3
"""Standard input, output and error, which the client hands over."""


def main() -> None:
    """Import the libraries, then fork a worker for every client until standard input ends.

    Waits for clients and for the end of standard input; unblocked by either.
    """
    with socket.socket(fileno=int(sys.argv[1])) as listener:  # clients wait for the imports, which take them as long
        for name in PRELOADED:
            with suppress(ImportError):
                import_module(name)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy the pages of all these objects
        folder = os.path.dirname(listener.getsockname())  # noqa: PTH120
        exits = os.path.join(folder, EXITS)  # noqa: PTH118
        os.makedirs(exits, exist_ok=True)  # noqa: PTH103
        signal.signal(signal.SIGCHLD, lambda number, frame: note_ends(exits))
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                shutil.rmtree(folder, ignore_errors=True)
                return
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                become_worker(client)
            client.close()


def note_ends(folder: str) -> None:
    """Reap the workers that have ended, and write the exit code of those that ended badly to `folder/PID`: minus the
    number of the signal, if one killed it."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if code := os.waitstatus_to_exitcode(ended[1]):
                with suppress(OSError), open(os.path.join(folder, str(ended[0])), "w") as file:  # noqa: PTH118, PTH123
                    file.write(str(code))


def become_worker(client: socket.socket) -> None:
    """Run the program that a client was started for, with all that it hands over. Does not return."""
    os.setpgid(0, 0)  # Ray kills the whole process group of a worker that ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(client, 1 << 16, NUM_STREAMS)
    while not request.endswith(b"\n"):
        if not (more := client.recv(1 << 16)):
            os._exit(1)  # the client has ended
        request += more
    fields = json.loads(request)
    client.send(BEGUN)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _set_environment(fields["environment"])
    os.chdir(fields["folder"])
    os.nice(fields["niceness"] - os.nice(0))
    sys.argv = fields["arguments"]
    is_module = sys.argv[0] == "-m"
    program = sys.argv[is_module]
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = [path for path in sys.path if path and path not in named]
    first = [] if is_module else [os.path.dirname(program)]  # noqa: PTH120
    sys.path[:] = [*first, *named, *own]
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    threading.Thread(target=_end_with, args=(client,), name="client", daemon=True).start()
    code = 0
    try:
        if is_module:
            del sys.argv[0]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    client.send(bytes([code & 0xFF]))
    os._exit(code)


def _set_environment(wanted: Mapping[str, str]) -> None:
    """Change the environment. Its first variable stays where it is: Ray finds the title of a process by it."""
    for name in os.environ.keys() - wanted.keys() - {FIRST}:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _end_with(client: socket.socket) -> None:
    """End this process once the client has ended, as the raylet may have killed it. Waits for that alone."""
    with suppress(OSError):
        client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
