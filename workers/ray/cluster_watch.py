"""Watch over the cluster from the process that uses it: it notices that Ray's head or this node's raylet is gone, and
that Ray has declared this node dead, because its raylet was stopped for longer than Ray waits.

Ray itself waits 60 s for a lost head, without a message, and then ends the process from native code.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import ray
from ray._private.worker import global_worker
from ray.exceptions import RayError

from rlsys.errors import ClusterLost, full_text
from rlsys.util.printing import print_note

STDERR = 2
LOOK_S = 1.0
"""Seconds between two connections to the head, and between two cancellations of what does not end."""
NODE_LOOKS = 5
"""Connections to the head between two questions whether this node is alive."""
ANSWER_S = 2.0
"""Deadline of a connection to the head."""
MISSES = 3
"""Refused connections in a row after which the head counts as lost."""
CUT_S = 30.0
"""Seconds without any answer after which it does: Ray itself waits 60 s for a link, and needs some to end."""
STUCK_S = 20.0
"""Seconds without a look after which the stacks of all threads are written to stderr: something holds Python's lock."""
REACT_S = 4.0
"""Seconds in which the event loop must react to a loss. A call into Ray may block it for ever then."""
SAVE_S = 4.0
"""Seconds for a last checkpoint: workers may still answer, because they are called directly."""
END_S = 30.0
"""Seconds from the reaction to the end of the cluster: less than the 60 s after which Ray ends the process."""


def ignore(lost: ClusterLost) -> None:
    """Do nothing at a loss."""


@dataclass
class ClusterWatch:
    """Watch over the cluster that this process has joined; `during` is its use."""

    head: tuple[str, int]
    """Host and port of the head."""
    raylet: int
    """Process id of this node's raylet."""
    node_id: str
    logs: str
    """Folder of the cluster's logs."""
    _is_refused: bool = field(default=False, init=False)
    """True if the head's machine refused the last connection that failed: its process has ended."""
    _lost: ClusterLost | None = field(default=None, init=False)
    _task: asyncio.Task[object] | None = field(default=None, init=False)
    """The task that uses the cluster."""
    _num_cancels: int = field(default=0, init=False)
    _reacted: threading.Event = field(default_factory=threading.Event, init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    @classmethod
    def of_this_process(cls) -> ClusterWatch:
        """Find out what to watch."""
        node = global_worker.node
        assert node is not None, "Ray is initialized"
        host, _, port = node.gcs_address.rpartition(":")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(node.raylet_socket_name)
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        raylet, _, _ = struct.unpack("3i", peer)
        node_id = ray.get_runtime_context().get_node_id()
        return cls((host.strip("[]"), int(port)), raylet, node_id, node.get_logs_dir_path())

    @property
    def has_lost(self) -> bool:
        """True after a loss."""
        return self._lost is not None

    def end(self) -> None:
        """End the watch: the cluster is no longer used."""
        self._ended.set()

    @asynccontextmanager
    async def during(
        self, on_loss: Callable[[ClusterLost], None] = ignore, on_stuck: Callable[[ClusterLost], None] = ignore
    ) -> AsyncIterator[None]:
        """Raise `ClusterLost` instead of what the block raises if the cluster is lost in it.

        At the loss, `on_loss` is called, and the block is cancelled. It has `SAVE_S` to end; then each further wait in
        it is cancelled too. If the event loop does not react, or `end` is not called in time, `on_stuck` is called in
        another thread, and the process ends with the message and the exit code of the error.
        """
        self._task = asyncio.current_task()
        arguments = asyncio.get_running_loop(), on_loss, on_stuck
        threading.Thread(target=self._watch, args=arguments, name="cluster-watch", daemon=True).start()
        try:
            yield
        except Exception as error:
            lost = self._lost or await asyncio.to_thread(self._loss)  # workers end with the cluster, and may be first
            if lost is None:
                raise
            self._lost = lost
            raise lost from error
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            raise self._lost from None
        finally:
            assert self._task is not None
            for _ in range(self._num_cancels):
                self._task.uncancel()
            self._task = None
            if self._lost is None:
                self.end()

    def _watch(
        self,
        loop: asyncio.AbstractEventLoop,
        on_loss: Callable[[ClusterLost], None],
        on_stuck: Callable[[ClusterLost], None],
    ) -> None:
        """Wait for the loss of the cluster; unblocked by it or by `end`.

        The end of the raylet's process wakes it. The head, perhaps on another machine, cannot notify. If this thread
        itself cannot run, because native code holds Python's lock, the stacks of all threads are written to stderr.
        """
        try:
            num_misses, looks, answered_s = 0, count(1), time.monotonic()
            while num_misses < MISSES and not self._raylet_ends(LOOK_S):
                if self._ended.is_set():
                    return
                faulthandler.dump_traceback_later(STUCK_S, file=STDERR)
                if self._head_answers():
                    num_misses, answered_s = 0, time.monotonic()
                    if next(looks) % NODE_LOOKS == 0 and self._is_declared_dead():
                        break
                elif time.monotonic() - answered_s > CUT_S:
                    break
                elif self._is_refused:
                    num_misses += 1
            lost = self._loss() or self._error("Ray's head is not reachable")
            if self._ended.is_set():
                return
            faulthandler.dump_traceback_later(STUCK_S + END_S, file=STDERR)
            loop.call_soon_threadsafe(self._react, lost, on_loss)
            if self._reacted.wait(REACT_S) and self._ended.wait(END_S):
                return
            on_stuck(lost)
            print_note(f"rlsys: {full_text(lost)}")
            os._exit(lost.exit_code)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _react(self, lost: ClusterLost, on_loss: Callable[[ClusterLost], None]) -> None:
        """Cancel the block, unless it has ended or knows of a loss."""
        self._reacted.set()
        if self._lost is None and self._task is not None:
            self._lost = lost
            on_loss(lost)
            self._cancel(SAVE_S)

    def _cancel(self, next_s: float) -> None:
        if self._task is not None:
            self._num_cancels += 1
            self._task.cancel()
            self._task.get_loop().call_later(next_s, self._cancel, LOOK_S)

    def _loss(self) -> ClusterLost | None:
        """The error if the cluster is gone at this moment."""
        if self._raylet_ends(0):
            return self._error(f"the raylet of this node (process {self.raylet}) has ended")
        if not self._head_answers():
            host, port = self.head
            return self._error(f"Ray's head (gcs_server at {host}:{port}) accepts no connection")
        if self._is_declared_dead():
            return self._error(
                f"Ray has declared this node dead, because its raylet (process {self.raylet}) did not answer, and "
                "places nothing on it any more; a node that may stop for longer needs a larger "
                "RAY_health_check_failure_threshold"
            )
        return None

    def _error(self, what: str) -> ClusterLost:
        return ClusterLost(f"the Ray cluster is lost: {what}; see gcs_server.* and raylet.* in {self.logs}")

    def _raylet_ends(self, within_s: float) -> bool:
        try:
            process = os.pidfd_open(self.raylet)
        except ProcessLookupError:
            return True
        try:
            end = select.poll()
            end.register(process, select.POLLIN)
            return bool(end.poll(within_s * 1000))
        finally:
            os.close(process)

    def _is_declared_dead(self) -> bool:
        """Ask the head, in a thread that may hang with it; False without an answer within `ANSWER_S`."""
        found: list[bool] = []

        def look() -> None:
            with suppress(RayError, OSError):  # it may be ending now
                found.append(any(n["NodeID"] == self.node_id and not n["Alive"] for n in ray.nodes()))

        thread = threading.Thread(target=look, name="cluster-look", daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        return any(found)

    def _head_answers(self) -> bool:
        try:
            socket.create_connection(self.head, ANSWER_S).close()
        except OSError as error:
            self._is_refused = isinstance(error, ConnectionRefusedError)
            return False
        return True
