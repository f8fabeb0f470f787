"""Make the tiny policy and its tasks: `python -m examples.sort.prepare --out DIR --seed N`.

The policy is warm-started on a *mixture of modes*: half of its demonstrations are correct, a quarter sort in descending
order and a quarter copy the prompt. Like a real base model it can do the task, but not reliably, so reinforcement
learning improves it quickly.

Writes into DIR: `model/` (safetensors, tokenizer), `train.jsonl`, `eval.jsonl`, and last `prepared.json`, which marks
the rest as complete. A DIR prepared with the same seed and recipe is left as it is.

Shape suffixes: `B` demonstrations, `D` digits of one, `T` tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.tiny_policy import (
    EOS,
    WarmStart,
    build_tokenizer,
    fill_from_command_line,
    new_model,
    once,
    train_supervised,
    write_tasks,
)

NUM_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Recipe(WarmStart):
    """Recipe of the prepared files."""

    steps: int = 250
    right: float = 0.5
    """Share of demonstrations that sort ascending."""
    descending: float = 0.25
    """Share that sort descending; the rest copy the prompt."""
    num_train: int = 8192
    """Rows of `train.jsonl`, all distinct; 150 steps of 32 use 4,800."""
    num_eval: int = 512
    """Rows of `eval.jsonl`, disjoint from `train.jsonl` and the demonstrations."""


@once
def prepare(out: Path, recipe: Recipe) -> dict[str, float]:
    """Fill `out` unless it is complete for this recipe; return the figures of the warm start.

    The figures: `sampled` and `greedy` accuracy on the evaluation rows, `loss` of the last batch, and `cpu_s`.
    """
    eval_D, train_D, demonstrations_D = draw_digits(recipe)
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    batches = demonstrations(tokenizer, demonstrations_D, recipe).split(recipe.batch_size)
    loss = train_supervised(model, ((ids_BT, ids_BT[:, -NUM_DIGITS - 1 :]) for ids_BT in batches), recipe)
    figures = {"loss": loss, "sampled": accuracy(model, tokenizer, eval_D, greedy=False)}
    figures["greedy"] = accuracy(model, tokenizer, eval_D, greedy=True)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    texts = map(row_texts, [*eval_D.tolist(), *train_D.tolist()])
    write_tasks(out, [{"prompt": prompt, "answer": answer} for prompt, answer in texts], recipe.num_eval)
    return figures


def draw_digits(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Draw disjoint sets of six-digit prompts, out of a million: for evaluation, training and demonstrations."""
    sizes = [recipe.num_eval, recipe.num_train, recipe.steps * recipe.batch_size]
    numbers = torch.randperm(10**NUM_DIGITS, generator=torch.Generator().manual_seed(recipe.seed))[: sum(sizes)]
    places_D = 10 ** torch.arange(NUM_DIGITS - 1, -1, -1)
    evaluation, train, demonstrations = (numbers[:, None] // places_D % 10).split(sizes)
    return evaluation, train, demonstrations


def demonstrations(tokenizer: PreTrainedTokenizerFast, digits_D: Tensor, recipe: Recipe) -> Tensor:
    """Token ids of `385120>012358<eos>` and its wrong variants, one row of 14 for each prompt."""
    mode = torch.rand(len(digits_D), 1, generator=torch.Generator().manual_seed(recipe.seed + 1))
    ascending_D = digits_D.sort(-1).values
    wrong_D = torch.where(mode < recipe.right + recipe.descending, ascending_D.flip(-1), digits_D)
    answer_D = torch.where(mode < recipe.right, ascending_D, wrong_D)
    symbol = torch.tensor(tokenizer.convert_tokens_to_ids([*"0123456789", ">", EOS]))
    ones = torch.ones(len(digits_D), 1, dtype=torch.long)
    return symbol[torch.cat([digits_D, 10 * ones, answer_D, 11 * ones], dim=1)]


def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, digits_D: Tensor, *, greedy: bool) -> float:
    """Return the share of exact answers, of one sample each at temperature 1 or of greedy ones."""
    prompts, answers = zip(*map(row_texts, digits_D.tolist()), strict=True)
    replies = said(model, tokenizer, prompts, greedy=greedy)
    return sum(s == a + EOS for s, a in zip(replies, answers, strict=True)) / len(answers)


@torch.no_grad()
def said(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], *, greedy: bool
) -> list[str]:
    """Sample one reply to each prompt, special tokens included: `012358<eos>`."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.tensor(tokenizer(list(prompts)).input_ids)
    for _ in range(NUM_DIGITS + 1):
        logits_BV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
        if greedy:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    return tokenizer.batch_decode(ids_BT[:, NUM_DIGITS + 1 :])


def row_texts(digits: list[int]) -> tuple[str, str]:
    """Return prompt and answer of one row: `("385120>", "012358")`."""
    return "".join(map(str, digits)) + ">", "".join(map(str, sorted(digits)))


if __name__ == "__main__":
    fill_from_command_line(prepare, Recipe(), __doc__)
