"""Record and label answers of the tiny policy: `python -m examples.kto_offline.prepare --seed N`.

The folder is that of `examples.sort.prepare`, which is filled first if it is missing. Adds `labelled.jsonl` to it:
TRL's unpaired preferences, one completion of the untrained policy for each training prompt.

    {"prompt": "385120>", "completion": "853210", "label": false}
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from benchmarks.measure import rows_of
from examples.sort.prepare import prepare_seed, said
from examples.sort.reward import exact_sort
from examples.tiny_policy import EOS, write_rows


def label(folder: Path) -> Path:
    """Write `labelled.jsonl` beside the rows of `train.jsonl`, without unfinished answers; return its path."""
    torch.set_num_threads(1)
    rows = rows_of(folder / "train.jsonl")
    model = Qwen3ForCausalLM.from_pretrained(folder / "model")
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder / "model")  # pyrefly: ignore[bad-assignment]
    labelled = []
    for row, answer in zip(rows, said(model, tokenizer, [row["prompt"] for row in rows], greedy=False), strict=True):
        completion, end, _ = answer.partition(EOS)
        if completion and end:
            is_right = bool(exact_sort(completion, row["answer"]))
            labelled.append({"prompt": row["prompt"], "completion": completion, "label": is_right})
    path = folder / "labelled.jsonl"
    write_rows(path, labelled)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record and label answers of the tiny policy.")
    parser.add_argument("--seed", type=int, default=0)
    folder, _ = prepare_seed(parser.parse_args().seed)
    print(json.dumps({"out": str(label(folder))}))
