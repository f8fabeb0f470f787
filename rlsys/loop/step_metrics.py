"""Metrics of one step: times, rollouts, rewards, trained tokens and staleness."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from statistics import fmean

from rlsys.batch.packing import mean_staleness
from rlsys.loop.group_queue import GroupQueue
from rlsys.loop.learner import StepResult, merge_metrics
from rlsys.monitoring.events import CautionRaised, Events, emit_busy
from rlsys.monitoring.metric_catalog import STALENESS_BUCKETS
from rlsys.types import Busy, Group, OutcomeKind, PolicyVersion, is_success
from rlsys.util.deviation import deviation

ACTIVITY_OF = {
    "rollout": "generating",
    "reward": "scoring",
    "annotate": "annotating",
    "fetch": "fetching",
    "columns": "preparing",
    "train": "training",
    "publish": "publishing",
    "record": "recording",
    "checkpoint": "saving",
}
"""Phase of a step in which a worker is busy -> its activity, one of `rlsys.monitoring.events.ACTIVITIES`."""


MOST_PARTS = 100


class PartNames:
    """Names of the parts of rewards that are metrics: the first `MOST_PARTS` of a run."""

    def __init__(self, events: Events) -> None:
        """`events` receives a caution once there are more."""
        self._events = events
        self._known: set[str] = set()
        self._has_told = False

    def is_kept(self, name: str) -> bool:
        """True for a name that was known, or that there is room for."""
        if name in self._known or len(self._known) < MOST_PARTS:
            self._known.add(name)
            return True
        if not self._has_told:
            self._has_told = True
            text = f"reward functions return more than {MOST_PARTS} names: metrics have the first, and not {name!r}"
            self._events.emit(CautionRaised(text))
        return False


class StepClock:
    """Seconds by phase since the last step, on the event loop's clock (virtual in simulations), and offered
    rollouts."""

    def __init__(self, events: Events | None = None) -> None:
        """`events` receives busy times (None: no events)."""
        self._events = events or Events()
        self.part_names = PartNames(self._events)
        self._spans: dict[str, float] = defaultdict(float)
        self._busy: dict[str, list[Busy]] = defaultdict(list)
        self._offered_lengths: list[int] = []
        self._waited_s: list[float] = []
        self._offered_versions: set[PolicyVersion] = set()
        self._num_producing = 0
        self._idle_since: float | None = None
        self._producers_idle_s = 0.0
        self._step_began: float | None = None
        self._cpu_mark = (time.process_time(), time.monotonic())

    @contextmanager
    def span(self, phase: str, workers: Collection[str] = ("actor",)) -> Iterator[None]:
        """Count the block's duration under `phase`. `workers` are busy in it if the phase is in `ACTIVITY_OF`."""
        began = _now()
        try:
            yield
        finally:
            ended = _now()
            self._spans[phase] += ended - began
            if activity := ACTIVITY_OF.get(phase):
                emit_busy(self._events, activity, [Busy(worker, began, ended) for worker in workers], ended)

    @contextmanager
    def producing(self) -> Iterator[None]:
        """Count one more group in production; while there is none, rollouts wait for the learner."""
        if self._num_producing == 0 and self._idle_since is not None:
            self._producers_idle_s += _now() - self._idle_since
        self._num_producing += 1
        try:
            yield
        finally:
            self._num_producing -= 1
            if self._num_producing == 0:
                self._idle_since = _now()

    def add(self, phase: str, busy: Busy) -> None:
        """Add a busy time that a worker has just reported."""
        self._busy[phase].append(busy)
        if activity := ACTIVITY_OF.get(phase):
            emit_busy(self._events, activity, [busy], busy.end_s)

    def offer(self, group: Group, waited_s: float = 0.0) -> None:
        """Count a rolled-out group, trained or not; its replica waited `waited_s` for weights."""
        self._waited_s.append(waited_s)
        self._offered_lengths += _lengths_of([group])
        self._offered_versions |= {span.version for span in group.versions}

    def lap(self) -> dict[str, float]:
        """Return `time/*` and rollout metrics of the step that ends now, and start the next one.

        `time/rollout`, `time/reward` and `time/annotate` are the busy time of the busiest worker of each kind.
        """
        now = _now()
        began = now if self._step_began is None else self._step_began
        if self._num_producing == 0 and self._idle_since is not None:
            self._producers_idle_s += now - self._idle_since
            self._idle_since = now
        times = {f"time/{phase}": seconds for phase, seconds in self._spans.items()}
        times |= {f"time/{phase}": _busiest_s(spans) for phase, spans in self._busy.items()}
        times |= {"time/step": now - began, "time/wait_permit": self._producers_idle_s}
        times |= _distribution("completions/offered_length", self._offered_lengths)
        if self._offered_versions:
            times["async/num_versions"] = len(self._offered_versions)
        if self._waited_s:
            times["time/weights_wait"] = fmean(self._waited_s)
        self._spans.clear()
        self._busy.clear()
        self._offered_lengths.clear()
        self._waited_s.clear()
        self._offered_versions.clear()
        self._producers_idle_s = 0.0
        self._step_began = now
        return times

    def cpu_share(self) -> float:
        """Return CPU time over wall time of this process, since the last call."""
        now = (time.process_time(), time.monotonic())
        cpu_s, wall_s = (new - old for new, old in zip(now, self._cpu_mark, strict=True))
        self._cpu_mark = now
        return cpu_s / wall_s if wall_s > 0 else 0.0

    def start(self) -> None:
        """Start the first step."""
        self._step_began = _now()


def step_metrics(result: StepResult, version: PolicyVersion, queue: GroupQueue, clock: StepClock) -> dict[str, float]:
    """Return the metrics of the step that started from `version`. Raises `ConfigError` on duplicate names."""
    groups = result.groups
    times = {**clock.lap(), "time/train": result.stats.train_s, "driver/cpu_share": clock.cpu_share()}
    seconds = times["time/step"] or float("nan")
    speeds = {
        "perf/tokens_per_s": result.num_tokens / seconds,
        "perf/samples_per_s": result.num_episodes / seconds,
    }
    truncated = [t.outcome.kind is OutcomeKind.TRUNCATED for g in groups for _, t in g.trajectories()]
    own = _rewards(groups, clock.part_names, queue.ledger.curation.success)
    own |= _distribution("completions/length", _lengths_of(groups))
    own |= {"completions/truncated_frac": fmean(truncated), **_staleness(groups, version, queue)}
    if differences := [a.difference for group in groups for a in group.weights if a.difference is not None]:
        own["sampler/probe_diff"] = max(differences)
    own |= _agents(groups)
    return merge_metrics(own, times, speeds, result.stats.metrics)


def _rewards(groups: Sequence[Group], names: PartNames, success: float) -> dict[str, float]:
    by_group = [_rewards_of(group) for group in groups]
    rewards = [r for group in by_group for r in group]
    compared = [group for group in by_group if len(group) > 1]
    by_part: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for (_, place), trajectory in group.everyone():
            for part, value in trajectory.parts.items() if not place else ():
                if names.is_kept(part):
                    by_part[part].append(value)
    by_source: dict[str, list[float]] = defaultdict(list)
    failed_by: dict[str, list[bool]] = defaultdict(list)
    solved_by: dict[str, list[bool]] = defaultdict(list)
    for group, own in zip(groups, by_group, strict=True):
        by_source[group.source] += own
        failed_by[group.source] += (episode.is_failed for episode in group.episodes)
        solved_by[group.source].append(any(is_success(reward, success) for reward in own))
    sources = [name for name in solved_by if name]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": deviation(rewards, is_sample=False),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/failed_frac": fmean(episode.is_failed for group in groups for episode in group.episodes),
        **_early_end_share(groups),
        **({"group/frac_zero_std": fmean(len(set(group)) == 1 for group in compared)} if compared else {}),
        **{f"reward/by/{part}": fmean(values) for part, values in by_part.items()},
        "group/solved_frac": fmean(solved for each in solved_by.values() for solved in each),
        **{f"group/share/{name}": len(solved_by[name]) / len(groups) for name in sources},
        **{f"group/solved_by/{name}": fmean(solved_by[name]) for name in sources},
        **{f"reward/source/{name}": fmean(values) for name, values in by_source.items() if name and values},
        **{f"reward/failed_by/{name}": fmean(failed) for name, failed in failed_by.items() if name and failed},
    }


def _early_end_share(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the episodes that were ended early, if any were."""
    ended, played = sum(g.num_ended_early for g in groups), sum(len(g.episodes) for g in groups)
    return {"group/ended_early_frac": ended / (ended + played)} if ended else {}


def _rewards_of(group: Group) -> list[float]:
    """Return the rewards of the episodes; if the root is of another policy, those of the policy's trajectories."""
    roots = [t for (_, i), t in group.everyone() if i == 0]
    own = [t for _, t in group.trajectories() if t.reward is not None]
    scored = roots if not own or any(t.policy == group.policy for t in roots) else own
    return [t.reward for t in scored if t.reward is not None]


def _agents(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of episodes that did not fail; shares and rewards only with agents besides the roots."""
    episodes = [episode for group in groups for episode in group.episodes if not episode.is_failed]
    if not episodes:
        return {}
    others = [t for episode in episodes for t in episode.trajectories[1:]]
    tools_s: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for tool, seconds in episode.tools_s.items():
            tools_s[tool].append(seconds)
    rewards: dict[str, list[float]] = defaultdict(list)
    for agent in others:
        if agent.reward is not None and not agent.outcome.is_failed:
            rewards[agent.agent].append(agent.reward)
    return {
        "agents/per_episode": fmean(len(episode.trajectories) for episode in episodes),
        "agents/tool_calls": fmean(episode.num_tool_calls for episode in episodes),
        "agents/sequential_tokens": fmean(episode.num_sequential for episode in episodes),
        **({"agents/failed_frac": fmean(agent.outcome.is_failed for agent in others)} if others else {}),
        **{f"agents/reward/{name}": fmean(values) for name, values in rewards.items()},
        **{f"agents/tool_s/{name}": fmean(values) for name, values in tools_s.items()},
    }


def _lengths_of(groups: Sequence[Group]) -> list[int]:
    """Return the sampled tokens of each trajectory that has any."""
    return [t.num_trained for g in groups for _, t in g.trajectories() if t.samples]


def _distribution(name: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    ordered = sorted(lengths)
    p50, p90 = (ordered[ceil(share * len(ordered)) - 1] for share in (0.5, 0.9))
    return {f"{name}_mean": fmean(ordered), f"{name}_p50": p50, f"{name}_p90": p90, f"{name}_max": ordered[-1]}


def _staleness(groups: Sequence[Group], version: PolicyVersion, queue: GroupQueue) -> dict[str, float]:
    tokens = [(version - span.version, span.num_tokens) for g in groups for span in g.versions]
    total = sum(n for _, n in tokens) or 1
    by_bucket = dict.fromkeys(STALENESS_BUCKETS, 0)
    for staleness, count in tokens:
        by_bucket[STALENESS_BUCKETS[min(staleness, len(STALENESS_BUCKETS) - 1)]] += count
    return {
        **{f"async/staleness/{name}": count / total for name, count in by_bucket.items()},
        "async/staleness_mean": mean_staleness(groups, version),
        "async/staleness_max": max((s for s, _ in tokens), default=0),
        "async/target_staleness": queue.permits_at(queue.version) / queue.bound.groups_per_step - 1,
        "async/dropped": queue.dropped.total(),
        "async/dropped_stale": queue.dropped["stale"],
        "async/reissued": queue.num_reissued,
        "async/refused": queue.num_refused,
        "async/queue_depth": queue.num_finished,
        "curation/zero_advantage": queue.dropped["zero_advantage"],
    }


def _busiest_s(spans: Sequence[Busy]) -> float:
    """Return the longest busy time of any worker: the union of its spans."""
    total_s: dict[str, float] = defaultdict(float)
    reached_s: dict[str, float] = defaultdict(lambda: float("-inf"))
    for busy in sorted(spans, key=lambda busy: (busy.start_s, busy.end_s)):
        total_s[busy.worker] += max(0.0, busy.end_s - max(busy.start_s, reached_s[busy.worker]))
        reached_s[busy.worker] = max(reached_s[busy.worker], busy.end_s)
    return max(total_s.values(), default=0.0)


def _now() -> float:
    return asyncio.get_running_loop().time()
