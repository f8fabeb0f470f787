"""Room for the object store, on file systems of made-up sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlsys.errors import ClusterError
from workers.ray.shared_memory import MIB, local_store_bytes, shared_memory_problem


@dataclass
class Size:
    free: int
    total: int = 1000 * MIB


def test_a_full_shared_memory_is_named_before_the_start():
    with pytest.raises(ClusterError) as raised:
        local_store_bytes(measure=lambda folder: Size(8 * MIB))
    assert str(raised.value).startswith("/dev/shm has 8 MiB free of 1000, and the object store of a local Ray cluster")
    assert "--shm-size" in str(raised.value)


def test_a_store_takes_no_more_than_is_free():
    assert local_store_bytes(600 * MIB, lambda folder: Size(400 * MIB)) == 380 * MIB
    assert local_store_bytes(600 * MIB, lambda folder: Size(900 * MIB)) == 600 * MIB


def test_a_full_shared_memory_is_named_with_a_failure():
    assert shared_memory_problem(lambda folder: Size(MIB)).startswith("/dev/shm has 1 MiB free of 1000: remove files")
    assert shared_memory_problem(lambda folder: Size(100 * MIB)) == ""
