"""Whole runs that train an adapter, on a local Ray cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.tiny_policy import build_tokenizer
from rlsys import export, train
from rlsys.errors import CheckpointError, ConfigError, ModelError
from rlsys.launch import replay_step
from tests.jobs import config_of
from tests.models import tiny_sorter

pytestmark = pytest.mark.usefixtures("cluster")
KEYS = ["train.lora={rank: 8, alpha: 16}", "train.lr=5e-2", "algorithm.kl_coef=0.01"]
LONG = ["run.steps=12", "algorithm.group_size=8"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with large weights: a small output matrix is frozen here, and gives nearly equal logits."""
    folder, model = tmp_path_factory.mktemp("model"), tiny_sorter()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 10
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def rows_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole_run(cluster: object, model_path: Path, data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(model_path, data_path, tmp_path_factory.mktemp("runs"), [*KEYS, *LONG])
    assert train(config, progress=False).steps == 12
    return config.run_dir


def test_an_adapter_learns(whole_run: Path) -> None:
    rewards = [row["reward/mean"] for row in rows_of(whole_run, "metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


def test_sampler_and_trainer_agree_on_every_logprob(whole_run: Path) -> None:
    assert max(row["sampler/logp_diff_max"] for row in rows_of(whole_run, "metrics.jsonl")) < 1e-5


def test_no_reference_worker_starts_and_the_kl_is_measured(whole_run: Path) -> None:
    workers = {row.get("worker") for row in rows_of(whole_run, "events.jsonl")}
    assert not [worker for worker in workers if worker and "reference" in worker]
    first, *_, last = [row["policy/kl_ref"] for row in rows_of(whole_run, "metrics.jsonl")]
    assert first == pytest.approx(0, abs=1e-6)
    assert last > 1e-3


@pytest.mark.nightly
def test_an_interrupted_run_resumes_bit_for_bit(
    whole_run: Path, model_path: Path, data_path: Path, tmp_path: Path
) -> None:
    config = config_of(model_path, data_path, tmp_path, [*KEYS, *LONG, "run.name=cut", "run.resume=must"])
    shutil.copytree(whole_run / "checkpoints/step_000010", config.run_dir / "checkpoints/step_000010")
    train(config, progress=False)
    resumed, straight = (
        load_file(export(run, tmp_path / run.parent.name / run.name, as_adapter=True) / "adapter_model.safetensors")
        for run in (config.run_dir, whole_run)
    )
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.nightly
def test_a_step_is_replayed_bit_for_bit(whole_run: Path) -> None:
    assert replay_step(whole_run, 12).is_equal


def test_exports_are_a_model_and_an_adapter(whole_run: Path, model_path: Path, tmp_path: Path) -> None:
    merged = AutoModelForCausalLM.from_pretrained(export(whole_run, tmp_path / "merged"), dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(export(whole_run, tmp_path / "adapter", as_adapter=True)))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.nightly
def test_a_run_continues_from_an_exported_adapter(
    whole_run: Path, model_path: Path, data_path: Path, tmp_path: Path
) -> None:
    path = export(whole_run, tmp_path / "adapter", as_adapter=True)
    config = config_of(model_path, data_path, tmp_path, [*KEYS, f"train.lora.path={path}", "run.steps=1"])
    train(config, progress=False)
    (row,) = rows_of(config.run_dir, "metrics.jsonl")
    assert row["policy/kl_ref"] > 1e-3


@pytest.mark.nightly
def test_a_critic_trains_an_adapter(model_path: Path, data_path: Path, tmp_path: Path) -> None:
    config = config_of(model_path, data_path, tmp_path, [*KEYS[:2], "algorithm=ppo", "algorithm.kl_coef=0.01"])
    train(config, progress=False)
    assert [row["step"] for row in rows_of(config.run_dir, "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["train.lora=null"], r"was saved with train\.lora"),
        (["train.lora.rank=4"], r"another train\.lora\.rank"),
    ],
)
def test_a_resume_with_other_settings_ends_the_run(
    keys: list[str], message: str, whole_run: Path, model_path: Path, data_path: Path, tmp_path: Path
) -> None:
    overrides = [*KEYS, *LONG, *keys, "run.steps=14", f"run.resume={whole_run}"]
    with pytest.raises(CheckpointError, match=message):
        train(config_of(model_path, data_path, tmp_path, overrides), progress=False)


@pytest.mark.nightly
def test_bad_settings_are_refused_before_the_first_step(model_path: Path, data_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'q_prj' matches no linear layer"):
        train(config_of(model_path, data_path, tmp_path, ["train.lora.targets=[q_prj]"]), progress=False)
    with pytest.raises(ModelError, match=r"train\.lora\.path: there is no folder"):
        train(config_of(model_path, data_path, tmp_path, ["train.lora.path=nowhere"]), progress=False)
    with pytest.raises(ConfigError, match=r"train\.lora\.rank"):
        config_of(model_path, data_path, tmp_path, ["train.lora.rank=0"])


@pytest.mark.nightly
def test_a_run_of_all_weights_has_no_adapter_to_export(model_path: Path, data_path: Path, tmp_path: Path) -> None:
    config = config_of(model_path, data_path, tmp_path, ["run.steps=1"])
    train(config, progress=False)
    with pytest.raises(ConfigError, match=r"trained all weights .* leave --adapter"):
        export(config.run_dir, tmp_path / "out", as_adapter=True)
