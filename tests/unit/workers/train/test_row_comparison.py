"""A small copy of a model shows whether rows compute what a plain forward does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlsys.config import Config
from rlsys.errors import ModelError
from rlsys.launch.preflight import check_architectures
from tests.by_day import first_by_day
from tests.families import FAMILIES, tiny
from workers.model.row_comparison import build_small_copy, compare_rows

RELEASED = ("cohere2", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "llama", "mixtral", "opt", "qwen2_moe", "qwen3")
"""Families whose configurations have, without a value of ours, the sizes of a released model."""


def outline(kind: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))


@pytest.mark.parametrize("family", first_by_day(["gemma3", "qwen3_moe", *FAMILIES], 2))
def test_rows_of_a_family_agree_with_plain_forwards(family: str) -> None:
    compare_rows(tiny(family), "model 'tiny'")


@pytest.mark.parametrize("kind", first_by_day(RELEASED, 2))
def test_a_model_of_full_size_is_compared_in_small(kind: str) -> None:
    model = outline(kind)
    compare_rows(model, "model 'large'")
    num = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in build_small_copy(model.config).parameters()) < min(num / 2, 3e7)


def test_a_model_that_attends_to_later_tokens_in_plain_forwards_is_refused_with_the_figure() -> None:
    with pytest.raises(ModelError, match=r"BertGenerationDecoder computes .* differ by up to \d\.?\d* nats"):
        compare_rows(outline("bert-generation"), "model 'tiny'")


def test_a_run_of_such_a_model_is_refused_before_it_starts(tmp_path: Path) -> None:
    AutoConfig.for_model("bert-generation", hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    config = Config.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": str(tmp_path)},
            "data": {"path": "rows.jsonl"},
            "reward": {"fn": "exact"},
        }
    )
    with pytest.raises(ModelError, match="nats from those of a plain forward"):
        check_architectures(config)
