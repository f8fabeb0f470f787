"""Several loaded versions of weights: their memory, and the version the model computes with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlsys.weight_sync.manifest import content_hash
from tests.contract.engines import qwen
from workers.engines.local.local_engine import Residents
from workers.transport.checksums import hash_of, spec_of

IDS = torch.tensor([[1, 2, 3]])


def named(seed: int, *, tied: bool = True) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in qwen(seed=seed, tied=tied).named_parameters()}


def num_bytes_of(residents: Residents) -> int:
    """Bytes of all sets, shared tensors counted once."""
    tensors = {tensor.data_ptr(): tensor for tensors in residents._sets.values() for tensor in tensors.values()}
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_computes_with_the_set_that_is_used(tied: bool) -> None:
    model = qwen(tied=tied)
    residents = Residents(model, 0)
    with torch.no_grad():
        expected = [qwen(tied=tied, seed=seed)(IDS).logits for seed in (0, 1)]
        residents.add(1, residents.lay_out(named(1, tied=tied)))
        for version in (0, 1, 0, 1):
            residents.use(version)
            assert torch.equal(model(IDS).logits, expected[version])


def test_unchanged_tensors_are_shared_and_changed_ones_copied() -> None:
    residents = Residents(qwen(), 0)
    num_bytes = num_bytes_of(residents)
    weights = {name: tensor.clone() for name, tensor in named(0).items()}
    weights["model.norm.weight"] += 1
    tensors, held = residents.lay_out(weights), hash_of(weights)
    residents.add(1, tensors)
    assert num_bytes_of(residents) == num_bytes + weights["model.norm.weight"].nbytes
    assert held == hash_of(tensors)
    weights["model.norm.weight"] += 1  # what was given is the giver's
    assert held == hash_of(tensors)


def test_a_zero_of_the_other_sign_is_a_change() -> None:
    residents = Residents(qwen(), 0)
    weights = {name: torch.zeros_like(tensor) for name, tensor in named(0).items()}
    residents.add(1, residents.lay_out(weights))
    negative = {name: -tensor for name, tensor in weights.items()}
    assert hash_of(residents.lay_out(negative)) == hash_of(negative) != hash_of(weights)


def test_released_versions_free_their_memory_even_when_in_use() -> None:
    model = qwen()
    residents = Residents(model, 0)
    num_bytes = num_bytes_of(residents)
    first, second = ({name: tensor + more for name, tensor in named(0).items()} for more in (1, 2))
    residents.add(1, residents.lay_out(first))
    residents.add(2, residents.lay_out(second))
    assert num_bytes_of(residents) == 3 * num_bytes
    residents.use(1)
    residents.evict_all_but({0})
    assert residents.versions == (0, 2)
    assert num_bytes_of(residents) == 2 * num_bytes
    assert hash_of(dict(model.named_parameters())) == hash_of(second)
    residents.evict_all_but(())
    assert residents.versions == (2,)
    assert num_bytes_of(residents) == sum(p.nbytes for p in model.parameters()) == num_bytes


def test_a_tied_tensor_may_be_given_under_either_name() -> None:
    residents = Residents(qwen(), 0)
    weights = named(1)
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    assert residents.lay_out(both).keys() == residents.lay_out(weights).keys()
    residents.add(1, residents.lay_out(both))
    specs = [spec_of(name, tensor) for name, tensor in both.items()]
    assert content_hash(residents.checksums(specs)) == hash_of(both)


def test_weights_are_widened_to_the_type_of_the_model_and_summed_in_their_own() -> None:
    residents = Residents(qwen(), 0)
    weights = {name: tensor.bfloat16() for name, tensor in named(1).items()}
    residents.add(1, residents.lay_out(weights))
    assert {tensor.dtype for tensor in residents.lay_out(weights).values()} == {torch.float32}
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]
    assert content_hash(residents.checksums(specs)) == hash_of(weights)


def test_overwriting_replaces_weights_and_version_in_place() -> None:
    model = qwen()
    residents = Residents(model, 0)
    num_bytes = num_bytes_of(residents)
    residents.overwrite(7, named(1))
    assert hash_of(named(1)) == hash_of(dict(model.named_parameters()))
    assert residents.versions == (7,)
    assert num_bytes_of(residents) == num_bytes
