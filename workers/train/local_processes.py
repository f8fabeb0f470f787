"""Ranks in processes on this machine, without Ray: if one fails, the others end with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIGTERM, signal
from tempfile import TemporaryDirectory
from typing import TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from rlsys.errors import RlsysError, WorkerDied

T = TypeVar("T")
_LAST_WORDS_S = 1.0
"""Wait for errors of the other ranks: a failing rank makes its peers fail, with less helpful errors."""


def in_processes(count: int, work: Callable[[int, str], T], phase: str) -> T:
    """Run `work(rank, address)` on `count` ranks and return the result of rank 0. Ranks join each other at the address.

    If a rank fails, all others are ended and the most informative error is raised. In order: an `RlsysError`,
    `WorkerDied` for a process that has died (`phase` names its task), any other error.
    """
    pool = ProcessPool(count, initializer=_die_at_once, context=get_context("spawn"))
    with TemporaryDirectory() as folder:
        try:
            ranks = [pool.schedule(work, args=(rank, f"file://{Path(folder, 'ranks')}")) for rank in range(count)]
            if errors := _errors(ranks, phase):
                raise min(errors, key=lambda error: (not isinstance(error, RlsysError), isinstance(error, WorkerDied)))
            return ranks[0].result()
        finally:
            pool.stop()
            pool.join()


def _die_at_once() -> None:
    """Restore the default SIGTERM: pebble's Python handler never runs while a rank waits in a collective."""
    signal(SIGTERM, SIG_DFL)


def _errors(ranks: list[ProcessFuture], phase: str) -> list[BaseException]:
    """Errors of the ranks once all have returned, or one has failed."""
    done, others = wait(ranks, return_when=FIRST_EXCEPTION)
    if others:
        done = done | wait(others, timeout=_LAST_WORDS_S).done
    found = [(number, error) for number, rank in enumerate(ranks) if rank in done and (error := rank.exception())]
    return [_named(error, number, phase) for number, error in found]


def _named(error: BaseException, number: int, phase: str) -> BaseException:
    if not isinstance(error, ProcessExpired):
        return error
    died = WorkerDied(f"rank {number}", phase, "its process ended; was it short of memory?")
    died.__cause__ = error
    return died
