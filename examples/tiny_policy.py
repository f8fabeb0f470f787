"""The tiny policy of the examples: its tokenizer, its model, and its warm start by imitation of conversations.

    S|ab=  a<eos>  47;  b<eos>      context, reply, context, reply: only the policy's replies are trained

Shape suffixes: `B` demonstrations of a batch, `T` tokens of one, `V` vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
Figures: TypeAlias = dict[str, float]
Demonstration: TypeAlias = Sequence[tuple[str, str]]
"""Pairs of context and reply, as in `[("S|ab=", "a"), ("47;", "b")]`."""
Demonstrator: TypeAlias = Callable[[bool], Demonstration]
"""Draws a correct demonstration, or with True one of the mixture at the end of the warm start."""

# ---------------------------------------------------------------------------------------------- tokenizer and model

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + string.ascii_letters + " \n!\"#$%&'()*+,-./:;<=>?[]|"
"""Characters of the policy; with the two special tokens, a vocabulary of 90."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of one id per character; it has no start token, and `<eos>` ends an answer.

    `385120>` becomes seven ids. A character outside `CHARACTERS` raises, because there is no unknown token.
    """
    vocabulary = {symbol: index for index, symbol in enumerate([PAD, EOS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


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


# --------------------------------------------------------------------------------------------------------- warm start


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Recipe of a warm start and its rows."""

    seed: int = 0
    steps: int = 300
    batch_size: int = 128
    """Demonstrations per step."""
    lr: float = 2e-3
    """Peak learning rate: up to it over `warmup_steps`, down to 0 over the second half. Without the decay some seeds
    end with a policy too weak to train."""
    warmup_steps: int = 10
    num_train: int = 4096
    """Rows of `train.jsonl`."""
    num_eval: int = 256
    """Rows of `eval.jsonl`."""


def train_supervised(
    model: Qwen3ForCausalLM,
    batches: Iterable[tuple[Tensor, Tensor]],
    recipe: WarmStart,
    decay: Callable[[int], float] | None = None,
) -> tuple[float, int]:
    """Train on a batch per step; return the last loss, in nats per token, and the number of steps.

    A batch is token ids `(B, T)` and the targets of the last positions, up to `(B, T - 1)`; -100 is no target. `decay`
    gives for a step, from 1, the most of the peak learning rate that it may use; training ends when that is 0. Without
    it, it falls over the second half of `recipe.steps`.
    """
    decay = decay or (lambda step: 2 * (1 - (step - 1) / recipe.steps))
    step = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, fused=True)
    loss = torch.tensor(float("nan"))
    for step, (ids_BT, targets_BT) in enumerate(batches, 1):
        share = min(1.0, step / recipe.warmup_steps, decay(step))
        if share <= 0:
            break
        optimizer.param_groups[0]["lr"] = recipe.lr * share
        num_targets = targets_BT.shape[1]
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False, logits_to_keep=num_targets).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"warm start {step}/{recipe.steps}  loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return loss.item(), step


def save_imitator(folder: Path, demonstrate: Demonstrator, recipe: WarmStart) -> float:
    """Train a tiny policy on fresh demonstrations, and save it with its tokenizer; return the last loss.

    In the first half all are correct, because a mixture with errors takes far longer to learn; the mixture comes after.
    """
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    mixed = (2 * step > recipe.steps for step in range(1, recipe.steps + 1))
    drawn = ([demonstrate(is_careless) for _ in range(recipe.batch_size)] for is_careless in mixed)
    batches = (batch_of(tokenizer, demonstrations) for demonstrations in drawn)
    loss, _ = train_supervised(model, ((ids_BT, targets_BT[:, 1:]) for ids_BT, targets_BT in batches), recipe)
    save(folder, model, tokenizer)
    return loss


def batch_of(tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Token ids padded at the right, and targets: -100 where no token is trained. Every reply ends with `<eos>`."""
    vocabulary = tokenizer.get_vocab()
    rows, targets = [], []
    for demonstration in demonstrations:
        parts = [part for context, said in demonstration for part in ((context, False), ([*said, EOS], True))]
        tokens = [(vocabulary[symbol], is_said) for symbols, is_said in parts for symbol in symbols]
        rows.append(torch.tensor([token for token, _ in tokens]))
        targets.append(torch.tensor([token if is_said else -100 for token, is_said in tokens]))
    ids_BT = pad_sequence(rows, batch_first=True, padding_value=vocabulary[PAD])
    return ids_BT, pad_sequence(targets, batch_first=True, padding_value=-100)


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save both in the Hugging Face format, for `AutoModelForCausalLM` and `AutoTokenizer`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------------------------------------------- prepared folder


def once(fill: Callable[[Path, R], Figures]) -> Callable[[Path, R], Figures]:
    """Decorate a function that fills a folder by a recipe and returns figures, to leave a complete folder as it is.

    `prepared.json`, with the recipe, the figures and `cpu_s`, is written last and marks the rest as complete.
    """

    @wraps(fill)
    def filled(out: Path, recipe: R) -> Figures:
        mark = out / "prepared.json"
        done = json.loads(mark.read_text()) if mark.exists() else {}
        if done.get("recipe") == asdict(recipe):
            return done["figures"]
        mark.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        began = time.process_time()
        figures = fill(out, recipe)
        figures["cpu_s"] = time.process_time() - began
        mark.write_text(json.dumps({"recipe": asdict(recipe), "figures": figures}, indent=1))
        return figures

    return filled


def fill(out: Path, recipe: WarmStart, rows: Sequence[Mapping[str, Any]], demonstrate: Demonstrator) -> Figures:
    """Fill `out` with `model/`, `train.jsonl` and `eval.jsonl`; `rows` are those of evaluation, then of training."""
    loss = save_imitator(out / "model", demonstrate, recipe)
    write_tasks(out, rows, recipe.num_eval)
    return {"loss": loss}


def write_tasks(out: Path, rows: Sequence[Mapping[str, Any]], num_eval: int) -> None:
    """Write the first `num_eval` rows to `eval.jsonl`, and the others to `train.jsonl`."""
    write_rows(out / "eval.jsonl", rows[:num_eval])
    write_rows(out / "train.jsonl", rows[num_eval:])


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fill_from_command_line(prepare: Callable[[Path, R], Figures], recipe: R, description: str | None) -> None:
    """Fill the folder `--out` by the recipe with the seed `--seed`; print the folder and the figures as JSON."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=style)
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figures = prepare(arguments.out, replace(recipe, seed=arguments.seed))
    print(json.dumps({"out": os.fspath(arguments.out), **figures}))
