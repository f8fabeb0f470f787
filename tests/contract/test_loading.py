"""Loading by shards: each rank reads its part of the files, and all parts together are the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlsys.errors import ModelError
from tests.by_day import first_by_day
from tests.models import save_model, tiny_gemma3, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.training import JoinedRanks, differing
from workers.model.logprobs import Scorer
from workers.model.model_loading import CPU, load_base_model, load_model
from workers.model.row_comparison import build_small_copy
from workers.train.layout import RankLayout
from workers.train.rank_group import RankGroup

FAMILIES = [tiny_llama, tiny_qwen3, tiny_gemma3, tiny_qwen3_moe]


def laid_out(path: str, has_head: bool, ranks: RankGroup) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Whole parameters, buffers, and the bytes of this rank's shards, of a model that is loaded by shards."""

    def lay_out(model: PreTrainedModel) -> None:
        RankLayout(ranks, torch.float32, CPU).apply(Scorer(model))

    if has_head:
        model = load_model(path, torch.float32, CPU, lay_out)
    else:
        model = load_base_model(path, torch.float32, CPU, lay_out, key="critic.path")
    shards = {name: p.detach() for name, p in model.named_parameters()}
    num_bytes = sum(s.to_local().nbytes if isinstance(s, DTensor) else s.nbytes for s in shards.values())
    whole = {name: s.full_tensor() if isinstance(s, DTensor) else s for name, s in shards.items()}
    return whole, dict(model.named_buffers()), num_bytes


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_shards_are_the_model_bit_for_bit(
    make: Callable[[], nn.Module], dtype: torch.dtype, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    path = save_model(tmp_path, make().to(dtype))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    size = sum(weight.nbytes for weight in weights.values())
    for of_rank in (laid_out(path, True, RankGroup()), *two_ranks(laid_out, path, True)):
        assert differing(of_rank[0], weights) == []
        assert differing(of_rank[1], buffers) == []
    assert [num_bytes for *_, num_bytes in two_ranks(laid_out, path, True)] == [size / 2] * 2


@pytest.mark.parametrize("kind", first_by_day(["gemma3_text", "ctrl", "gpt_neox", "bitnet", "persimmon", "llama"], 2))
def test_buffers_that_no_file_has_are_those_of_a_new_model(kind: str, two_ranks: JoinedRanks, tmp_path: Path) -> None:
    new = build_small_copy(AutoConfig.for_model(kind))
    new.save_pretrained(tmp_path)
    for of_rank in (laid_out(str(tmp_path), True, RankGroup()), *two_ranks(laid_out, str(tmp_path), True)):
        assert differing(of_rank[1], dict(new.named_buffers())) == []


@pytest.mark.parametrize("make", FAMILIES)
def test_a_base_model_is_read_from_the_files_of_a_whole_one(
    make: Callable[[], nn.Module], two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    path = save_model(tmp_path, make())
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).base_model
    for weights, buffers, _ in (laid_out(path, False, RankGroup()), *two_ranks(laid_out, path, False)):
        assert differing(weights, dict(plain.named_parameters())) == []
        assert differing(buffers, dict(plain.named_buffers())) == []


def test_weights_in_training_do_not_lie_in_the_files(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_llama())
    weights, _, _ = laid_out(path, True, RankGroup())
    kept = {name: weight.clone() for name, weight in weights.items()}
    (tmp_path / "model.safetensors").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert differing(weights, kept) == []


def incomplete(path: str, ranks: RankGroup) -> str:
    with pytest.raises(ModelError) as refusal:
        laid_out(path, True, ranks)
    return str(refusal.value)


def test_missing_weights_are_refused_on_every_rank(two_ranks: JoinedRanks, tmp_path: Path) -> None:
    model = tiny_qwen3()
    weights = {n: w for n, w in model.state_dict().items() if "layers.1" not in n and n != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    for refusal in two_ranks(incomplete, str(tmp_path)):
        assert "is incomplete: it lacks 11" in refusal


def test_tied_weights_that_differ_in_the_files_are_refused(two_ranks: JoinedRanks, tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_qwen3())
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for refusal in (incomplete(path, RankGroup()), *two_ranks(incomplete, path)):
        assert "set `tie_word_embeddings` to false" in refusal
