"""Keys of other trainers: hints in errors, conversion of whole files, and the table in the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from algorithms.grpo import GRPO
from algorithms.kto import KTO
from algorithms.ppo import PPO
from rlsys.cli import app
from rlsys.config import Config
from rlsys.config.conversion import convert
from rlsys.config.other_trainers import FALSE_MATTERS, HABITS, SWITCHES, Habit
from rlsys.config.plugins import ALGORITHMS
from rlsys.config.train_section import SyncSection
from rlsys.errors import ConfigError

ROOT = Path(__file__).parents[3]
VERL_GRPO = """
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
data:
  train_files: /data/sums/train.parquet
  val_files: /data/sums/test.parquet
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
  filter_overlong_prompts: true
actor_rollout_ref:
  model: {path: my-org/my-8b, use_remove_padding: true, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 32
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    clip_ratio_high: 0.28
  rollout: {name: vllm, n: 5, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.6}
trainer: {experiment_name: my 8b, n_gpus_per_node: 8, nnodes: 2, save_freq: 20, test_freq: 5, total_epochs: 15}
"""
VERL_PPO = """
algorithm.adv_estimator: gae
algorithm.lam: 0.9
data.train_files: [/data/a.parquet, /data/b.parquet]
data.train_batch_size: 64
actor_rollout_ref.model.path: my-org/my-1b
actor_rollout_ref.model.lora_rank: 32
actor_rollout_ref.rollout.n: 1
critic.optim.lr: 1e-5
custom_reward_function: {path: rewards.py, name: compute_score}
trainer.total_training_steps: 200
"""
TRL_GRPO = json.dumps(
    {
        "model_name_or_path": "my-org/my-1b", "dataset_name": "my-org/sums", "learning_rate": 1e-6,
        "num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4,
        "max_completion_length": 2048, "max_prompt_length": 512, "max_steps": 500, "num_train_epochs": 2,
        "temperature": 0.9, "top_p": 0.95,
        "beta": 0.04, "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dr_grpo", "use_peft": True, "lora_r": 16,
        "lora_alpha": 32, "bf16": True, "use_vllm": True, "vllm_mode": "colocate", "seed": 42, "report_to": "wandb",
        "reward_funcs": ["exact", "format"], "reward_weights": [1.0, 0.2], "output_dir": "out", "logging_steps": 10,
        "lr_scheduler_type": "cosine",
    }
)  # fmt: skip


def converted(folder: Path, name: str, text: str) -> tuple[Config, str]:
    (folder / name).write_text(text)
    done = CliRunner().invoke(app, ["convert", str(folder / name)])
    assert done.exit_code == 0, done.exception
    (folder / "ours.yaml").write_text(done.stdout)
    return Config.load(folder / "ours.yaml"), done.stdout


def test_a_grpo_configuration_of_verl_is_converted(tmp_path: Path):
    config, shown = converted(tmp_path, "grpo.yaml", VERL_GRPO)
    assert config.algorithm == GRPO(
        group_size=5, kl_coef=0.001, kl_estimator="k3", clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    assert (config.train.groups_per_step, config.train.updates_per_step, config.train.lr) == (1024, 4, 1e-6)
    assert (config.rollout.tensor_parallel, config.rollout.vllm_args) == (2, {"gpu_memory_utilization": 0.6})
    assert (config.run.name, config.checkpoint.every, config.eval.every, config.run.epochs) == ("my-8b", 20, 5, 15)
    assert (config.rollout.replicas, config.train.mesh.shard, config.train.weight_decay) == (4, 7, 0.01)
    assert {role: config.resources[role].num_gpus for role in ("actor", "rollout", "reference", "critic")} == {
        "actor": 1, "rollout": 2, "reference": 1, "critic": 0,
    }  # fmt: skip
    assert "# look at: 16 GPUs: 8 for replicas, 7 for ranks that train, 1 for the reference" in shown
    assert "# without effect: data.filter_overlong_prompts: True: longer prompts are always dropped" in shown


def test_a_ppo_configuration_of_dotted_keys_is_converted(tmp_path: Path):
    config, _ = converted(tmp_path, "ppo.yaml", VERL_PPO)
    assert config.algorithm == PPO(
        group_size=1, gae_lambda=0.9, clip_low=0.2, clip_high=0.2, dual_clip=3.0, value_clip=0.5
    )
    assert [source.path for source in config.data.sources] == ["/data/a.parquet", "/data/b.parquet"]
    assert config.train.lora is not None and config.train.lora.rank == 32
    assert (config.critic.lr, config.run.steps, config.reward.fn) == (1e-5, 200, "rewards.py:compute_score")


@pytest.mark.parametrize(
    ("theirs", "sync"),
    [
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 20_000}, SyncSection(every=20_000, mixup=0.6)),
        ({"sync_ref_model": True, "beta": 0.1}, SyncSection(every=512, mixup=0.6)),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 64}, SyncSection(every=64, mixup=0.6)),
        ({"sync_ref_model": True, "beta": 0.0}, None),
        ({"sync_ref_model": False, "beta": 0.1, "ref_model_mixup_alpha": 0.5}, None),
    ],
)
def test_a_reference_follows_the_policy_as_in_trl(theirs: dict[str, Any], sync: SyncSection | None, tmp_path: Path):
    given = {"model_name_or_path": "my-org/my-1b", "dataset_name": "my-org/sums", "num_generations": 8, **theirs}
    config, shown = converted(tmp_path, "grpo.json", json.dumps(given | {"max_steps": 5}))
    assert config.reference.sync == sync
    assert "# look at: sync_ref_model" not in shown and "# look at: ref_model" not in shown
    unused = [key for key in theirs if key != "beta" and theirs[key] and sync is None]
    assert all(f"# without effect: {key}: " in shown for key in unused)


def test_arguments_of_trl_are_converted(tmp_path: Path):
    config, shown = converted(tmp_path, "grpo.json", TRL_GRPO)
    assert config.algorithm == GRPO(
        group_size=8, kl_coef=0.04, clip_low=0.2, clip_high=0.28, over="budget", budget=2048, correction=()
    )
    assert (config.train.groups_per_step, config.run.steps, config.model.dtype) == (8, 500, "bfloat16")
    assert config.run.epochs == 0, "steps end a run of theirs, even where epochs are given"
    assert (config.train.lr_schedule, config.train.final_lr_fraction) == ("cosine", 0.0)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.engine) == (0.9, 0.95, "vllm")
    assert [(spec.fn, spec.weight) for spec in config.reward.functions] == [("exact", 1.0), ("format", 0.2)]
    assert "multiply it by their number (64 samples)" in shown
    assert "# without effect: vllm_mode: colocate" in shown
    assert [type(tracker).__name__ for tracker in config.tracking] == ["WandB"]


def test_every_key_is_converted_or_named(tmp_path: Path):
    _, shown = converted(tmp_path, "grpo.yaml", VERL_GRPO + "mystery: {depth: 3}\n")
    assert "# left out: mystery.depth: 3: not known" in shown


WHOLE = {"TRL": {"learning_rate": 1e-6, "num_generations": 4}, "verl": {"actor_rollout_ref.rollout.n": 4}}
OF_FILES = [habit for habit in HABITS if habit.system in WHOLE]


@pytest.mark.slow
@pytest.mark.parametrize("value", [True, False, 3, 0.5, "text", ["a", "b"], "${some.other}"], ids=repr)
@pytest.mark.parametrize("habit", OF_FILES, ids=lambda habit: habit.theirs)
def test_no_key_of_the_table_is_dropped_silently(tmp_path: Path, habit: Habit, value: object):
    """A value is converted, named in a comment, or refused; `false` may switch off what is off anyway."""
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({**WHOLE[habit.system], habit.theirs: value}))
    try:
        made = convert(file)
    except ConfigError:
        assert value != "${some.other}"
        return
    listed = (*made.notes, *made.left_out, *made.without_effect)
    is_named = any(note.startswith((f"{habit.theirs}: ", f"{value} GPUs: ")) for note in listed)
    is_off = value is False and habit.theirs not in FALSE_MATTERS
    is_off |= habit.value in SWITCHES and habit.value(value) is None and isinstance(value, int | float)
    assert is_named or is_off or made.get(habit.ours) is not None


def test_a_false_that_changes_a_run_is_kept(tmp_path: Path):
    _, shown = converted(tmp_path, "grpo.json", json.dumps({**WHOLE["TRL"], "scale_rewards": False}))
    assert "std_normalize: false" in shown
    config, _ = converted(tmp_path, "grpo.json", json.dumps({**WHOLE["TRL"], "bf16": False}))
    assert config.model.dtype == "float32"
    config, _ = converted(tmp_path, "grpo.yaml", "actor_rollout_ref: {rollout: {n: 4}}\ndata: {shuffle: false}\n")
    assert not config.data.shuffle
    config, shown = converted(
        tmp_path, "kto.json", json.dumps({"desirable_weight": 1.5, "beta": 0.2, "greater_is_better": False})
    )
    assert config.algorithm == KTO(beta=0.2, desirable_weight=1.5)
    assert "# look at: greater_is_better: False: checkpoint.best_by, its first word, highest or lowest" in shown


VERL_WHOLE = """
actor_rollout_ref:
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    strategy: fsdp
    ppo_mini_batch_size: 256
    ppo_micro_batch_size: null
    clip_ratio: 0.2
    clip_ratio_c: 3.0
    policy_loss: {loss_mode: vanilla, clip_cov_ratio: 0.0002}
    loss_agg_mode: seq-mean-token-mean
    entropy_coeff: 0.01
    ppo_epochs: 2
    ulysses_sequence_parallel_size: 2
    checkpoint: {save_contents: [model, optimizer], load_contents: "${.save_contents}"}
    optim: {lr: 1.0e-6, lr_warmup_steps_ratio: 0.1, total_training_steps: -1, lr_warmup_steps: -1,
            min_lr_ratio: 0.1, warmup_style: cosine, betas: [0.9, 0.95]}
    use_fused_kernels: "${oc.select:actor_rollout_ref.model.use_fused_kernels,false}"
    fsdp_config: {param_offload: false, fsdp_size: -1}
  ref: {strategy: "${actor_rollout_ref.actor.strategy}",
        log_prob_use_dynamic_bsz: "${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"}
  rollout:
    name: vllm
    temperature: 1.0
    top_k: -1
    prompt_length: "${oc.select:data.max_prompt_length,512}"
    max_model_len: 4096
    max_num_seqs: 256
    n: 8
    tensor_model_parallel_size: 2
    val_kwargs: {temperature: 0.6, n: 4, top_k: -1, do_sample: true}
    multi_turn: {enable: false, max_assistant_turns: null}
  model: {path: my-org/my-8b, lora_rank: 0, lora_alpha: 16, target_modules: all-linear}
data: {train_files: a.parquet, val_files: b.parquet, reward_fn_key: data_source, max_response_length: 1024,
       custom_cls: {path: null}}
critic: {optim: {lr: 1.0e-5}, model: {path: my-org/my-8b}, cliprange_value: 0.5}
reward_model: {enable: false, reward_manager: naive}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: false, kl_ctrl: {kl_coef: 0.001}}
trainer: {total_training_steps: 200, project_name: sums, logger: [console, wandb], nnodes: 1, n_gpus_per_node: 8,
          val_before_train: true, default_local_dir: "checkpoints/${trainer.project_name}"}
global_profiler: {tool: null, global_tool_config: {nsys: {discrete: false}}}
ray_kwargs: {ray_init: {num_cpus: null}}
"""


def test_a_whole_configuration_of_verl_is_converted(tmp_path: Path):
    config, shown = converted(tmp_path, "whole.yaml", VERL_WHOLE)
    assert config.algorithm == GRPO(
        group_size=8, clip_low=0.2, clip_high=0.2, dual_clip=3.0, over="sequences", entropy_coef=0.01, passes=2,
        std_normalize=False,
    )  # fmt: skip
    train = config.train
    assert (train.groups_per_step, train.updates_per_step, train.warmup_steps) == (1024, 4, 20)
    assert (train.lr_schedule, train.final_lr_fraction, train.betas) == ("cosine", 0.1, (0.9, 0.95))
    assert (train.mesh.context, train.mesh.shard, config.rollout.replicas) == (2, 2, 2)
    assert (config.rollout.slots, config.rollout.max_context_tokens, config.rollout.top_k) == (256, 4096, 0)
    assert (config.eval.temperature, config.eval.samples) == (0.6, 4)
    assert (train.lora, config.critic.lr, config.reward.fn) == (None, None, "verl")
    looked = [line for line in shown.splitlines() if line.startswith("# look at")]
    assert [line.split(": ")[1] for line in looked] == ["algorithm.kl_ctrl.kl_coef", "trainer.project_name", "8 GPUs"]
    assert [type(tracker).__name__ for tracker in config.tracking] == ["WandB"]
    groups = {line.partition(":")[0] for line in shown.splitlines() if line.startswith("#")}
    assert groups == {"# converted from verl; what its file leaves out has the defaults of verl",
                      "# look at", "# left out", "# without effect"}  # fmt: skip
    left_out = sorted(line for line in shown.splitlines() if line.startswith("# left out"))
    assert [line.split(": ")[1] for line in left_out] == [
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
        "trainer.default_local_dir",
    ]


def test_what_trl_leaves_out_has_its_defaults(tmp_path: Path):
    config, _ = converted(tmp_path, "grpo.json", json.dumps({"learning_rate": 1e-5, "num_generations": 4}))
    assert config.algorithm == GRPO(group_size=4, clip_low=0.2, clip_high=0.2, over="tokens")
    assert (config.train.final_lr_fraction, config.train.groups_per_step) == (0.0, 2)
    assert (config.data.max_prompt_tokens, config.run.epochs) == (512, 3)


@pytest.mark.parametrize(
    ("theirs", "key", "ours"),
    [
        ({"loss_type": "grpo"}, "algorithm.over", "sequences"),
        ({"loss_type": "cispo"}, "algorithm.type", "cispo"),
        ({"importance_sampling_level": "sequence"}, "algorithm.type", "gspo"),
        ({"warmup_ratio": 0.1, "max_steps": 50}, "train.warmup_steps", 5),
        ({"lr_scheduler_type": "constant"}, "train.final_lr_fraction", None),
        ({"adam_beta2": 0.99}, "train.betas", [0.9, 0.99]),
        ({"num_iterations": 4}, "algorithm.passes", 4),
        ({"top_entropy_quantile": 0.2}, "algorithm.top_entropy_quantile", 0.2),
        ({"top_k": -1}, "rollout.top_k", None),
        ({"top_k": 50}, "rollout.top_k", 50),
        ({"report_to": ["wandb", "tensorboard"]}, "tracking", [{"type": "wandb"}, {"type": "tensorboard"}]),
        ({"report_to": "none"}, "tracking", None),
        ({"reward_funcs": "my.rewards.exact"}, "reward.fn", "my.rewards:exact"),
    ],
)
def test_a_key_of_trl_has_its_meaning_here(tmp_path: Path, theirs: dict, key: str, ours: object):
    (tmp_path / "theirs.json").write_text(json.dumps({**WHOLE["TRL"], **theirs}))
    assert convert(tmp_path / "theirs.json").get(key) == ours


def test_what_trains_another_policy_stands_apart_from_what_has_no_effect(tmp_path: Path):
    theirs = {**WHOLE["TRL"], "repetition_penalty": 1.1, "logging_steps": 5, "dataloader_num_workers": 2, "mystery": 3}
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    made = convert(tmp_path / "theirs.json")
    assert [line.partition(":")[0] for line in made.left_out] == ["repetition_penalty", "mystery"]
    assert [line.partition(":")[0] for line in made.without_effect] == ["logging_steps", "dataloader_num_workers"]


def test_one_epsilon_of_trl_clips_on_both_sides(tmp_path: Path):
    config, shown = converted(tmp_path, "grpo.json", json.dumps({**WHOLE["TRL"], "epsilon": 0.1}))
    assert config.algorithm == GRPO(group_size=4, clip_low=0.1, clip_high=0.1)
    assert shown.startswith("# converted from TRL; what its file leaves out has the defaults of TRL\n")


def test_references_of_verl_are_resolved_or_named(tmp_path: Path):
    text = "data: {max_response_length: 64}\nactor_rollout_ref: {rollout: {n: 4}, actor: {grad_clip: '${a.b}'}}\n"
    config, shown = converted(tmp_path, "grpo.yaml", text + "data.max_prompt_length: ${data.max_response_length}\n")
    assert config.data.max_prompt_tokens == config.rollout.max_new_tokens == 64
    assert "# left out: actor_rollout_ref.actor.grad_clip: ${a.b}: it is computed from other keys" in shown


def test_reward_weights_are_never_guessed(tmp_path: Path):
    _, shown = converted(tmp_path, "grpo.json", json.dumps({**WHOLE["TRL"], "reward_weights": [1.0, 0.5]}))
    assert "# look at: reward_weights: [1.0, 0.5]: reward.fn" in shown
    (tmp_path / "two.json").write_text(
        json.dumps({**WHOLE["TRL"], "reward_weights": [1.0], "reward_funcs": ["a", "b"]})
    )
    with pytest.raises(ConfigError, match="give one for each of the 2 reward_funcs"):
        convert(tmp_path / "two.json")


@pytest.mark.parametrize("name", ["script.py", "other.yaml"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_text("learning: 1\n")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / name)])
    assert isinstance(done.exception, ConfigError)
    assert "neither a YAML of verl (with actor_rollout_ref) nor arguments of TRL" in str(done.exception)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.num_generations=8", "TRL's `num_generations` is `algorithm.group_size` here"),
        ("train.gradient_accumulation_steps=8", r"is `train.groups_per_step` here (per_device_train_batch_size *"),
        ("train.use_peft=true", "TRL's `use_peft` is `train.lora` here"),
        ("rollout.repetition_penalty=1.1", "has no counterpart: the trainer could not compute the distribution"),
        ("train.early_stopping_patience=3", "is `checkpoint.early_stopping_patience` here (with keep_best"),
        ("run.push_to_hub=true", "has no counterpart: `rlsys export RUN --push ORG/NAME`"),
        ("run.total_epochs=3", "verl's `trainer.total_epochs` is `run.epochs` here"),
        ("trainer.total_epochs=3", "it is a section of verl: `rlsys convert FILE` converts its configurations"),
        ("train.max_async_level=2", "prime-rl's `max_async_level` is `asynchrony.max_staleness` here"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(key: str, words: str):
    with pytest.raises(ConfigError) as caught:
        Config.load([], ["run.steps=100", "model.path=m", "data.path=d", key])
    assert words in str(caught.value)


def exists(key: str) -> bool:
    tree = json.loads((ROOT / "docs" / "config.schema.json").read_text())
    section, _, name = key.partition(".")
    if section == "algorithm" and name != "type":
        return any(hasattr(ALGORITHMS.find(each)(), name) for each in ALGORITHMS.entry_points())
    at = tree
    for part in key.split("."):
        options = [at, *at.get("anyOf", [])]
        options = [tree["$defs"][o["$ref"].rpartition("/")[2]] if "$ref" in o else o for o in options]
        found = next((o["properties"][part] for o in options if part in o.get("properties", {})), None)
        if found is None:
            return any(o.get("type") == "object" and "properties" not in o for o in options)
        at = found
    return True


@pytest.mark.parametrize("habit", [habit for habit in HABITS if habit.ours], ids=lambda habit: habit.theirs)
def test_every_counterpart_is_a_key_of_ours(habit: Habit):
    assert exists(habit.ours)


def test_keys_whose_false_matters_are_in_the_table():
    assert {habit.theirs for habit in HABITS} >= FALSE_MATTERS


def test_the_table_in_the_documentation_is_that_of_the_code():
    text = (ROOT / "docs" / "coming-from.md").read_text()
    for habit in HABITS:
        ours = f"`{habit.ours}`" if habit.ours else "none"
        note = habit.note.replace("|", "\\|")
        assert f"| {habit.system} | `{habit.theirs}` | {ours} | {note} |" in text, habit
