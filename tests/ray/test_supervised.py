"""Whole runs without rewards: on demonstrations, and from a teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.measure import rows_of
from examples.tiny_policy import build_tokenizer
from rlsys import train
from rlsys.errors import ModelError
from rlsys.launch import look_up
from tests.jobs import config_of
from tests.models import tiny_sorter

pytestmark = pytest.mark.ray


def test_answers_of_a_file_become_likelier(cluster, model_path: Path, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'prompt': f'{n}>', 'completion': '12'})}\n" for n in (3, 4, 5)))
    keys = ["algorithm={type: sft, group_size: 1}", "rollout.workflow=demonstrations", "stabilizer=null", "reward.fn="]
    config = config_of(model_path, path, tmp_path, [*keys, "run.steps=12", "train.lr=1e-2"])
    train(config, progress=False)
    losses = [row["loss"] for row in rows_of(config.run_dir / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.nightly
def test_a_policy_comes_closer_to_its_teacher(cluster, model_path: Path, data_path: Path, tmp_path: Path):
    teacher, generator = tiny_sorter(), torch.Generator().manual_seed(7)
    for parameter in teacher.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    teacher.save_pretrained(tmp_path / "teacher")
    build_tokenizer().save_pretrained(tmp_path / "teacher")
    keys = ["algorithm={type: distill, group_size: 4}", "stabilizer=null", f"reference.path={tmp_path}/teacher"]
    config = config_of(
        model_path,
        data_path,
        tmp_path,
        [*keys, "reward.fn=", "run.steps=20", "train.lr=2e-3", "train.groups_per_step=32"],
    )
    train(config, progress=False)
    found = [row["distill/kl"] for row in rows_of(config.run_dir / "metrics.jsonl")]
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_a_teacher_with_another_vocabulary_is_refused_before_anything_starts(
    model_path: Path, data_path: Path, tmp_path: Path
):
    other = build_tokenizer()
    other.add_tokens(["<new>"])
    tiny_sorter().save_pretrained(tmp_path / "teacher")
    other.save_pretrained(tmp_path / "teacher")
    keys = ["algorithm={type: distill}", "stabilizer=null", f"reference.path={tmp_path}/teacher"]
    config = config_of(model_path, data_path, tmp_path, keys)
    with pytest.raises(ModelError, match=r"reference\.path: .*teacher has another vocabulary.*91 and 90 .*'<new>'"):
        look_up(config)
