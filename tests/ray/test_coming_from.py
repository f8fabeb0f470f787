"""Configurations and reward functions in the form of the documentation of TRL and verl: converted, and trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest
from typer.testing import CliRunner

from benchmarks.measure import rows_of
from rlsys import Config, train
from rlsys.cli import app

pytestmark = pytest.mark.ray

LOCAL = ["rollout.engine=local", "rollout.replicas=1", "rollout.slots=16", "limits.silence_s=60"]
"""What a converted configuration is changed in: it trains on this machine."""

TRL_GRPO = """
    model_name_or_path: {model}
    dataset_name: {rows}
    output_dir: {out}/trl
    reward_funcs: ["{out}/rewards.py:accuracy_reward", "{out}/rewards.py:think_length_reward"]
    reward_weights: [1.0, 0.1]
    learning_rate: 1.0e-3
    lr_scheduler_type: cosine
    warmup_ratio: 0.1
    per_device_train_batch_size: 8
    gradient_accumulation_steps: 2
    num_generations: 4
    max_prompt_length: 8
    max_completion_length: 8
    max_steps: 2
    temperature: 0.9
    top_p: 0.95
    beta: 0.04
    epsilon: 0.2
    epsilon_high: 0.28
    loss_type: dapo
    mask_truncated_completions: true
    gradient_checkpointing: true
    bf16: false
    logging_steps: 1
    save_steps: 100
    report_to: none
    seed: 42
"""
TRL_REWARDS = """
    import re

    def accuracy_reward(completions, ground_truth, **kwargs):
        matches = [re.search(r"[0-9]+", completion) for completion in completions]
        contents = [match.group(0) if match else "" for match in matches]
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

    async def think_length_reward(prompts, completions, completion_ids, trainer_state, log_metric=None, **kwargs):
        assert trainer_state.global_step >= 0 and len(prompts) == len(completions)
        lengths = [len(ids) for ids in completion_ids]
        if log_metric:
            log_metric("mean_tokens", sum(lengths) / len(lengths))
        return [-abs(4 - length) / 4 for length in lengths]
"""
TRL_PEFT = """
    {{
      "model_name_or_path": "{model}",
      "dataset_name": "{rows}",
      "output_dir": "{out}/peft",
      "reward_funcs": "{out}/rewards.py:digits_reward",
      "use_peft": true,
      "lora_r": 4,
      "lora_alpha": 8,
      "lora_target_modules": ["q_proj", "v_proj"],
      "learning_rate": 1e-3,
      "lr_scheduler_type": "constant_with_warmup",
      "warmup_steps": 1,
      "per_device_train_batch_size": 4,
      "gradient_accumulation_steps": 4,
      "num_generations": 4,
      "num_iterations": 2,
      "max_completion_length": 8,
      "max_steps": 2,
      "scale_rewards": false,
      "beta": 0.0,
      "log_completions": true
    }}
"""
PEFT_REWARDS = """
    def digits_reward(completions, **kwargs):
        return [sum(character.isdigit() for character in completion) / 8 for completion in completions]
"""
VERL_GRPO = """
    algorithm:
      adv_estimator: grpo
      use_kl_in_reward: false
    data:
      train_files: {rows}
      val_files: {rows}
      train_batch_size: 10
      max_prompt_length: 8
      max_response_length: 8
      filter_overlong_prompts: true
      truncation: error
    actor_rollout_ref:
      model:
        path: {model}
        enable_gradient_checkpointing: true
        use_remove_padding: true
      actor:
        optim:
          lr: 1e-3
        ppo_mini_batch_size: 10
        ppo_micro_batch_size_per_gpu: 4
        use_kl_loss: true
        kl_loss_coef: 0.001
        kl_loss_type: low_var_kl
        entropy_coeff: 0
        clip_ratio: 0.2
      rollout:
        name: vllm
        n: 4
        temperature: 1.0
        tensor_model_parallel_size: 1
        gpu_memory_utilization: 0.6
      ref:
        log_prob_micro_batch_size_per_gpu: 4
    custom_reward_function:
      path: {out}/rewards.py
      name: compute_score
    trainer:
      total_epochs: 1
      n_gpus_per_node: 1
      nnodes: 1
      save_freq: -1
      test_freq: -1
      logger: [console]
      project_name: sorting
      experiment_name: verl
      default_local_dir: {out}/verl
"""
VERL_REWARDS = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "me/sorting" and extra_info["index"] >= 0
        return {"score": float(solution_str == ground_truth), "acc": float(solution_str[:1] == ground_truth[:1])}
"""


def row(number: int) -> dict[str, object]:
    """A row with the columns that the functions of both ask for."""
    return {
        "prompt": f"{number}>",
        "ground_truth": "".join(sorted(str(number))),
        "data_source": "me/sorting",
        "extra_info": {"index": number},
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "text", "rewards", "parts"),
    [
        (
            "grpo.yaml",
            TRL_GRPO,
            TRL_REWARDS,
            ["accuracy_reward", "think_length_reward", "think_length_reward/mean_tokens"],
        ),
        pytest.param("peft.json", TRL_PEFT, PEFT_REWARDS, ["digits_reward"], marks=pytest.mark.nightly),
        pytest.param(
            "verl.yaml",
            VERL_GRPO,
            VERL_REWARDS,
            ["compute_score", "compute_score/acc"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_converted_configuration_trains_with_its_reward_functions(
    cluster, name: str, text: str, rewards: str, parts: Sequence[str], model_path: Path, tmp_path: Path
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row(number))}\n" for number in range(312, 332)))
    (tmp_path / "rewards.py").write_text(dedent(rewards))
    (tmp_path / name).write_text(dedent(text).format(model=model_path, rows=rows, out=tmp_path))
    converted = CliRunner().invoke(app, ["convert", str(tmp_path / name)])
    assert converted.exit_code == 0, converted.output
    (tmp_path / "run.yaml").write_text(converted.stdout)
    config = Config.load(tmp_path / "run.yaml", [*LOCAL, f"run.folder={tmp_path}", "run.name=converted"])
    train(config, progress=False)
    steps = rows_of(config.run_dir / "metrics.jsonl")
    assert len(steps) == 2
    assert {f"reward/by/{part}" for part in parts} <= steps[0].keys()
