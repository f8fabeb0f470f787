"""Room for Ray's object store in /dev/shm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ray._private.utils import estimate_available_memory, resolve_object_store_memory

from rlsys.errors import ClusterError

SHM = "/dev/shm"
WEIGHTS = "rlsys-weights-"
"""Begin of the names of files with published weights."""
SHARE = 0.95
"""Share of the free part of /dev/shm that a local cluster may use."""
MIB = 2**20
MIN_STORE = 128 * MIB
"""Least bytes of an object store that a local cluster starts with: some small models and their groups."""
FULL = 16 * MIB
"""A /dev/shm with less free is full: a write into it ends the process that writes."""
REMEDY = (
    "remove files there that no process uses, end other clusters, or make it larger: docker run --shm-size=8g; in "
    "Kubernetes, mount an emptyDir with `medium: Memory` there"
)


class Usage(Protocol):
    """Bytes of a file system."""

    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...


Measure = Callable[[str], Usage]
"""Measures the file system of a folder."""


def local_store_bytes(wanted: int | None = None, measure: Measure = shutil.disk_usage) -> int | None:
    """Bytes for the object store of a new local cluster: as many as Ray takes by default, if /dev/shm has them.

    Ray itself would use the disk if it has not. None leaves the choice to Ray: without a /dev/shm, or where the user
    allows the disk by RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE. Raises `ClusterError` if /dev/shm is full.
    """
    if os.environ.get("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE") or not Path(SHM).is_dir():
        return None
    room = int(measure(SHM).free * SHARE)
    if room < MIN_STORE:
        raise ClusterError(
            f"{_room(SHM, measure)}, and the object store of a local Ray cluster needs {MIN_STORE // MIB} MiB: {REMEDY}"
        )
    return min(room, wanted or resolve_object_store_memory(estimate_available_memory()))


def shared_memory_problem(measure: Measure = shutil.disk_usage) -> str:
    """Text with the remedy if /dev/shm of this node is full; else empty."""
    is_full = Path(SHM).is_dir() and measure(SHM).free < FULL
    return f"{_room(SHM, measure)}: {REMEDY}" if is_full else ""


def _room(folder: str, measure: Measure) -> str:
    usage = measure(folder)
    return f"{folder} has {usage.free // MIB} MiB free of {usage.total // MIB}"
