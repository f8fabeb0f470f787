"""Names of verl and TRL for metrics that rlsys also has, so that dashboards made for their runs still work.

`python -m rlsys.monitoring.trackers.metric_aliases > docs/metrics.md` writes the page of all metrics.

Only identical metrics are listed; two different numbers under one name would be worse than an empty panel. Similar
metrics keep the name of rlsys. TRL's `reward_std` is the mean over groups of their standard deviations; ours is that of
all episodes. verl's `actor/pg_clipfrac` counts both bounds; its `actor/kl_loss` depends on the chosen estimator; its
`timing_s/gen` is a phase of its loop, while our phases overlap. TRL's names of evaluation metrics have no data set.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby

from rlsys.monitoring.metric_catalog import METRICS, named
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
"""Name in rlsys -> name in verl's trainers. `{samples}` is the evaluation's `eval/{dataset}/samples`."""

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
"""Name in rlsys -> name in TRL on W&B and TensorBoard, where its trainer adds the prefix `train/`."""

ALIASES: Mapping[NameSet, Mapping[str, str]] = {"rlsys": {}, "verl": VERL, "trl": TRL}


_PAGE_HEAD = """\
# Metrics

Every number that a run reports, by the name it has in `metrics.jsonl`, on the dashboard and in trackers. What stands
in braces is any text: `eval/{dataset}/mean` is `eval/held_out/mean` for a data set `held_out`. An algorithm of your own
may report others.

With `names: verl` or `names: trl` a tracker calls a metric what those frameworks call it, as far as they report the
same figure; the last two columns say which. `{samples}` is the number of samples per task. In Prometheus `reward/mean`
is `ray_rlsys_reward_mean`: `/` and `@` become `_`, and what stands in braces becomes a label, beside `run` and
`policy`: `ray_rlsys_eval_pass{dataset="held_out", k="4"}`. In MLflow `@` becomes `_at_`.

This page is made from `rlsys/monitoring/metric_catalog.py` and `rlsys/monitoring/trackers/metric_aliases.py` by `python
-m rlsys.monitoring.trackers.metric_aliases`.
"""


def renamed(values: Mapping[str, float], names: NameSet) -> dict[str, float]:
    """Rename metrics to one set of names; a metric without a name in that set keeps its name."""
    return {alias(name, names, values): value for name, value in values.items()}


def alias(name: str, names: NameSet, values: Mapping[str, float] | None = None) -> str:
    """Name of a metric in one set. `values`: the metrics of the same row, since a name may contain a value."""
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


def page() -> str:
    """The page in Markdown, with a table for each family of metrics."""
    families = groupby(METRICS, lambda key: key.partition("/")[0])
    return "\n".join([_PAGE_HEAD, *(line for family, keys in families for line in _table(family, keys))])


def _table(family: str, keys: Iterator[str]) -> Iterator[str]:
    yield from (f"## {family}", "", "| Metric | Unit | Meaning | verl | TRL |", "| --- | --- | --- | --- | --- |")
    for key in keys:
        metric = METRICS[key]
        cells = (f"`{key}`", metric.unit, metric.help.replace("|", "\\|"), _code(VERL.get(key)), _code(TRL.get(key)))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


if __name__ == "__main__":
    sys.stdout.write(page())
