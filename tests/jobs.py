"""Small training jobs, for tests of the whole system."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlsys import Config


def keys_of(model_path: Path | str, data_path: Path, folder: Path) -> list[str]:
    """Overrides that make a run of 4 steps of 4 groups of 4."""
    return [
        f"model.path={model_path}",
        f"data.path={data_path}",
        f"run.folder={folder}",
        "run.steps=4",
        "data.max_prompt_tokens=8",
        "rollout.max_new_tokens=8",
        "rollout.replicas=1",
        "rollout.slots=16",
        "reward.fn=tests/ray/judges.py:digits",
        "algorithm.group_size=4",
        "train.groups_per_step=4",
        "train.lr=1e-3",
        "checkpoint.every=1",
        "checkpoint.keep_last=9",
        "limits.silence_s=60",  # a busy machine is not a frozen worker
    ]


def config_of(model_path: Path | str, data_path: Path, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `keys_of`, then `overrides`."""
    return Config.load([], [*keys_of(model_path, data_path, folder), *overrides])


def write_model(folder: Path, **changes: int) -> Path:
    """Write a random model with the tokenizer of `examples.sort`, see `tiny_sorter`; return its folder."""
    from examples.tiny_policy import build_tokenizer
    from tests.models import tiny_sorter

    tiny_sorter(**changes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def write_tasks(path: Path) -> Path:
    """Write sixty prompts of one to three digits; return the file."""
    rows = [{"prompt": f"{i * 7919 % 1000:03d}>"[: 2 + i % 3], "answer": str(i % 10)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
