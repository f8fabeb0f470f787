"""Make the tiny policy and its tasks: `python -m examples.sort.prepare --out DIR --seed N`.

The policy is warm-started on a *mixture of modes*: half of its demonstrations are correct, a quarter sort in descending
order and a quarter copy the prompt. Like a real base model it can do the task, but not reliably, so reinforcement
learning improves it quickly.

Writes into DIR: `model/` (safetensors, tokenizer), `train.jsonl`, `eval.jsonl`, and last `prepared.json`, which marks
the rest as complete. A DIR prepared with the same seed and recipe is left as it is.

Shape suffixes: `B` demonstrations, `D` digits of one, `T` tokens of one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.sort.tokenizer import EOS, PAD, build_tokenizer

NUM_DIGITS = 6


@dataclass(frozen=True)
class Recipe:
    """Recipe of the prepared files."""

    seed: int = 0
    steps: int = 250
    batch_size: int = 128
    lr: float = 2e-3
    """Peak learning rate: up to it over `warmup_steps`, down to 0 over the second half."""
    warmup_steps: int = 10
    right: float = 0.5
    """Share of demonstrations that sort ascending."""
    descending: float = 0.25
    """Share that sort descending; the rest copy the prompt."""
    num_train: int = 8192
    """Rows of `train.jsonl`, all distinct; 150 steps of 32 use 4,800."""
    num_eval: int = 512
    """Rows of `eval.jsonl`, disjoint from `train.jsonl` and the demonstrations."""


def prepare(out: Path, recipe: Recipe) -> dict[str, float]:
    """Fill `out` unless it is complete for this recipe; return the figures of the warm start.

    The figures: `sampled` and `greedy` accuracy on the evaluation rows, `loss` of the last batch, and `cpu_s`.
    """
    mark = out / "prepared.json"
    done = json.loads(mark.read_text()) if mark.exists() else {}
    if done.get("recipe") == asdict(recipe):
        return done["figures"]
    mark.unlink(missing_ok=True)
    torch.set_num_threads(1)
    began = time.process_time()
    eval_D, train_D, demonstrations_D = draw_digits(recipe)
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    loss = warm_start(model, tokenizer, demonstrations_D, recipe)
    figures = {"loss": loss, "sampled": accuracy(model, tokenizer, eval_D, greedy=False)}
    figures["greedy"] = accuracy(model, tokenizer, eval_D, greedy=True)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    write_rows(out / "train.jsonl", train_D)
    write_rows(out / "eval.jsonl", eval_D)
    figures["cpu_s"] = time.process_time() - began
    mark.write_text(json.dumps({"recipe": asdict(recipe), "figures": figures}, indent=1))
    return figures


def draw_digits(recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Draw disjoint sets of six-digit prompts, out of a million: for evaluation, training and demonstrations."""
    sizes = [recipe.num_eval, recipe.num_train, recipe.steps * recipe.batch_size]
    numbers = torch.randperm(10**NUM_DIGITS, generator=torch.Generator().manual_seed(recipe.seed))[: sum(sizes)]
    places_D = 10 ** torch.arange(NUM_DIGITS - 1, -1, -1)
    evaluation, train, demonstrations = (numbers[:, None] // places_D % 10).split(sizes)
    return evaluation, train, demonstrations


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Build an untrained policy: Qwen3 with two layers of width 128."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[EOS],
        pad_token_id=tokenizer.get_vocab()[PAD],
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, digits_D: Tensor, recipe: Recipe) -> float:
    """Train on demonstrations in several modes, supervised; return the last loss."""
    ids_T = demonstrations(tokenizer, digits_D, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, fused=True)
    loss = torch.tensor(float("nan"))
    for step, batch_BT in enumerate(ids_T.split(recipe.batch_size), 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, recipe)
        logits_BTV = model(input_ids=batch_BT[:, :-1], use_cache=False, logits_to_keep=NUM_DIGITS + 1).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, -NUM_DIGITS - 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"warm start {step}/{recipe.steps}  loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return loss.item()


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the rate of a step, counted from 1. Without the decay some seeds end with a policy too weak to train."""
    return recipe.lr * min(1.0, step / recipe.warmup_steps, 2 * (1 - (step - 1) / recipe.steps))


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


def write_rows(path: Path, digits_D: Tensor) -> None:
    """Write one JSON object a line: `{"prompt": "385120>", "answer": "012358"}`."""
    rows = (dict(zip(("prompt", "answer"), row_texts(d), strict=True)) for d in digits_D.tolist())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Fill the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Make the tiny policy and its tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = prepare(arguments.out, Recipe(seed=arguments.seed))
    print(json.dumps({"out": os.fspath(arguments.out), **figures}))


if __name__ == "__main__":
    main()
