"""Keys of other trainers and their counterparts here, for hints in errors, `rlsys convert` and the documentation.

One row a key. A key of an algorithm or of a plug-in is written with its section, `algorithm.group_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

System: TypeAlias = Literal["TRL", "verl", "OpenRLHF", "prime-rl"]


@dataclass(frozen=True, slots=True)
class Habit:
    """Key of another trainer."""

    system: System
    theirs: str
    """Dotted, as in its files; the last part is what a hint is found by."""
    ours: str = ""
    """Dotted; empty if there is no counterpart."""
    note: str = ""
    """How the two differ, or why there is no counterpart."""
    value: Callable[[Any], Any] = lambda value: value
    """Our value for theirs; None leaves the key out."""

    @property
    def hint(self) -> str:
        """Remedy for the key in an error."""
        note = f" ({self.note})" if self.note and self.ours else self.note
        return (
            f"{self.system}'s `{self.theirs}` is `{self.ours}` here{note}"
            if self.ours
            else (f"{self.system}'s `{self.theirs}` has no counterpart: {note}")
        )


def _by_hand(value: object) -> None:
    """No value of ours follows from theirs alone."""


def _above_zero(value: Any) -> Any:  # noqa: ANN401  (a value of a configuration)
    """Theirs, where it is not switched off by a number below 1."""
    return None if isinstance(value, int | float) and value <= 0 else value


def _above_one(value: Any) -> Any:  # noqa: ANN401  (a value of a configuration)
    """Theirs, where it splits anything."""
    return value if isinstance(value, int) and value > 1 else None


SWITCHES = (_above_zero, _above_one)
"""Values that are off at a small number, as ours is by default."""


def _trackers(value: object) -> list[dict[str, str]] | None:
    """Return the trackers of a name or a list of names that there are here; None if one is not known."""
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    wanted = [name for name in names if name not in ("console", "none", "all")]
    return [{"type": str(name)} for name in wanted] if wanted and all(name in TRACKERS for name in wanted) else None


def _among(ours: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Ours by theirs, where theirs is one of these."""
    return lambda value: ours.get(value) if isinstance(value, str | bool) else None


def _rows(system: System, rows: Sequence[tuple[Any, ...]]) -> Sequence[Habit]:
    return tuple(Habit(system, *row) for row in rows)


def _if(ours: Any, otherwise: Any = None) -> Callable[[Any], Any]:  # noqa: ANN401  (values of a configuration)
    """`ours` where theirs is true, else `otherwise`; None: nothing."""
    return lambda value: ours if value and str(value).lower() not in ("false", "none") else otherwise


ESTIMATORS = {
    "grpo": "grpo", "gae": "ppo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp", "reinforce": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "group_norm": "grpo", "dr_grpo": "dr_grpo",
    "grpo_passk": None,
}  # fmt: skip
"""`algorithm.type` for verl's estimators."""
SCALED = {"group": True, True: True, "none": False, False: False}
"""`algorithm.std_normalize` for TRL's `scale_rewards`."""
LOSSES = {"grpo": "sequences", "bnpo": "tokens", "dapo": "tokens", "dr_grpo": "budget"}
"""`algorithm.over` for TRL's `loss_type`, which says what a loss is averaged over."""
OVER = {"token-mean": "tokens", "seq-mean-token-sum": "budget", "seq-mean-token-mean": "sequences"}
"""`algorithm.over` for verl's `loss_agg_mode`."""
SAMPLED = "the trainer could not compute the distribution that it makes"
GROUPS = "per_device_train_batch_size * gradient_accumulation_steps * devices / num_generations"
ROWS = "train.micro_batch_tokens bounds a forward in tokens, not in samples; it changes no gradient"
MESH = "train.mesh says how many ranks there are and how they split the model: {shard: 8}"

_TRL = _rows(
    "TRL",
    (
        ("model_name_or_path", "model.path"),
        ("dataset_name", "data.path"),
        ("dataset_config", "data.path", "ORG/NAME:CONFIG", _by_hand),
        ("shuffle_dataset", "data.shuffle"),
        ("dataset_train_split", "data.path", "ORG/NAME#SPLIT", _by_hand),
        ("reward_funcs", "reward.fn", "a name, `module:name`, or a list of those with weights"),
        ("reward_weights", "reward.fn", "each function of the list has a weight", _by_hand),
        ("learning_rate", "train.lr"),
        ("num_generations", "algorithm.group_size"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("max_prompt_length", "data.max_prompt_tokens"),
        ("max_length", "rollout.max_context_tokens"),
        ("max_steps", "run.steps", "", _above_zero),
        ("num_train_epochs", "run.epochs", "", _above_zero),
        ("per_device_train_batch_size", "train.groups_per_step", GROUPS, _by_hand),
        ("gradient_accumulation_steps", "train.groups_per_step", GROUPS, _by_hand),
        ("generation_batch_size", "train.groups_per_step", "in groups, not in samples", _by_hand),
        ("num_iterations", "algorithm.passes"),
        ("top_entropy_quantile", "algorithm.top_entropy_quantile"),
        ("temperature", "rollout.temperature"),
        ("top_p", "rollout.top_p"),
        ("top_k", "rollout.top_k", "", _above_zero),
        ("min_p", "rollout.min_p"),
        ("repetition_penalty", "", SAMPLED),
        ("presence_penalty", "", SAMPLED),
        ("frequency_penalty", "", SAMPLED),
        ("min_new_tokens", "", SAMPLED),
        ("beta", "algorithm.kl_coef", "of kto: algorithm.beta"),
        ("epsilon", "algorithm.clip_low"),
        ("epsilon_high", "algorithm.clip_high"),
        ("delta", "algorithm.dual_clip", "a bound on the ratio of tokens with negative advantage"),
        ("loss_type", "algorithm.over", "cispo: algorithm.type", _among(LOSSES)),
        ("importance_sampling_level", "algorithm.type", "gspo for sequence", _among({"sequence": "gspo"})),
        ("mask_truncated_completions", "algorithm.mask_truncated"),
        ("scale_rewards", "algorithm.std_normalize", "", _among(SCALED)),
        ("desirable_weight", "algorithm.desirable_weight"),
        ("undesirable_weight", "algorithm.undesirable_weight"),
        ("use_peft", "train.lora", "{} has the defaults", _if({})),
        ("lora_r", "train.lora.rank"),
        ("lora_alpha", "train.lora.alpha"),
        ("lora_target_modules", "train.lora.targets"),
        ("lora_dropout", "", "the sampler has no dropout, so the trainer has none"),
        ("bf16", "model.dtype", "bfloat16, or float32", _if("bfloat16", "float32")),
        ("fp16", "model.dtype", "float32 or bfloat16", _by_hand),
        ("gradient_checkpointing", "train.activation_checkpointing", "full", _if("full")),
        ("use_vllm", "rollout.engine", "vllm", _if("vllm")),
        ("vllm_mode", "", "the engine is in the replica's own process, unless rollout.engine names servers"),
        ("vllm_server_base_url", "rollout.engine", "{urls: [...]}", _by_hand),
        ("vllm_tensor_parallel_size", "rollout.tensor_parallel"),
        ("vllm_gpu_memory_utilization", "rollout.vllm_args.gpu_memory_utilization"),
        ("vllm_importance_sampling_correction", "algorithm.correction", "tis, and others", _by_hand),
        ("chat_template_kwargs", "rollout.chat.template_kwargs"),
        ("output_dir", "run.folder", "the run is run.folder/run.name"),
        ("run_name", "run.name"),
        ("seed", "run.seed"),
        ("warmup_steps", "train.warmup_steps"),
        ("warmup_ratio", "train.warmup_steps", "in steps", _by_hand),
        ("lr_scheduler_type", "train.lr_schedule", "linear or cosine, with final_lr_fraction 0; constant: 1", _by_hand),
        ("weight_decay", "train.weight_decay"),
        ("max_grad_norm", "train.clip_norm"),
        ("adam_beta1", "train.betas", "both", _by_hand),
        ("adam_beta2", "train.betas", "both", _by_hand),
        ("save_steps", "checkpoint.every", "", lambda value: value if isinstance(value, int) else None),
        ("save_total_limit", "checkpoint.keep_last"),
        ("load_best_model_at_end", "checkpoint.keep_best", "with best_by; `rlsys export --step best`", _by_hand),
        ("metric_for_best_model", "checkpoint.best_by", "such as eval/NAME/mean", _by_hand),
        ("greater_is_better", "checkpoint.best_by", "its first word, highest or lowest", _by_hand),
        ("early_stopping_patience", "checkpoint.early_stopping_patience", "with keep_best and best_by", _by_hand),
        ("early_stopping_threshold", "", "every better value counts as one"),
        ("push_to_hub", "", "`rlsys export RUN --push ORG/NAME`, during the run or after it"),
        ("hub_model_id", "", "`rlsys export RUN --push ORG/NAME`, during the run or after it"),
        ("hub_private_repo", "", "a repository of `rlsys export --push` is private unless `--public`"),
        ("hub_token", "", "the token is that of HF_TOKEN or `hf auth login`"),
        ("eval_steps", "eval.every", "with eval.data", _by_hand),
        ("report_to", "tracking", "a list, such as [wandb]", _trackers),
        ("num_generations_eval", "eval.samples"),
        ("eval_on_start", "", "an evaluation comes before training wherever eval.every is set"),
        ("vllm_importance_sampling_cap", "algorithm.correction", "{type: tis, cap: ...}", _by_hand),
        ("vllm_importance_sampling_mode", "algorithm.correction", "sequence_tis, token_mis, sequence_mis", _by_hand),
        ("vllm_max_model_length", "rollout.max_context_tokens"),
        ("sync_ref_model", "reference.sync", "{every: 512, mixup: 0.6}", _by_hand),
        ("ref_model_sync_steps", "reference.sync.every", "with sync_ref_model", _by_hand),
        ("ref_model_mixup_alpha", "reference.sync.mixup", "with sync_ref_model", _by_hand),
        ("steps_per_generation", "train.groups_per_step", "in groups, not in samples", _by_hand),
        ("lr_scheduler_kwargs", "train.final_lr_fraction", "the end of the schedule", _by_hand),
        ("use_liger_kernel", "", "logits exist for trained tokens alone, chunk by chunk"),
        ("logging_steps", "", "each step is logged"),
        ("remove_unused_columns", "", "every column reaches the reward function by name"),
        ("deepspeed", "train.mesh", MESH, _by_hand),
        ("fsdp", "train.mesh", MESH, _by_hand),
        ("resume_from_checkpoint", "run.resume", "auto, must, or a folder", _by_hand),
    ),
)  # fmt: skip
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MODEL, _REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"
_VERL = _rows(
    "verl",
    (
        ("algorithm.adv_estimator", "algorithm.type", "", _among(ESTIMATORS)),
        ("algorithm.gamma", "algorithm.gamma"),
        ("algorithm.lam", "algorithm.gae_lambda"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", "in the reward of rloo and ppo", _by_hand),
        ("algorithm.use_kl_in_reward", "algorithm.kl_coef", "rloo, ppo and reinforce_pp have it in the reward",
         _by_hand),
        ("data.train_files", "data.path"),
        ("data.val_files", "eval.data"),
        ("data.train_batch_size", "train.groups_per_step"),
        ("data.max_prompt_length", "data.max_prompt_tokens"),
        ("data.max_response_length", "rollout.max_new_tokens"),
        ("data.prompt_key", "data.columns.prompt", "", lambda value: None if value == "prompt" else value),
        ("data.shuffle", "data.shuffle"),
        ("data.filter_overlong_prompts", "", "longer prompts are always dropped and counted"),
        ("data.truncation", "", "prompts are never truncated; longer ones are dropped and counted"),
        ("actor_rollout_ref.model.path", "model.path"),
        (f"{_MODEL}.enable_gradient_checkpointing", "train.activation_checkpointing", "full", _if("full")),
        ("actor_rollout_ref.model.use_remove_padding", "", "rows have no padding"),
        ("actor_rollout_ref.model.lora_rank", "train.lora.rank", "", _above_zero),
        ("actor_rollout_ref.model.lora_alpha", "train.lora.alpha"),
        (f"{_MODEL}.target_modules", "train.lora.targets", "", lambda v: v if isinstance(v, list) else None),
        ("actor_rollout_ref.hybrid_engine", "", "devices are shared in turns if placement.together names both"),
        (f"{_ACTOR}.optim.lr", "train.lr"),
        (f"{_ACTOR}.optim.weight_decay", "train.weight_decay"),
        (f"{_ACTOR}.optim.lr_warmup_steps", "train.warmup_steps", "", _above_zero),
        (f"{_ACTOR}.ppo_mini_batch_size", "train.updates_per_step", "train_batch_size / ppo_mini_batch_size",
         _by_hand),
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "train.micro_batch_tokens", ROWS, _by_hand),
        (f"{_ACTOR}.ppo_micro_batch_size", "train.micro_batch_tokens", ROWS, _by_hand),
        (f"{_ACTOR}.ppo_max_token_len_per_gpu", "train.micro_batch_tokens"),
        (f"{_ACTOR}.use_dynamic_bsz", "", "batches are always balanced by tokens"),
        (f"{_ACTOR}.ppo_epochs", "algorithm.passes"),
        (f"{_ACTOR}.use_kl_loss", "algorithm.kl_coef", "0 is off", _by_hand),
        (f"{_ACTOR}.kl_loss_coef", "algorithm.kl_coef"),
        (f"{_ACTOR}.kl_loss_type", "algorithm.kl_estimator", "", _among({"low_var_kl": "k3", "k3": "k3", "k2": "k2"})),
        (f"{_ACTOR}.entropy_coeff", "algorithm.entropy_coef"),
        (f"{_ACTOR}.clip_ratio", "algorithm.clip_low", "and algorithm.clip_high"),
        (f"{_ACTOR}.clip_ratio_low", "algorithm.clip_low"),
        (f"{_ACTOR}.clip_ratio_high", "algorithm.clip_high"),
        (f"{_ACTOR}.clip_ratio_c", "algorithm.dual_clip"),
        (f"{_ACTOR}.loss_agg_mode", "algorithm.over", "", _among(OVER)),
        (f"{_ACTOR}.policy_loss.loss_mode", "algorithm.type", "", _among({"gspo": "gspo", "vanilla": None})),
        (f"{_ACTOR}.optim.betas", "train.betas", "", lambda value: value if isinstance(value, list) else None),
        (f"{_ACTOR}.optim.lr_warmup_steps_ratio", "train.warmup_steps", "in steps", _by_hand),
        (f"{_ACTOR}.optim.min_lr_ratio", "train.final_lr_fraction", "with a schedule", _by_hand),
        (f"{_ACTOR}.optim.warmup_style", "train.lr_schedule", "cosine, with final_lr_fraction", _by_hand),
        (f"{_ACTOR}.optim.lr_scheduler_type", "train.lr_schedule", "cosine, with final_lr_fraction", _by_hand),
        (f"{_ACTOR}.ulysses_sequence_parallel_size", "train.mesh.context", "", _above_one),
        ("algorithm.norm_adv_by_std_in_grpo", "algorithm.std_normalize"),
        (f"{_ACTOR}.grad_clip", "train.clip_norm"),
        (f"{_ACTOR}.fsdp_config.param_offload", "train.offload", "", _if(True)),
        (f"{_ACTOR}.fsdp_config.optimizer_offload", "train.offload", "", _if(True)),
        (f"{_ROLLOUT}.name", "rollout.engine", "vllm or local", lambda value: "vllm" if value == "vllm" else None),
        (f"{_ROLLOUT}.n", "algorithm.group_size"),
        (f"{_ROLLOUT}.max_num_seqs", "rollout.slots"),
        (f"{_ROLLOUT}.max_model_len", "rollout.max_context_tokens"),
        (f"{_ROLLOUT}.val_kwargs.temperature", "eval.temperature"),
        (f"{_ROLLOUT}.val_kwargs.n", "eval.samples"),
        (f"{_ROLLOUT}.val_kwargs.top_p", "", "evaluations cut off what training does"),
        (f"{_ROLLOUT}.val_kwargs.top_k", "", "evaluations cut off what training does"),
        (f"{_ROLLOUT}.multi_turn.enable", "rollout.workflow", "tool_use, or a workflow of yours", _by_hand),
        (f"{_ROLLOUT}.multi_turn.max_assistant_turns", "rollout.workflow.max_turns", "of a workflow", _by_hand),
        (f"{_ROLLOUT}.temperature", "rollout.temperature"),
        (f"{_ROLLOUT}.top_p", "rollout.top_p"),
        (f"{_ROLLOUT}.top_k", "rollout.top_k", "0 is off", _above_zero),
        (f"{_ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel"),
        (f"{_ROLLOUT}.gpu_memory_utilization", "rollout.vllm_args.gpu_memory_utilization"),
        (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "train.micro_batch_tokens", ROWS, _by_hand),
        (f"{_REF}.log_prob_micro_batch_size_per_gpu", "train.micro_batch_tokens", ROWS, _by_hand),
        (f"{_REF}.fsdp_config.param_offload", "", "the reference is a worker of its own"),
        ("critic.optim.lr", "critic.lr"),
        ("critic.model.path", "critic.path"),
        ("critic.cliprange_value", "algorithm.value_clip", "of ppo"),
        ("reward_model.reward_manager", "reward.fn", "your compute_score runs as it is", _by_hand),
        ("custom_reward_function.path", "reward.fn", "PATH:NAME", _by_hand),
        ("custom_reward_function.name", "reward.fn", "PATH:NAME", _by_hand),
        ("trainer.total_training_steps", "run.steps", "", _above_zero),
        ("trainer.total_epochs", "run.epochs", "", _above_zero),
        ("trainer.save_freq", "checkpoint.every", "", _above_zero),
        ("trainer.test_freq", "eval.every", "", _above_zero),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last"),
        ("trainer.experiment_name", "run.name"),
        ("trainer.project_name", "tracking", "of a tracker: [{type: wandb, project: ...}]", _by_hand),
        ("trainer.logger", "tracking", "a list, such as [wandb]", _trackers),
        ("trainer.default_local_dir", "run.folder"),
        ("trainer.n_gpus_per_node", "train.mesh", MESH, _by_hand),
        ("trainer.nnodes", "train.mesh", MESH, _by_hand),
        ("trainer.resume_mode", "run.resume", "", _among({"auto": "auto", "disable": "never"})),
        ("trainer.val_before_train", "", "an evaluation comes before training wherever eval.every is set"),
        ("trainer.critic_warmup", "algorithm.critic_warmup", "of ppo", _above_zero),
    ),
)  # fmt: skip
_OTHERS: Sequence[Habit] = (
    Habit("OpenRLHF", "pretrain", "model.path"),
    Habit("OpenRLHF", "actor_learning_rate", "train.lr"),
    Habit("OpenRLHF", "n_samples_per_prompt", "algorithm.group_size"),
    Habit("OpenRLHF", "rollout_batch_size", "train.groups_per_step"),
    Habit("OpenRLHF", "micro_train_batch_size", "train.micro_batch_tokens", ROWS),
    Habit("OpenRLHF", "prompt_max_len", "data.max_prompt_tokens"),
    Habit("OpenRLHF", "generate_max_len", "rollout.max_new_tokens"),
    Habit("OpenRLHF", "init_kl_coef", "algorithm.kl_coef"),
    Habit("OpenRLHF", "advantage_estimator", "algorithm.type"),
    Habit("OpenRLHF", "prompt_data", "data.path"),
    Habit("OpenRLHF", "vllm_num_engines", "rollout.replicas"),
    Habit("prime-rl", "max_async_level", "asynchrony.max_staleness"),
    Habit("prime-rl", "rollouts_per_example", "algorithm.group_size"),
    Habit("prime-rl", "seq_len", "rollout.max_context_tokens"),
)
TRACKERS = ("wandb", "mlflow", "tensorboard")
DEFAULTS: Mapping[System, Mapping[str, object]] = {
    "TRL": {
        "max_prompt_length": 512,
        "epsilon": 0.2,
        "per_device_train_batch_size": 8,
        "loss_type": "dapo",
        "lr_scheduler_type": "linear",
    },
    "verl": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 1.0,
        "actor_rollout_ref.rollout.n": 1,
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
    },
}
"""Their values of keys that a file leaves out, where ours is another value."""
CHANGES_TRAINING = frozenset(
    {"repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens", "lora_dropout",
     "early_stopping_threshold"}
)  # fmt: skip
"""Keys without a counterpart that would train another policy. All others without one have no effect here."""
_MACHINERY = frozenset(
    [
        "_target_",
        "profiler",
        "global_profiler",
        "ray_kwargs",
        "ray_init",
        "checkpoint",
        "fsdp_config",
        "wrap_policy",
        "use_shm",
        "nccl_timeout",
        "trace",
        "use_torch_compile",
        "use_fused_kernels",
        "fused_kernel_options",
        "use_liger",
        "enforce_eager",
        "free_cache_engine",
        "load_format",
        "device",
        "enable_chunked_prefill",
        "max_num_batched_tokens",
        "cudagraph_capture_sizes",
        "disable_log_stats",
        "layered_summon",
        "skip_rollout",
        "skip_dump_dir",
        "update_weights_bucket_megabytes",
        "strategy",
        "engine_kwargs",
        "entropy_from_logits_with_chunking",
        "mode",
        "dtype",
        "entropy_checkpointing",
        "trust_remote_code",
        "external_lib",
        "balance_batch",
        "val_batch_size",
        "ignore_eos",
        "do_sample",
        "num_workers",
        "calculate_log_probs",
        "prompt_length",
        "response_length",
        "multi_stage_wake_up",
        "use_legacy_worker_impl",
        "esi_redundant_time",
        "del_local_ckpt_after_load",
        "ray_wait_register_center_timeout",
        "max_critic_ckpt_to_keep",
        "reward_fn_key",
        "image_key",
        "video_key",
        "filter_overlong_prompts_workers",
        "validation_shuffle",
        "sandbox_fusion",
        "launch_reward_fn_async",
        "tokenizer_path",
        "rollout_n",
        "total_training_steps",
        "num_cycles",
        "eval_accumulation_steps",
        "eval_delay",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "tf32",
        "per_device_eval_batch_size",
        "half_precision_backend",
        "use_cpu",
        "disable_tqdm",
        "gradient_checkpointing_kwargs",
        "do_train",
        "do_eval",
        "do_predict",
        "overwrite_output_dir",
        "cast_lm_head_to_fp32",
        "ds3_gather_for_generation",
        "num_completions_to_print",
        "past_index",
        "use_transformers_paged",
        "cache_implementation",
        "accelerator_config",
        "average_tokens_across_devices",
        "auto_find_batch_size",
        "length_column_name",
        "jit_mode_eval",
        "prediction_loss_only",
        "restore_callback_states_from_checkpoint",
        "skip_memory_metrics",
        "local_rank",
        "project",
        "trackio_space_id",
        "eval_strategy",
    ]
)
_MACHINERY_BEGINS = (
    "log_", "logging_", "save_", "forward_", "dataloader_", "return_", "ddp_", "torch_", "hub_", "wandb_", "vllm_",
    "fsdp_", "include_",
)  # fmt: skip


def is_machinery(key: str) -> bool:
    """Return True for a key that is about the machinery of a trainer, and trains no other policy."""
    return key == "optim" or any(part in _MACHINERY or part.startswith(_MACHINERY_BEGINS) for part in key.split("."))


FALSE_MATTERS = frozenset(
    {"bf16", "scale_rewards", "greater_is_better", "shuffle_dataset", "data.shuffle", "data.filter_overlong_prompts",
     "trainer.val_before_train", "algorithm.norm_adv_by_std_in_grpo"}
)  # fmt: skip
"""Keys whose `false` is a choice of its own. That of any other key switches off what is off here too."""
HABITS: Sequence[Habit] = (*_TRL, *_VERL, *_OTHERS)
_BY_NAME: Mapping[str, Habit] = {
    **{habit.theirs.rpartition(".")[2]: habit for habit in reversed(HABITS)},
    **{habit.theirs: habit for habit in HABITS},
}


SECTIONS = ("actor_rollout_ref", "trainer", "reward_model", "custom_reward_function")
"""Sections of verl that have no name here."""


def habit_of(key: str) -> Habit | None:
    """Find the habit behind a key: by its whole dotted name, or by its last part."""
    return _BY_NAME.get(key) or _BY_NAME.get(key.rpartition(".")[2])


def habits_of(system: System) -> Mapping[str, Habit]:
    """Return the keys of one trainer by their dotted names."""
    return {habit.theirs: habit for habit in HABITS if habit.system == system}
