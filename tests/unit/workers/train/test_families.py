"""Every family that people train: rows give the logprobs and gradients of plain forwards."""

from __future__ import annotations

import random

import pytest
import torch

from rlsys.batch.tensors import MicroBatch
from rlsys.types import Distribution
from tests.families import FAMILIES, WINDOW, tiny
from tests.models import VOCAB, random_prompt, random_sample
from tests.unit.workers.train.test_scoring import gradients, plain
from workers.model.logprobs import trained_logprobs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_equals_plain_forwards(family: str) -> None:
    """In fp64, or in fp32 for models of experts, whose grouped product has no fp64."""
    model, rng = tiny(family), random.Random(0)
    model.set_attn_implementation("eager")  # others leave soft caps and sinks out
    model, tolerance = (model, 1e-4) if hasattr(model.config, "num_experts_per_tok") else (model.double(), 5e-6)
    prompts = [random_prompt(rng), tuple(rng.randrange(VOCAB) for _ in range(2 * WINDOW))]
    samples = [random_sample(rng, prompt, turns) for prompt in prompts for turns in (1, 2, 3, 4)]
    expected_N, entropies_N = plain(model, samples, 0.7)
    actual_N, entropy_N = trained_logprobs(model, MicroBatch.of(samples), Distribution(0.7))
    torch.testing.assert_close(actual_N.double(), expected_N.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy_N.double(), entropies_N.double(), rtol=tolerance, atol=tolerance)
    expected, actual = gradients(model, expected_N), gradients(model, actual_N)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-12, name
