"""At staleness 0 the whole system computes what `examples/single_file_grpo.py` does, to fp32 rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.single_file_grpo import Settings, run
from examples.sort.prepare import Recipe
from examples.tiny_policy import build_tokenizer, new_model
from rlsys import Config, export, train
from rlsys.data.task_file import load_tasks
from rlsys.data.task_source import TaskSource

STEPS, GROUPS, SIZE = 50, 6, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy of `examples/sort` with random weights, and prompts of two lengths."""
    folder = tmp_path_factory.mktemp("oracle")
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    new_model(tokenizer, Recipe().seed).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{n * 7919 % 10**6:06d}>"[n % 2 :], "answer": str(n)} for n in range(400)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def letters(completion: str, answer: str) -> float:
    """A reward that random text sometimes earns."""
    return sum(c.isalpha() for c in completion) / 7


@pytest.mark.usefixtures("cluster")
def test_staleness_zero_matches_losses_and_weights_of_the_single_file(folder):
    overrides = [
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'tasks.jsonl'}",
        f"run.folder={folder / 'runs'}",
        f"run.steps={STEPS}",
        "run.seed=3",
        "data.max_prompt_tokens=8",
        "rollout.replicas=2",
        "rollout.max_new_tokens=7",
        "reward.fn=tests/oracle/test_single_file.py:letters",
        f"algorithm.group_size={SIZE}",
        f"train.groups_per_step={GROUPS}",
        "train.lr=3e-4",
        "train.warmup_steps=2",
        "train.final_lr_fraction=0.1",
        "train.betas=[0.9,0.99]",
        "train.micro_batch_tokens=100",
        "checkpoint.every=0",
    ]
    config = Config.load([], overrides)
    train(config, progress=False)
    ours = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    ours_weights = load_file(export(config.run_dir, folder / "export") / "model.safetensors")

    source = TaskSource(load_tasks(folder / "tasks.jsonl"), seed=3)
    drawn = [source.next() for _ in range(STEPS * GROUPS)]
    tasks = [(str(task.prompt), task.answer or "") for task in drawn]
    settings = Settings(steps=STEPS, groups_per_step=GROUPS, group_size=SIZE, warmup_steps=2, seed=3, max_new_tokens=7)
    steps, weights = run(folder / "model", tasks, settings, letters)

    assert [row["reward/mean"] for row in ours] == pytest.approx([s.reward for s in steps], abs=1e-6)
    assert [row["loss"] for row in ours] == pytest.approx([s.loss for s in steps], abs=2e-6)
    for name, tensor in ours_weights.items():
        assert torch.allclose(tensor, weights[name], rtol=1e-4, atol=1e-5), name
    assert len({s.reward for s in steps}) > 1
