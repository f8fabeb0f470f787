"""Errors of ranks: the death of a rank is raised in place of what its peers report."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError

from rlsys.errors import CheckpointError, RlsysError, TrainingError, WorkerDied, WorkerError
from rlsys.loop.checkpoint import copy_and_write
from rlsys.testing import now, run_virtual
from workers.ray.worker_process import Remote
from workers.train.ranks import ActorRank
from workers.train.train_handles import LOOK_S, ActorHandle

RESET = WorkerError("actor-0", "training a step", "RuntimeError: Connection reset by peer")
UNWRITTEN = CheckpointError("cannot write training state to actor: Connection reset by peer")


@dataclass
class Method:
    """Method of a rank's process that returns, or raises `error`, after some seconds."""

    error: Exception | None = None
    seconds: float = 0.0

    async def remote(self, *_: object) -> dict[str, int]:
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return {}


def dies(known_s: float) -> Method:
    """A method of a process that is dead, which is known after some seconds."""
    return Method(ActorDiedError(), known_s)


@dataclass
class Process:
    """Process of a rank."""

    call: Method = field(default_factory=Method)
    beside: Method = field(default_factory=Method)
    beat: Method = field(default_factory=Method)


def actor_of(*ranks: Process) -> ActorHandle:
    return ActorHandle(lambda _: [Remote(f"actor-{n}", ActorRank, rank, 600.0) for n, rank in enumerate(ranks)], 6.0)


async def save(actor: ActorHandle) -> None:
    await copy_and_write(actor.save(Path("actor")))


def failure_of(call: Coroutine[object, object, object]) -> tuple[RlsysError, float]:
    """The error of a call, and the seconds until it was raised."""

    async def main() -> tuple[RlsysError, float]:
        with pytest.raises(RlsysError) as raised:
            await call
        return raised.value, now()

    return run_virtual(main())


@pytest.mark.parametrize("error", [RESET, UNWRITTEN, TrainingError("the loss is nan")])
def test_a_death_outranks_the_errors_of_peers(error: RlsysError) -> None:
    peer, dead = Process(call=Method(error)), Process(dies(0.3), dies(0.3), dies(0.3))
    failure, seconds = failure_of(actor_of(peer, dead, peer).load(Path("actor")))
    assert isinstance(failure, WorkerDied) and failure.worker == "actor-1"
    assert failure.__cause__ is error
    assert seconds == pytest.approx(0.3)


def test_a_death_outranks_errors_while_a_checkpoint_is_written() -> None:
    peer, dead = Process(beside=Method(UNWRITTEN)), Process(beside=dies(0.3), beat=dies(0.3))
    failure, _ = failure_of(save(actor_of(peer, dead)))
    assert isinstance(failure, WorkerDied) and failure.worker == "actor-1"


def test_an_error_among_live_ranks_is_raised_at_once() -> None:
    failure, seconds = failure_of(actor_of(Process(call=Method(RESET)), Process()).load(Path("actor")))
    assert (failure, seconds) == (RESET, 0.0)


def test_a_silent_rank_delays_an_error_by_two_seconds() -> None:
    silent = Process(beat=dies(known_s=1000.0))
    failure, seconds = failure_of(actor_of(Process(call=Method(RESET)), silent).load(Path("actor")))
    assert failure is RESET
    assert seconds == pytest.approx(LOOK_S) == 2.0
