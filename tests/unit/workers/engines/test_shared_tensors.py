"""Memory that processes share: written again for every version, and left behind by none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rlsys.errors import WorkerError
from workers.engines.vllm.shared_tensors import MappedMemory, TensorMemory, reserve


def test_another_process_reads_what_was_written_last() -> None:
    memory, reader = TensorMemory("rollout-0"), MappedMemory()
    first = {"w": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "s": torch.tensor(2)}
    second = {name: tensor + 1 for name, tensor in first.items()}
    for weights in (first, second, {**second, "more": torch.randn(10_000)}, first):
        read = reader.read(memory.write(weights))
        assert read.keys() == weights.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    memory.close()
    memory.close()


def test_the_memory_has_no_name_that_could_stay_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    memory = TensorMemory("rollout-0")
    memory.write({"w": torch.zeros(1000)})
    assert set(Path("/dev/shm").iterdir()) == before
    memory.close()


def test_too_little_memory_is_refused_with_what_is_needed_and_free() -> None:
    file = os.memfd_create("test")
    with pytest.raises(
        WorkerError, match=r"rollout-0 while staging weights: .* 1000000\.0 GB .* and \d+\.\d GB are free"
    ):
        reserve(file, 10**15, "rollout-0")
    assert os.fstat(file).st_size == 0
    os.close(file)
