"""Memory that leaves its device: all of it, once, and back bit for bit."""

from __future__ import annotations

import pytest
import torch

from workers.model.moving_memory import MovingMemory

CPU = torch.device("cpu")


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_tensors_come_back_as_they_were_also_those_that_share_memory():
    whole, scalar, empty = torch.randn(100, 7), torch.tensor(3.0), torch.empty(0)
    part, alias = whole[10:20], whole.t()
    before = [tensor.clone() for tensor in (whole, part, alias, scalar, empty)]
    memory = MovingMemory(CPU)
    for _ in range(3):
        memory.move_out([part, scalar, whole, alias, empty])
        assert memory.num_bytes == 4 * (700 + 1)
        assert sizes(whole, part, alias, scalar) == [0] * 4
        memory.move_in()
        assert memory.num_bytes == 0
        for tensor, old in zip((whole, part, alias, scalar, empty), before, strict=True):
            assert torch.equal(tensor, old)
    whole[10] += 1
    assert torch.equal(part[0], before[1][0] + 1), "they still share it"


def test_what_changed_meanwhile_on_the_device_moves_with_its_new_value():
    tensor, memory = torch.zeros(5), MovingMemory(CPU)
    memory.move_out([tensor])
    memory.move_in()
    tensor += 2
    memory.move_out([tensor, torch.ones(3)])
    memory.move_in()
    assert tensor.tolist() == [2.0] * 5


def test_memory_of_other_devices_stays():
    here, elsewhere = torch.zeros(5), torch.zeros(5, device="meta")
    memory = MovingMemory(torch.device("cuda"))
    memory.move_out([here, elsewhere])
    assert (memory.num_bytes, sizes(here)) == (0, [20])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_empty_while_its_memory_is_away():
    device = torch.device("cuda")
    tensor, memory = torch.randn(1 << 22, device=device), MovingMemory(device)
    before, reserved = tensor.cpu(), torch.cuda.memory_reserved()
    memory.move_out([tensor])
    assert torch.cuda.memory_reserved() <= reserved - (1 << 24)
    memory.move_in()
    assert torch.equal(tensor.cpu(), before)
