"""One local Ray cluster and one tiny model for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from examples.sort.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def tiny_model(seed: int = 0, num_layers: int = 1) -> PreTrainedModel:
    """About 40,000 random parameters over the 90-symbol vocabulary of `examples.sort`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    rows = [{"prompt": f"{i * 7919 % 1000:03d}>"[: 2 + i % 3], "answer": str(i % 10)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
