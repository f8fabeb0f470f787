"""Algorithms that fail in the middle of a step."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL
from socket import SHUT_RDWR, socket

import psutil
from pydantic.dataclasses import dataclass

from algorithms.corrections import Policies
from algorithms.fields import RULES
from algorithms.grpo import GRPO
from rlsys.algorithm import LossOutput


@dataclass(frozen=True, kw_only=True, config=RULES)
class Deadly(GRPO):
    """GRPO whose rank 1 kills its process while rank 0 waits for it in a collective, once the pipe `order` exists."""

    order: str

    def surrogate(self, policies: Policies) -> LossOutput:
        from torch.distributed import barrier, get_rank

        order = Path(self.order)
        if order.exists() and get_rank() == 0:
            order.write_bytes(b"about to wait")
            barrier()
        elif order.exists():
            order.read_bytes()
            order.unlink()
            os.kill(os.getpid(), SIGKILL)
        return super().surrogate(policies)


def _cut_connections(peer: psutil.Process) -> None:
    """Cut all connections of this process with another."""
    ports = {connection.laddr.port for connection in peer.net_connections("tcp")}
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port in ports:
            with socket(fileno=os.dup(connection.fd)) as of_peer:
                of_peer.shutdown(SHUT_RDWR)


@dataclass(frozen=True, kw_only=True, config=RULES)
class Parting(GRPO):
    """GRPO whose rank 1 cuts its connections with rank 0, which waits for it in a collective, once the pipe `order`
    exists; each process stays alive."""

    order: str
    stays: bool = False
    """True if the pipe stays too, so that the same happens again."""

    def surrogate(self, policies: Policies) -> LossOutput:
        from torch.distributed import barrier, get_rank, is_initialized

        order = Path(self.order)
        is_due = is_initialized() and order.exists()  # a rank also tries its loss before it joins the others
        if is_due and get_rank() == 0:
            order.write_text(str(os.getpid()))
            if not self.stays:
                order.unlink()
            barrier()
        elif is_due:
            _cut_connections(psutil.Process(int(order.read_text())))
        return super().surrogate(policies)
