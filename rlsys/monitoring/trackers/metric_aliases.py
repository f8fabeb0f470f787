"""What verl and TRL call figures that are ours too, so that pages made for their runs go on working.

Only a figure that is the same stands here. What is merely alike keeps our name: TRL's `reward_std` (the mean over
groups of their standard deviations, ours is that of all episodes), verl's `actor/pg_clipfrac` (both bounds in one), its
`actor/kl_loss` (of an estimator that is chosen) and `timing_s/gen` (a phase of its loop, where ours overlap and
`time/rollout` is of the busiest replica), and evaluations under TRL, whose names know no data set. Two different
numbers under one name would be worse than a panel that stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlsys.monitoring.metric_catalog import named
from rlsys.monitoring.tracker import NameSet

_PLACE = re.compile(r"\{(\w+)\}")

VERL: Mapping[str, str] = {
    "step": "training/global_step",
    "reward/mean": "critic/score/mean",
    "reward/min": "critic/score/min",
    "reward/max": "critic/score/max",
    "agents/tool_calls": "tool_call_counts/mean",
    "completions/length_mean": "response_length/mean",
    "completions/length_max": "response_length/max",
    "completions/truncated_frac": "response_length/clip_ratio",
    "policy/entropy": "actor/entropy",
    "policy/clip_frac_dual": "actor/pg_clipfrac_lower",
    "optim/grad_norm": "actor/grad_norm",
    "optim/lr": "actor/lr",
    "critic/loss": "critic/vf_loss",
    "critic/explained_variance": "critic/vf_explained_var",
    "critic/value_mean": "critic/values/mean",
    "critic/clip_frac": "critic/vf_clipfrac",
    "sampler/mismatch_kl": "rollout_corr/k3_kl",
    "time/step": "timing_s/step",
    "time/publish": "timing_s/update_weights",
    "time/checkpoint": "timing_s/save_checkpoint",
    "eval/{dataset}/mean": "val-core/{dataset}/reward/mean@{samples}",
}
"""Our name -> verl's, as its trainers log it. `{samples}` is the evaluation's `eval/{dataset}/samples`."""

TRL: Mapping[str, str] = {
    "step": "train/global_step",
    "loss": "train/loss",
    "reward/mean": "train/reward",
    "reward/by/{function}": "train/rewards/{function}/mean",
    "group/frac_zero_std": "train/frac_reward_zero_std",
    "agents/tool_calls": "train/tools/call_frequency",
    "completions/length_mean": "train/completions/mean_length",
    "completions/length_max": "train/completions/max_length",
    "completions/truncated_frac": "train/completions/clipped_ratio",
    "policy/entropy": "train/entropy",
    "policy/kl_ref": "train/kl",
    "policy/clip_frac_low": "train/clip_ratio/low_mean",
    "policy/clip_frac_high": "train/clip_ratio/high_mean",
    "optim/grad_norm": "train/grad_norm",
    "optim/lr": "train/learning_rate",
    "sampler/logp_diff_mean": "train/sampling/sampling_logp_difference/mean",
    "sampler/logp_diff_max": "train/sampling/sampling_logp_difference/max",
    "sampler/ratio_max": "train/sampling/importance_sampling_ratio/max",
    "time/step": "train/step_time",
}
"""Our name -> TRL's on W&B and TensorBoard, where its trainer puts `train/` in front."""

ALIASES: Mapping[NameSet, Mapping[str, str]] = {"rlsys": {}, "verl": VERL, "trl": TRL}


def renamed(values: Mapping[str, float], names: NameSet) -> dict[str, float]:
    """The same numbers, under the names of one set; what has none there keeps ours."""
    return {alias(name, names, values): value for name, value in values.items()}


def alias(name: str, names: NameSet, values: Mapping[str, float] | None = None) -> str:
    """What one of our metrics is called. `values` are the numbers beside it, of which a name may hold one."""
    found = named(name)
    theirs = ALIASES[names].get(found.key) if found else None
    if found is None or theirs is None:
        return name
    places = dict(found.labels)
    if "{samples}" in theirs:
        count = (values or {}).get(name.replace("/mean", "/samples"))
        if count is None:
            return name
        places["samples"] = f"{count:.0f}"
    return _PLACE.sub(lambda place: places[place[1]], theirs)
