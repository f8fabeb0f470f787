"""Models that would be computed wrongly are refused by name, from their configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from rlsys.cli import app
from rlsys.errors import ModelError
from tests.families import EXPERTS, FAMILIES, SIZES, tiny
from tests.models import save_model
from workers.model.model_loading import load_base_model, load_model, supported_outline
from workers.model.model_support import check_context, check_supported
from workers.model.row_comparison import compare_rows

LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
NEXT: dict[str, Any] = {
    **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent": ("qwen3_next", NEXT, r"Qwen3NextForCausalLM has recurrent states \(linear_attention\), which cannot"),
    "mamba": ("mamba", {}, r"MambaForCausalLM has recurrent states"),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"has recurrent states \(conv\)"),
    "own mask": ("doge", {"keep_window_size": 8}, r"DogeAttention makes a mask of its own"),
    "chunks": ("llama4_text", {"intermediate_size_mlp": 48}, r"has layers of type chunked_attention"),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens"),
    "shared keys": ("gemma3n_text", {"num_kv_shared_layers": 1}, "layers that share the keys of others"),
    "window untold": (
        "qwen2_moe",
        {**EXPERTS, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "has the sliding windows 8, none by its configuration, and its layers attend with none, none",
    ),
    "own attention": ("gptj", {"rotary_dim": 4}, "has attention of its own"),
    "no positions": ("bloom", {}, "takes no positions"),
    "narrow values": (
        "deepseek_v3",
        {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
        "DeepseekV3Attention has values of another width than keys",
    ),
    "more output": ("roberta", {"is_decoder": True}, "has more between its last states and its logits"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "has quantized weights"),
}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "llava"])
def test_a_model_that_reads_images_is_refused(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"\({kind}\) also has encoders for vision, and rlsys trains models of text"):
        supported_outline(str(tmp_path))


def outline_of(kind: str, **changes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_is_refused_by_name_with_the_remedy(case: str) -> None:
    kind, changes, words = REFUSED[case]
    with pytest.raises(ModelError, match=rf"^model 'tiny' is not supported: .*{words}.*(choose|give) ") as caught:
        check_supported(outline_of(kind, **changes), "model 'tiny'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_supported(family: str) -> None:
    check_supported(tiny(family).to("meta"), family)  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [load_model, lambda path, dtype: load_base_model(path, dtype, key="critic.path")])
def test_workers_refuse_it_too(load: Any, tmp_path: Path) -> None:
    path = _folder(tmp_path)
    with pytest.raises(ModelError, match="Qwen3NextForCausalLM has recurrent states"):
        load(path, torch.float32)


LONG: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}


@pytest.mark.parametrize(("kind", "changes", "limit"), [("phi3", LONG, 64), ("llama", DYNAMIC, 256)])
def test_rotary_embeddings_that_change_with_length_are_refused_beyond_it(
    kind: str, changes: dict[str, Any], limit: int
) -> None:
    model = outline_of(kind, **changes)
    check_supported(model, "tiny")
    compare_rows(model, "tiny")
    check_context(model, limit, "tiny")
    words = rf"tiny has rotary embeddings of type .* set rollout.max_context_tokens to {limit} or less"
    with pytest.raises(ModelError, match=words):
        check_context(model, limit + 1, "tiny")


def test_other_rotary_embeddings_have_any_length() -> None:
    for family in ("gemma3", "gpt_oss", "llama3"):
        check_context(tiny(family), 1_000_000, family)


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["plan"]])
def test_every_command_refuses_it_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "0 1", "answer": "1"}) + "\n")
    values = {
        "model.path": _folder(tmp_path), "data.path": tmp_path / "tasks.jsonl", "reward.fn": "exact",
        "run.folder": tmp_path / "runs", "run.name": "a", "run.steps": 100, "rollout.max_new_tokens": 8,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text("")
    keys = [f"{key}={value}" for key, value in values.items()]
    done = CliRunner().invoke(app, [*command[:1], str(tmp_path / "run.yaml"), *command[1:], *keys])
    assert isinstance(done.exception, ModelError)
    assert str(done.exception).startswith(f"model.path {str(values['model.path'])!r} is not supported: Qwen3NextFor")


def _folder(folder: Path) -> str:
    return save_model(
        folder / "next", AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **SIZES | NEXT))
    )
