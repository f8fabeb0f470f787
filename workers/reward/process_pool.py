"""Processes of which each runs one call at a time; a hang and a death are told apart, and end one process only."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from rlsys.errors import RlsysError

_SPAWN = multiprocessing.get_context("spawn")

T = TypeVar("T")
LOOKS = 20
"""Looks at the running calls within a deadline: a late one is noticed at most one look later."""


class ProcessEnded(RlsysError):
    """A process ended during a call."""

    def __init__(self, exit_code: int) -> None:
        """`exit_code` is minus the number of the signal that killed it."""
        super().__init__(f"its process {_end(exit_code)}")


class PoolBroken(RlsysError):
    """No call can run: the pool is closed, or a process ended while it started."""


class CallPool(Generic[T]):
    """`num` processes that call one function. Each starts with the first call that it gets, and again after its end."""

    def __init__(
        self,
        function: Callable[..., T],
        num: int,
        timeout_s: float,
        set_up: Callable[..., None],
        given: tuple[Any, ...],
    ) -> None:
        """Every process first calls `set_up(*given)`, which does not count as part of a call and has no deadline."""
        self._members = [_CallProcess(function, set_up, given) for _ in range(num)]
        self._idle = list(self._members)
        self._places = asyncio.Semaphore(num)
        self._timeout_s, self._closed = timeout_s, threading.Event()
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="reward-call")
        """Threads that start the processes, which end with the thread that started them."""
        threading.Thread(target=self._watch, name="reward-deadlines", daemon=True).start()
        atexit.register(self._kill)

    def _watch(self) -> None:
        """Kill every process whose call is late. Waits between two looks; unblocked for good by `close`."""
        while not self._closed.wait(self._timeout_s / LOOKS):
            for member in self._members:
                member.expire()

    async def call(self, *arguments: object) -> T:
        """Run the function in a process.

        Waits for a free process, its start and its answer; unblocked by the deadline, which begins with the call.
        Raises `TimeoutError` if the process is alive at the deadline, and is killed; `ProcessEnded` if it ended by
        itself; and `PoolBroken`. Cancellation kills the process.
        """
        async with self._places:
            member = self._idle.pop()
            answer = asyncio.wrap_future(self._submit(member, arguments))
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                member.kill()
                await asyncio.wait((answer,))
                answer.exception()  # it is not lost, but of no interest
                raise
            finally:
                self._idle.append(member)

    def _submit(self, member: _CallProcess[T], arguments: tuple[object, ...]) -> Future[T]:
        try:
            return self._threads.submit(member.call, arguments, self._timeout_s)
        except RuntimeError as error:
            raise PoolBroken("it was closed") from error

    def close(self) -> None:
        """End every process at once; running calls raise `PoolBroken`. Idempotent."""
        atexit.unregister(self._kill)
        self._closed.set()
        self._kill()
        self._threads.shutdown()
        for member in self._members:
            member.release()

    def _kill(self) -> None:
        for member in self._members:
            member.close()


@dataclass
class _StartedProcess:
    process: Any
    connection: Connection
    ended: int
    """Readable once the process has ended, whoever has inherited its descriptors."""

    def release(self) -> int:
        """Wait for its end, and return the exit code."""
        while (code := self.process.exitcode) is None:  # another thread may be reaping it
            self.process.join()
        self.connection.close()
        os.close(self.ended)
        return code


class _CallProcess(Generic[T]):
    def __init__(self, function: Callable[..., T], set_up: Callable[..., None], given: tuple[Any, ...]) -> None:
        self._arguments = function, set_up, given
        self._running: _StartedProcess | None = None
        self._is_closed = False
        self._due_s: float | None = None
        """Deadline of the running call, on the monotonic clock; None between calls, and for a late one."""
        self._lock = threading.Lock()
        """Held while `_running` or `_due_s` changes, never during a call."""

    def call(self, arguments: tuple[object, ...], timeout_s: float) -> T:
        if self._running is not None and wait([self._running.ended], 0):
            self._discard(self._running)  # it ended between two calls, which is no fault of this one
        running = self._running or self._start()
        answers: list[T] = []
        with self._lock:
            self._due_s = time.monotonic() + timeout_s
        try:
            running.connection.send(arguments)
            wait([running.connection, running.ended])
            if running.connection.poll():  # an answer counts, even if the process ended right after it
                answers.append(running.connection.recv())
        except (OSError, EOFError):
            pass  # it ended while it wrote or read
        finally:
            with self._lock:
                is_late, self._due_s = self._due_s is None, None
        if is_late or not answers:
            code = self._discard(running)
            if not answers:
                raise TimeoutError if is_late else ProcessEnded(code)
        return answers[0]

    def expire(self) -> None:
        """Kill the process if its call is late. One that ended by itself is not."""
        if not self._lock.acquire(blocking=False):
            return  # it starts or ends, which may take long, and other calls have deadlines too
        try:
            running, due_s = self._running, self._due_s
            if running is None or due_s is None or time.monotonic() < due_s or wait([running.ended], 0):
                return
            self._due_s = None
            running.process.kill()
        finally:
            self._lock.release()

    def kill(self) -> None:
        with self._lock:
            if self._running is not None:
                self._running.process.kill()

    def close(self) -> None:
        self._is_closed = True
        self.kill()

    def release(self) -> None:
        """Release what a killed process had here. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.release()

    def _start(self) -> _StartedProcess:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs, *self._arguments), name="reward")
        with self._lock:
            if self._is_closed:
                raise PoolBroken("it was closed")
            process.start()
            theirs.close()
            assert process.pid is not None
            self._running = running = _StartedProcess(process, ours, os.pidfd_open(process.pid))
        with suppress(OSError, EOFError):
            wait([running.connection, running.ended])
            if running.connection.poll():
                running.connection.recv()
                return running
        raise PoolBroken(f"a process {_end(self._discard(running))} while it started")

    def _discard(self, running: _StartedProcess) -> int:
        """Kill the process if it is alive, and return its exit code."""
        with self._lock:
            self._running = None
            running.process.kill()
            code = running.release()
        if self._is_closed:
            raise PoolBroken("it was closed")
        return code


def _end(exit_code: int) -> str:
    """Describe the unexpected end of a process: `crashed (SIGSEGV)`."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"crashed ({signal.Signals(-exit_code).name})"


def _serve(
    connection: Connection, function: Callable[..., object], set_up: Callable[..., None], given: tuple[Any, ...]
) -> None:
    """Answer calls until the connection ends. Waits for a call; unblocked for good by the end of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up(*given)
    own = os.getpid()
    connection.send(None)
    with suppress(EOFError):
        while True:
            answer = function(*connection.recv())
            if os.getpid() != own:
                os._exit(0)  # a child that the function forked, and that returned from it
            connection.send(answer)
