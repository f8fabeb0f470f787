"""Ranks in processes of their own on this machine, without Ray: if one fails, the others end with it."""

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
"""A rank that fails makes its peers fail soon: theirs may be heard first, and say less."""


def in_processes(count: int, work: Callable[[int, str], T], phase: str) -> T:
    """What `work(rank, address)` returns on rank 0 of `count`; ranks find each other at the address.

    If a rank fails, all others are ended, wherever they wait, and the error that says most is raised: of ours, else
    `WorkerDied` for a process that is gone, named after what it was doing, `phase`, else what it is.
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
    """When asked to end: pebble's own handler is Python's, and never called where a rank waits in a collective."""
    signal(SIGTERM, SIG_DFL)


def _errors(ranks: list[ProcessFuture], phase: str) -> list[BaseException]:
    """Those of the ranks once all have returned, or one has failed."""
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
