"""Warm starts of the tiny policy: it imitates plain-text conversations; only the policy's turns are trained.

    S|ab=  a<eos>  47;  b<eos>      context, reply, context, reply

Shape suffixes: `B` demonstrations of a batch, `T` tokens of one, `V` vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.sort.prepare import new_model
from examples.sort.tokenizer import EOS, PAD, build_tokenizer

Demonstration: TypeAlias = "Sequence[tuple[str, str]]"
"""Pairs of context and reply, as in `[("S|ab=", "a"), ("47;", "b")]`."""
Demonstrator: TypeAlias = "Callable[[bool], Demonstration]"
"""Draws a correct demonstration, or with True one of the mixture at the end of the warm start."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe of the prepared files."""

    seed: int = 0
    steps: int = 300
    batch_size: int = 128
    """Demonstrations per step."""
    lr: float = 2e-3
    """Peak learning rate: up to it over `warmup_steps`, down to 0 over the second half."""
    warmup_steps: int = 10
    num_train: int = 4096
    """Rows of `train.jsonl`."""
    num_eval: int = 256
    """Rows of `eval.jsonl`."""


def prepare(out: Path, recipe: Recipe, rows: Sequence[Mapping], demonstrate: Demonstrator) -> None:
    """Fill `out` with `model/`, `train.jsonl`, `eval.jsonl`, and last `prepared.json`, which marks the rest as
    complete. A folder prepared with the same recipe is left as it is.

    `rows` are those of evaluation, then those of training.
    """
    mark = out / "prepared.json"
    if mark.exists() and json.loads(mark.read_text())["recipe"] == asdict(recipe):
        return
    mark.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    began = time.process_time()
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    loss = imitate(model, tokenizer, demonstrate, recipe)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    for name, part in (("eval", rows[: recipe.num_eval]), ("train", rows[recipe.num_eval :])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    figures = {"loss": loss, "cpu_s": time.process_time() - began}
    mark.write_text(json.dumps({"recipe": asdict(recipe), "figures": figures}, indent=1))


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrate: Demonstrator,
    recipe: Recipe,
) -> float:
    """Train on fresh demonstrations, supervised; return the last loss, in nats per token.

    In the first half all are correct, because a mixture with errors takes far longer to learn; the mixture comes after.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, fused=True)
    loss = torch.tensor(float("nan"))
    for step in range(1, recipe.steps + 1):
        decay = 2 * (1 - (step - 1) / recipe.steps)
        optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, step / recipe.warmup_steps, decay)
        is_careless = 2 * step > recipe.steps
        ids_BT, targets_BT = batch_of(tokenizer, [demonstrate(is_careless) for _ in range(recipe.batch_size)])
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"warm start {step}/{recipe.steps}  loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return loss.item()


def batch_of(tokenizer: PreTrainedTokenizerFast, demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Token ids padded at the right, and targets: -100 where no token is trained."""
    vocabulary = tokenizer.get_vocab()
    rows = [[*_tokens(vocabulary, each)] for each in demonstrations]
    longest = max(map(len, rows))
    ids = [[token for token, _ in row] + [vocabulary[PAD]] * (longest - len(row)) for row in rows]
    targets = [[token if is_said else -100 for token, is_said in row] + [-100] * (longest - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor(targets)


def _tokens(vocabulary: Mapping[str, int], demonstration: Demonstration) -> Iterator[tuple[int, bool]]:
    """Yield every token, with True for the policy's tokens; each of its replies ends with `<eos>`."""
    for context, said in demonstration:
        yield from ((vocabulary[character], False) for character in context)
        yield from ((vocabulary[character], True) for character in said)
        yield vocabulary[EOS], True
