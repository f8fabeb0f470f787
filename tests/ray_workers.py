"""Processes of Ray workers, and how tests kill them."""

from __future__ import annotations

from contextlib import suppress

import psutil
import ray
from ray.exceptions import RayActorError

from workers.ray.fault_tolerant_pool import Pool


def workers_of(kind: str) -> list[psutil.Process]:
    """Processes of Ray workers of this class that this process started, oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if title.startswith(f"ray::{kind}"):
            found.append(process)
    return sorted(found, key=psutil.Process.create_time)


def kill_worker(kind: str) -> None:
    """Kill the youngest process of a Ray worker of this class that this process started."""
    workers_of(kind)[-1].kill()


def kill_for_good(pool: Pool) -> None:
    """Kill the first worker of a pool, and return once no call reaches it any more: `ray.kill` does not wait."""
    worker = pool.members[0].worker
    worker.kill()
    with suppress(RayActorError):
        while True:
            ray.get(worker.actor.where.remote())
