"""Write demonstrations of sorting and an untrained policy: `python -m examples.sft.prepare --seed N`.

The recipe is that of the warm start in `examples.sort.prepare`: half of the demonstrations are correct, a quarter sort
in descending order, a quarter copy the prompt. The folder `.cache/sft/seedN` gets `model/`, `train.jsonl` and
`eval.jsonl`.

    {"prompt": "385120>", "completion": "012358"}
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples import tiny_policy
from examples.sort.prepare import Recipe, demonstrations, draw_prompts, right_answer
from examples.tiny_policy import EOS


def write(folder: Path, recipe: Recipe) -> Path:
    """Fill `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluation, _, demonstrated = draw_prompts(recipe)
    tokenizer = tiny_policy.build_tokenizer()
    tiny_policy.save(folder / "model", tiny_policy.new_model(tokenizer, recipe.seed), tokenizer)
    shown = [text.removesuffix(EOS).split(">") for text in demonstrations(demonstrated, recipe)]
    tiny_policy.write_rows(folder / "train.jsonl", ({"prompt": f"{a}>", "completion": b} for a, b in shown))
    rows = ({"prompt": prompt, "answer": right_answer(prompt)} for prompt in evaluation)
    tiny_policy.write_rows(folder / "eval.jsonl", rows)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write demonstrations of sorting and an untrained policy.")
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    print(json.dumps({"out": str(write(Path(".cache/sft") / f"seed{seed}", Recipe(seed=seed, steps=250)))}))
