"""Rules of alerts: each has a signal (`rlsys.monitoring.alert_signals`, `worker_signals`) and a threshold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlsys.monitoring import alert_signals as gauges
from rlsys.monitoring import worker_signals as fleet
from rlsys.monitoring.alert_signals import AlertSignal
from rlsys.monitoring.events import EndpointFailed, FileSkipped, FileStalled, WorkerFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Condition of an alert, and its remedy."""

    threshold: float
    """Default threshold; `alerts: {name: value}` sets it, null turns the rule off."""
    unit: str
    """Unit of the threshold and of `Alert.value`."""
    when: str
    """Condition in words, where `this` is the threshold."""
    remedy: str
    """Remedy, as a sentence."""
    gauge: Callable[[], AlertSignal] | None
    """Makes the signal; None: the rule compares the time since the last step."""
    is_low: bool = False
    """True if values below the threshold raise the alert."""

    @property
    def meaning(self) -> str:
        """Condition and remedy in words."""
        return f"{self.when}. {self.remedy}"


RULES: Mapping[str, Rule] = {
    "reward_drop": Rule(
        threshold=0.3,
        unit="of the best",
        when="Mean reward of training, or of one source of data, surely lost more than this since its best level, a "
        "mean of 5 or of 20 steps",
        remedy="Look at what changed at that step: policy/entropy, optim/grad_norm, sampler/ratio_p99. Go back to a "
        "checkpoint before it with a lower learning rate (train.lr); if only one source fell, read its episodes.",
        gauge=gauges.Lost,
    ),
    "evaluation_drop": Rule(
        threshold=0.3,
        unit="of the best",
        when="Mean of an evaluation surely lost more than this since its best",
        remedy="If the reward of training fell, too, the policy is damaged: go back to a checkpoint before it with a "
        "lower learning rate (train.lr). If it did not, the policy learns what only the training rewards: read "
        "episodes of both.",
        gauge=gauges.LostEvaluation,
    ),
    "failed_samples": Rule(
        threshold=0.2,
        unit="share",
        when="Share of samples that could not be played or scored, of all or of one source of data, mean over 3 steps, "
        "is above this",
        remedy="They are left out, and the policy learns from the others alone. Read the reason at one of them "
        "(Groups, Failed), then mend the reward function (reward.fn), the tool or the data, or give it longer "
        "(reward.timeout_s).",
        gauge=gauges.Failed,
    ),
    "failed_evaluation": Rule(
        threshold=0.2,
        unit="share",
        when="Share of samples of an evaluation that could not be played or scored is above this",
        remedy="Its score is that of the others alone, and compares with no other score. Read the reason at one of "
        "them, then mend the reward function (reward.fn) or the data (eval.data).",
        gauge=gauges.FailedEvaluation,
    ),
    "constant_reward": Rule(
        threshold=2.0,
        unit="steps",
        when="All rewards were equal for more steps in a row than this, or those of one source of data for four times "
        "as many",
        remedy="Nothing can be learned from them. Score a right and a wrong answer with the reward function "
        "(reward.fn), see that `answer` is the right column (`rlsys data inspect`), or begin with easier tasks.",
        gauge=gauges.EqualRewards,
    ),
    "entropy_collapse": Rule(
        threshold=0.2,
        unit="of what it was",
        when="Entropy over 5 steps, as a share of what it was before it fell (at most 0.5 nats of that), is below "
        "this; to halve in 10 steps or more is no fall",
        remedy="The policy hardly explores any more. If reward is not where it should be, go back to a checkpoint "
        "before the fall with a higher clip_high, an entropy or KL term, a lower learning rate, or less staleness.",
        gauge=lambda: gauges.Fallen("policy/entropy", "entropy", cap=0.5),
        is_low=True,
    ),
    "kl_tail": Rule(
        threshold=0.5,
        unit="nats",
        when="Mean KL to the reference over 5 steps, per token, is above this",
        remedy="The policy has left the reference far behind. Read a few episodes for reward hacking; raise kl_coef "
        "or lower the learning rate.",
        gauge=lambda: gauges.Mean("policy/kl_ref", "KL to the reference", 5),
    ),
    "ratio_tail": Rule(
        threshold=3.0,
        unit="",
        when="99th percentile of the ratio of trainer to engine probability, mean over 5 steps, is above this",
        remedy="One token in a hundred is weighted far off. Lower max_staleness or the learning rate, or turn on an "
        "importance correction.",
        gauge=lambda: gauges.Mean("sampler/ratio_p99", "the 99th percentile of the ratio", 5),
    ),
    "equal_groups": Rule(
        threshold=0.9,
        unit="share",
        when="Share of groups whose rewards are all equal, mean over 20 steps, is above this",
        remedy="Compared within their group, such episodes teach nothing. Leave out tasks that are always or never "
        "solved, take a larger group_size, or look whether the reward can tell answers apart.",
        gauge=lambda: gauges.Mean("group/frac_zero_std", "the share of groups with equal rewards", 20),
    ),
    "truncation": Rule(
        threshold=0.2,
        unit="share",
        when="Share of trajectories cut at the token limit, mean over 5 to 20 steps, is surely by more than this above "
        "its lowest mean so far, or above 0.3",
        remedy="Look whether the ends of episodes ramble. Raise the limit of tokens (rollout.max_new_tokens), or "
        "penalise length that earns nothing.",
        gauge=lambda: gauges.Rise("completions/truncated_frac", "the share cut at the token limit", ordinary=0.3),
    ),
    "length_explosion": Rule(
        threshold=2.5,
        unit="times",
        when="Length of completions over 5 steps, as a multiple of what it was (at least 50 tokens more), is above "
        "this; to double in 100 steps or more is no explosion",
        remedy="Read a few episodes for repetition. Go back to a checkpoint before it with a lower learning rate "
        "(train.lr), or penalise length (`reward.fn: overlong`).",
        gauge=lambda: gauges.Grown("completions/length_mean", "the length of completions", least=50.0),
    ),
    "gradient_alignment": Rule(
        threshold=0.25,
        unit="",
        when="Size of the cosine of consecutive gradients, mean over 20 steps, surely rose by more than this while "
        "stale samples were trained",
        remedy="Stale samples can make updates point the same way, so that the policy overshoots. Set "
        "stabilizer.enabled, or lower max_staleness.",
        gauge=lambda: gauges.Rise("gac/cosine", "the |cosine| of consecutive gradients", where="async/staleness_max"),
    ),
    "mismatch": Rule(
        threshold=0.05,
        unit="nats",
        when="KL from the engine's distribution to the trainer's, per token, mean over 20 steps, is above this",
        remedy="Engine and trainer disagree on the same tokens. Compare sampler/s0/* with older ones: if s0 is as "
        "bad, the engine's numerics or weights are off (precision, kernels); else lower max_staleness.",
        gauge=lambda: gauges.Mean("sampler/mismatch_kl", "KL from engine to trainer", 20),
    ),
    "stale_drops": Rule(
        threshold=0.0,
        unit="groups",
        when="More groups than this were dropped as too stale within 10 steps",
        remedy="Rollouts are wasted, and slow tasks are lost first. Look on the cluster page for a replica that stays "
        "behind, or raise max_staleness.",
        gauge=lambda: gauges.Added("async/dropped_stale", "groups were dropped as too stale"),
    ),
    "not_finite": Rule(
        threshold=0.0,
        unit="metrics",
        when="More metrics of a step than this are NaN or infinite",
        remedy="Stop: the weights may be lost already. Go back to the last checkpoint, lower the learning rate, and "
        "look at the episodes of this step.",
        gauge=gauges.NotFinite,
    ),
    "idle_side": Rule(
        threshold=0.9,
        unit="share",
        when="Share of the last 20 steps in which one side waited for the other is above this",
        remedy="If the trainer waits, add replicas or reward workers, whichever the cluster page calls the "
        "bottleneck; if rollouts wait, give the trainer more, or raise max_staleness.",
        gauge=gauges.Idle,
    ),
    "reward_length": Rule(
        threshold=0.9,
        unit="",
        when="Correlation of reward and length over 40 steps, both rising, length by a quarter, is above this",
        remedy="Read a few episodes: does the policy earn by saying more? If so, penalise length or mend the reward; "
        "if it truly solves more, all is well.",
        gauge=gauges.RewardByLength,
    ),
    "slow_worker": Rule(
        threshold=3.0,
        unit="times",
        when="Seconds per token of a replica, or per episode of a reward worker, as a multiple of those of its peers, "
        "are above this for nearly all of its last groups",
        remedy="Look at its machine: another process on its cores or GPU, a throttled clock, a slow disk or network. "
        "Stop its process to have it replaced.",
        gauge=fleet.Slowest,
    ),
    "slow_tool": Rule(
        threshold=3.0,
        unit="times",
        when="Seconds that an episode waits for one tool, over 5 steps, as a multiple of what they were (at least 1 s "
        "more), are above this",
        remedy="Look at what the tool calls: a server under load, a sandbox that starts anew. Give it more capacity, "
        "or a shorter deadline.",
        gauge=lambda: gauges.Grown("agents/tool_s/*", "the time of an episode in the tool `{}`", least=1.0),
    ),
    "stale_replica": Rule(
        threshold=2.0,
        unit="versions",
        when="A busy replica is behind the newest weights by more than this beyond asynchrony.max_staleness + 1, at 3 "
        "polls in a row",
        remedy="Its groups will be too old to train. Look in the lanes whether it pulls; read its log; stop its "
        "process to have it replaced.",
        gauge=fleet.Behind,
    ),
    "stuck_group": Rule(
        threshold=5.0,
        unit="times",
        when="Age of the oldest group without rewards, as a multiple of what the slowest of the last 200 took, and for "
        "a minute at least, is above this",
        remedy="Look on the ledger where it is, and at the log of that worker. A tool or an environment that may wait "
        "for ever needs a deadline of its own.",
        gauge=fleet.Stuck,
    ),
    "worker_failed": Rule(
        threshold=0.0,
        unit="failures",
        when="More workers than this failed within 10 steps",
        remedy="The run goes on: a worker that died is replaced, and one whose node is cut off keeps its place. If it "
        "happens again, read its log, and look at the memory, cores, GPUs and link of its machine.",
        gauge=lambda: fleet.Happened(WorkerFailed),
    ),
    "endpoint_down": Rule(
        threshold=0.0,
        unit="outages",
        when="More servers than this of rewards, judges or tools did not answer within 10 steps",
        remedy="Look at the server: groups that need it wait, and it is asked again every 30 s at least. After "
        "limits.no_progress_s without a group the run ends.",
        gauge=lambda: fleet.Happened(EndpointFailed),
    ),
    "file_not_written": Rule(
        threshold=0.0,
        unit="files",
        when="More files than this could not be written within 10 steps",
        remedy="Free space on that disk (run.folder), or mend the access to it.",
        gauge=lambda: fleet.Happened(FileSkipped, FileStalled),
    ),
    "disk_low": Rule(
        threshold=1.0,
        unit="GB",
        when="Free space where the run writes is below this",
        remedy="Free space before the next checkpoint, which ends the run if it does not fit: keep fewer "
        "(checkpoint.keep_last), write fewer rollouts (record.rollouts_every).",
        gauge=lambda: gauges.Mean("driver/disk_free", "the free space of the run's disk", 1),
        is_low=True,
    ),
    "no_progress": Rule(
        threshold=10.0,
        unit="typical steps",
        when="No step was done in the time of more typical steps than this, and for a minute at least",
        remedy="Look at the ledger for what is pending and where, and at the cluster page for a worker that is stuck.",
        gauge=None,
    ),
}
"""Every rule by the name of its alert."""
