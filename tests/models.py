"""Tiny models on disk and random samples, for tests that need a real causal language model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlsys.batch.samples import Sample
from rlsys.types import Episode, Trajectory, Turn, VersionSpan

VOCAB = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def tiny_qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """Tied embeddings, normalised queries and keys."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True, **changes}
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Untied embeddings, grouped queries."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, **changes}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def tiny_gemma3(**changes: Any) -> Gemma3ForCausalLM:
    """Tied embeddings that are scaled, and layers with two rotary bases; no sliding window within its context."""
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_key_value_heads": 2, "query_pre_attn_scalar": 8, "sliding_window": 128}
    sizes: dict[str, Any] = {**SIZES, **heads, "tie_word_embeddings": True, **changes}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()


def tiny_qwen3_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    """Four experts a layer, of which a token uses two; on disk each expert has matrices of its own."""
    torch.manual_seed(0)
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, **experts, **changes}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()


def tiny_sorter(**changes: int) -> Qwen3ForCausalLM:
    """About 12,000 random parameters over the 90 symbols of `examples.sort`, unless `changes` are of sizes. vLLM needs
    a `head_dim` of 32 or more."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 90,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **changes,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes))


def save_model(folder: Path, model: torch.nn.Module) -> str:
    """The model with a one-character tokenizer, as `from_pretrained` wants it; returns the path."""
    words = {chr(48 + i): i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")))
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return str(folder)


def random_sample(rng: random.Random, prompt: tuple[int, ...], num_turns: int = 1) -> Sample:
    """A completion after `prompt`; with more turns, observations that are not trained lie between them."""
    ids: list[int] = []
    trained: list[bool] = []
    for turn in range(num_turns):
        if turn:
            trained += [False] * 3
        trained += [True] * rng.randint(1, 5)
    ids = [rng.randrange(VOCAB) for _ in trained]
    logprobs = tuple(-3 * rng.random() if on else 0.0 for on in trained)
    return Sample(prompt, tuple(ids), tuple(trained), logprobs, (VersionSpan(0, sum(trained)),))


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))


def episode_of(sample: Sample, reward: float | None = None, agent: str = "lead") -> Episode:
    """The episode whose only trajectory has exactly this sample."""
    turns: list[Turn] = []
    start = 0
    for end in range(1, len(sample.is_trained) + 1):
        if end == len(sample.is_trained) or (sample.is_trained[end - 1] and not sample.is_trained[end]):
            first = next(i for i in range(start, end) if sample.is_trained[i])
            output = sample.completion_ids[first:end]
            span = (VersionSpan(0, len(output)),)
            prompt = (*sample.prompt_ids, *sample.completion_ids[:first])
            turns.append(Turn(prompt, output, sample.logprobs[first:end], span, "stop", ""))
            start = end
    return Episode((Trajectory(agent, tuple(turns), reward=reward),))


def random_group(rng: random.Random, size: int) -> tuple[Episode, ...]:
    """Episodes of one prompt, with random rewards; one in three has two turns."""
    prompt = random_prompt(rng)
    return tuple(episode_of(random_sample(rng, prompt, 1 + (i % 3 == 2)), rng.random()) for i in range(size))
