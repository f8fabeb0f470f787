"""Activation checkpointing changes memory and no number."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.trainer import peak_of
from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch
from rlsys.config.train_section import ActivationCheckpointing
from rlsys.types import Distribution, VersionSpan
from tests.models import VOCAB, random_prompt, random_sample, tiny_llama, tiny_qwen3
from workers.model.decoder_layers import checkpoint_layers
from workers.model.logprobs import trained_logprobs

CHECKPOINTED: tuple[ActivationCheckpointing, ...] = ("selective", "full")


def gradients(make: Callable[[], PreTrainedModel], batch: MicroBatch, how: ActivationCheckpointing) -> list[Tensor]:
    """Logprobs, entropies, then the gradient of every parameter, of a sum in which each token has its own weight."""
    model = make()
    checkpoint_layers(model, how)
    logprobs_N, entropy_N = trained_logprobs(model, batch, Distribution(0.7))
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
    return [logprobs_N, entropy_N, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", CHECKPOINTED)
@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_checkpointing_changes_no_bit(
    make: Callable[[], PreTrainedModel], how: ActivationCheckpointing, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [random_prompt(rng) for _ in range(3)]
    batch = MicroBatch.of([random_sample(rng, prompt, turns) for prompt in prompts for turns in (1, 3)])
    plain, checkpointed = gradients(make, batch, "none"), gradients(make, batch, how)
    assert len(plain) == len(checkpointed) > 2
    assert all(map(torch.equal, plain, checkpointed))


def peak_bytes(how: ActivationCheckpointing) -> int:
    """Most bytes alive beyond those before a forward and backward of samples that share a prompt."""
    model = tiny_llama(num_hidden_layers=8, max_position_embeddings=256)
    batch = MicroBatch.of([sample_of(prompt=40, completion=100, seed=seed) for seed in range(4)])
    checkpoint_layers(model, how)
    return peak_of(lambda: trained_logprobs(model, batch, Distribution(1.0))[0].sum().backward())


def sample_of(prompt: int, completion: int, seed: int) -> Sample:
    rng = random.Random(seed)
    ids = tuple(rng.randrange(VOCAB) for _ in range(completion))
    return Sample(tuple(range(prompt)), ids, (True,) * completion, (0.0,) * completion, (VersionSpan(0, completion),))


def test_checkpointing_keeps_less_memory() -> None:
    none, selective, full = peak_bytes("none"), peak_bytes("selective"), peak_bytes("full")
    assert full < 0.4 * none
    assert full < selective < 0.8 * none
