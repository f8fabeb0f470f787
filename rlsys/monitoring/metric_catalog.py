"""Catalog of metrics: meaning and unit of every number that a step or an evaluation reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """Unit and meaning of a metric, for tables, tooltips and trackers."""

    unit: str
    help: str


STALENESS_BUCKETS: Mapping[str, str] = {
    "s0": "tokens sampled from the version trained",
    "s1": "tokens one version old",
    "s2": "tokens two versions old",
    "s3": "tokens three versions old",
    "s4plus": "tokens four or more versions old",
}
"""Name -> meaning of each staleness bucket; the index is the staleness. `sampler/*` is also reported per bucket, e.g.
as `sampler/s1/ess`, and so is the staleness histogram, e.g. as `async/staleness/s1`."""

_SAMPLER: Mapping[str, Metric] = {
    "logp_diff_mean": Metric("nats", "mean |logprob of the trainer - logprob of the engine| of trained tokens"),
    "logp_diff_max": Metric("nats", "largest such difference; those above 20 count as 20"),
    "mismatch_kl": Metric("nats", "KL from the engine's distribution to the trainer's, per token"),
    "ratio_p01": Metric("", "1st percentile of the probability ratio of tokens, trainer over engine"),
    "ratio_p50": Metric("", "median of that ratio"),
    "ratio_p99": Metric("", "99th percentile of that ratio"),
    "ratio_max": Metric("", "largest such ratio"),
    "ess": Metric("share", "effective sample size under that ratio: 1 if all tokens weigh the same"),
}

METRICS: Mapping[str, Metric] = {
    "step": Metric("", "optimizer steps taken, also the version of the weights"),
    "loss": Metric("", "loss of the policy over the whole batch, as the algorithm averages it; mean over updates"),
    "reward/mean": Metric("", "mean reward of the episodes trained"),
    "reward/std": Metric("", "standard deviation of their rewards"),
    "reward/min": Metric("", "lowest reward"),
    "reward/max": Metric("", "highest reward"),
    "reward/failed_frac": Metric("share", "episodes that could not be scored or played, and so were left out"),
    "reward/by/{function}": Metric("", "mean of what one reward function gave where it applied, before its weight"),
    "agents/per_episode": Metric("agents", "mean over the episodes trained, the root and failed ones counted"),
    "agents/failed_frac": Metric("share", "agents besides the root that failed alone, so that they were left out"),
    "agents/tool_calls": Metric("calls", "calls of tools in an episode, by all its agents, mean"),
    "agents/sequential_tokens": Metric(
        "tokens", "sampled on the longest chain of an episode, in which each waits for the one before, mean"
    ),
    "agents/reward/{agent}": Metric(
        "", "mean reward of the agents of one name besides the root, where they have their own"
    ),
    "group/frac_zero_std": Metric(
        "share",
        "groups whose rewards are all equal, of those with two scored episodes or more: nothing tells these apart",
    ),
    "kto/desirable_frac": Metric("share", "samples whose reward makes them desirable"),
    "kto/z0": Metric("nats", "reference point: mean log-ratio to the reference over mismatched pairs, at least 0"),
    "kto/margin": Metric("", "beta (r - z0), negated for undesirable samples; mean over tokens, positive once learned"),
    "kto/clip_frac": Metric("share", "tokens of samples that moved further than `clip` since they were drawn"),
    "kto/saturated_frac": Metric("share", "tokens of samples whose gradient is below a tenth of its maximum"),
    "kto/reward_desirable": Metric("", "implicit reward beta r of desirable samples at the start of the step, mean"),
    "kto/reward_undesirable": Metric("", "the same of undesirable samples"),
    "policy/kl_ref": Metric("nats", "KL from the policy to the reference, mean over the tokens as sampled, unweighted"),
    "policy/ratio_mean": Metric("", "mean of the probability ratio that the loss takes"),
    "policy/clip_frac_low": Metric("share", "tokens whose ratio was clipped at its lower bound"),
    "policy/clip_frac_high": Metric("share", "tokens whose ratio was clipped at its upper bound"),
    "policy/clip_frac_dual": Metric("share", "tokens of negative advantage whose ratio was clipped at dual_clip"),
    "policy/entropy": Metric("nats", "mean entropy of the next-token distribution"),
    "policy/{correction}_truncated_frac": Metric(
        "share", "tokens whose importance weight was truncated to the cap, by correction"
    ),
    "policy/{correction}_masked_frac": Metric(
        "share", "tokens left out because they are too far off-policy, by correction"
    ),
    "policy/trains_negatives": Metric(
        "", "1 if trajectories of negative advantage are trained, 0 if they are left out"
    ),
    "batch/samples_left_out": Metric("samples", "left out of the step, so that a multiple of samples_multiple remains"),
    **{f"sampler/{name}": metric for name, metric in _SAMPLER.items()},
    **{
        f"sampler/{bucket}/{name}": Metric(metric.unit, f"{metric.help}; {tokens}")
        for bucket, tokens in STALENESS_BUCKETS.items()
        for name, metric in _SAMPLER.items()
    },
    "sampler/probe_diff": Metric("nats", "mean |logprob of trainer - engine| after a weight change, worst replica"),
    "completions/length_mean": Metric("tokens", "mean tokens sampled in a trajectory"),
    "completions/length_p50": Metric("tokens", "median of the tokens sampled in a trajectory"),
    "completions/length_p90": Metric("tokens", "90th percentile of them"),
    "completions/length_max": Metric("tokens", "most tokens sampled in a trajectory"),
    "completions/offered_length_mean": Metric(
        "tokens", "the same over all groups rolled out during the step, trained or not: mean"
    ),
    "completions/offered_length_p50": Metric("tokens", "median of those offered"),
    "completions/offered_length_p90": Metric("tokens", "90th percentile of those offered"),
    "completions/offered_length_max": Metric("tokens", "most of those offered"),
    "completions/truncated_frac": Metric("share", "trajectories cut off at the token limit"),
    "async/staleness_mean": Metric("versions", "mean staleness of the tokens trained"),
    "async/staleness_max": Metric("versions", "largest staleness of any of them; never above the bound"),
    **{
        f"async/staleness/{bucket}": Metric("share", f"of the tokens trained: {tokens}")
        for bucket, tokens in STALENESS_BUCKETS.items()
    },
    "async/num_versions": Metric("versions", "versions that groups rolled out during the step were sampled from"),
    "async/dropped": Metric("groups", "groups dropped since the run began, for any reason"),
    "async/dropped_stale": Metric("groups", "those of them that were too stale to train; should read 0"),
    "async/reissued": Metric(
        "", "attempts at groups since the run began, beyond the first of each: what they had was lost"
    ),
    "async/refused": Metric(
        "", "columns handed in since the run began for an attempt that was over, or twice; never trained"
    ),
    "async/moved": Metric("groups", "groups moved between replicas since the run began; see rollout.repack_s"),
    "async/queue_depth": Metric("groups", "groups that waited to be trained when the step ended"),
    "curation/no_signal": Metric(
        "groups", "dropped since the run began, and replaced: the algorithm found nothing to learn in them"
    ),
    "curation/smaller_groups": Metric(
        "groups", "given fewer episodes since the run began, because their task mostly succeeds"
    ),
    "curation/passed_over": Metric("tasks", "passed over since the run began; one counts each time"),
    "curation/grafted": Metric("groups", "that failed altogether since the run began, and got a stored success"),
    "curation/too_old": Metric(
        "groups", "that failed altogether since the run began, with a stored success too old for the staleness bound"
    ),
    "curation/stored": Metric("", "successes that are stored"),
    "time/step": Metric("s", "wall time of the step"),
    "time/rollout": Metric("s", "the busiest replica was at work on groups that came in during the step"),
    "time/reward": Metric("s", "the busiest reward worker was at work on groups that came in during the step"),
    "time/fetch": Metric("s", "the ranks of actor and critic fetched the data of the step"),
    "time/columns": Metric("s", "columns were made that need the whole step: values, mismatched pairs"),
    "time/train": Metric("s", "the step of the policy, then that of the critic; each on its slowest rank"),
    "time/publish": Metric("s", "handing the weights over; the trainer waits meanwhile"),
    "time/annotate": Metric("s", "the busiest annotator added columns the algorithm asked for, beside everything else"),
    "time/wait_batch": Metric("s", "the trainer waited for groups with all their columns"),
    "time/weights_wait": Metric("s", "a group waited at its replica for weights, mean over those of the step"),
    "time/wait_permit": Metric("s", "no group was being produced at all: rollouts waited for the trainer"),
    "time/record": Metric("s", "writing the rollouts of the step before; the trainer waits meanwhile"),
    "time/checkpoint": Metric("s", "writing a checkpoint after the step before"),
    "time/eval_wait": Metric(
        "s", "the trainer waited for an evaluation before the step: to pin its weights, or to end"
    ),
    "eval/{dataset}/mean": Metric("", "mean reward of an evaluation: over its tasks, of the mean of their samples"),
    "eval/{dataset}/mean_ci95": Metric("", "half width of the 95 % confidence interval of that mean, over tasks"),
    "eval/{dataset}/pass@{k}": Metric("share", "tasks solved by at least one of so many samples, unbiased estimate"),
    "eval/{dataset}/truncated_frac": Metric("share", "samples of the evaluation cut at the token limit"),
    "eval/{dataset}/failed_frac": Metric(
        "share", "samples of the evaluation that could not be scored, and so were left out"
    ),
    "eval/{dataset}/length_mean": Metric("tokens", "mean tokens of a sample of the evaluation"),
    "eval/{dataset}/num_tasks": Metric("tasks", "tasks with at least one scored sample"),
    "eval/{dataset}/num_too_long": Metric("tasks", "tasks left out, because their prompt exceeds the limit"),
    "eval/{dataset}/samples": Metric("", "samples per task"),
    "driver/cpu_share": Metric("share", "CPU time of the driver over the wall time of the step"),
    "perf/tokens_per_s": Metric("tokens/s", "trained tokens per second of wall time"),
    "perf/samples_per_s": Metric("1/s", "trained episodes per second of wall time"),
    "gac/cosine": Metric(
        "", "cosine of an update's gradient with that of the update before, both raw; 0 for the first"
    ),
    "gac/parallel_share": Metric("share", "length of the part along the gradient before, of the whole: |gac/cosine|"),
    "gac/cosine_after": Metric("", "the same cosine, of the gradient that is passed on to clipping and the optimizer"),
    "gac/regime": Metric(
        "",
        "what it called for: 0 nothing, 1 projection, 2 skipping; only done if stabilizer.enabled, mean over updates",
    ),
    "gac/skips_in_a_row": Metric("updates", "skipped without one between them, up to this one"),
    "gac/c_low": Metric("", "largest |cosine| that is safe; not reported while it is being calibrated"),
    "gac/c_high": Metric("", "|cosine| above which an update is skipped; not reported while it is being calibrated"),
    "gac/update_cosine": Metric(
        "", "cosine of the optimizer's own update, before any projection of it, with the one before; every 10th update"
    ),
    "critic/loss": Metric("", "loss of the critic, mean over the updates of the step"),
    "critic/explained_variance": Metric(
        "share", "of the returns, by the values before the step: 1 - Var(returns - values) / Var(returns)"
    ),
    "critic/value_mean": Metric("", "mean value of the states before trained tokens, before the step"),
    "critic/grad_norm": Metric("", "norm of the critic's gradient before clipping, mean over the updates of the step"),
    "critic/clip_frac": Metric(
        "share", "tokens whose value moved beyond value_clip, so that they teach the critic nothing"
    ),
    "critic/lr": Metric("", "learning rate of the critic in the step"),
    "optim/grad_norm": Metric("", "norm of the gradient before clipping, mean over the updates of the step"),
    "optim/lr": Metric("", "learning rate of the step"),
}
"""Every metric of the framework and its algorithms: name -> unit and meaning.

A name in braces is a placeholder: `eval/{dataset}/mean` matches `eval/held_out/mean`.
"""


class Named(NamedTuple):
    """Metric name split into its catalog key and labels."""

    key: str
    """Key in `METRICS`, e.g. `eval/{dataset}/pass@{k}`."""
    labels: Mapping[str, str]
    """Values of the placeholders, e.g. `{"dataset": "held_out", "k": "4"}`."""


def named(name: str) -> Named | None:
    """Split a name by the catalog; None if the catalog lacks it."""
    if name in METRICS:
        return Named(name, {})
    matches = ((key, pattern.fullmatch(name)) for key, pattern in _PATTERNS.items())
    return next((Named(key, match.groupdict()) for key, match in matches if match), None)


def metric_of(name: str) -> Metric | None:
    """Look up a name, e.g. `reward/by/exact`, in `METRICS`; None if the catalog lacks it."""
    found = named(name)
    return METRICS[found.key] if found else None


def undocumented(names: Iterable[str]) -> list[str]:
    """Names that `METRICS` does not explain, sorted. A run in the tests must have none."""
    return sorted(name for name in set(names) if metric_of(name) is None)


def _pattern(key: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", key)
    return re.compile("".join(f"(?P<{part}>.+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


_PATTERNS = {key: _pattern(key) for key in METRICS if "{" in key}
