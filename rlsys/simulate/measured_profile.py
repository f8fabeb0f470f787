"""Profile of a finished run: what its configuration, events and rollouts tell about its cluster and its workload.

    text = measured_profile(Path("runs/mine"))      # YAML, with the source of each value
    # then: rlsys simulate mine.yaml max_staleness=4

A run does not tell everything that a profile has. What is assumed says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import orjson

from rlsys.config import Config
from rlsys.errors import ConfigError, DataError
from rlsys.loop.build_driver import CONSTANTS
from rlsys.monitoring.events import Event, GroupRolledOut, StepDone, WeightsPublished, WorkerBusy, WorkerRestarted
from rlsys.replay.rollout_json import decoder_of
from rlsys.replay.rollout_parquet import RolloutFile, rollout_paths
from rlsys.types import Episode
from rlsys.util.files import CONFIG
from rlsys.util.regular_files import lines_of

KINDS = {event.kind: event for event in (GroupRolledOut, StepDone, WeightsPublished, WorkerBusy, WorkerRestarted)}
"""Events that tell something."""
TABLE = 50
"""Most numbers of a distribution that are written."""
FILES, EPISODES = 20, 10_000
"""Newest rollout files that are read, and the most episodes of them."""
SLICES = 60
"""Parts of the time of a replica in which its speed is measured."""


@dataclass
class Turns:
    """Numbers of tokens in the episodes of a run."""

    prompts: list[int] = field(default_factory=list)
    """Of the first prompts of episodes."""
    replies: list[int] = field(default_factory=list)
    """Of single replies."""
    per_episode: list[int] = field(default_factory=list)
    """Turns of the first agent of each episode."""
    observations: list[int] = field(default_factory=list)
    """Between two replies."""

    def add(self, episode: Episode) -> None:
        """Add an episode."""
        turns = episode.trajectories[0].turns
        if not turns:
            return
        self.prompts.append(len(turns[0].prompt_ids))
        self.per_episode.append(len(turns))
        self.replies += [len(turn.output_ids) for t in episode.trajectories for turn in t.turns]
        for before, after in pairwise(turns):
            new = len(after.prompt_ids) - len(before.prompt_ids) - len(before.output_ids)
            self.observations.append(max(0, new))


@dataclass
class Steps:
    """Seconds of decoding steps at numbers of running requests, and the line through them."""

    points: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Sequence[tuple[GroupRolledOut, float]], slots: int) -> Steps:
        """Measure replicas slice by slice: with n requests running, a step gives n tokens. A group's tokens and
        requests are spread evenly over its time; an episode runs as long as it has tokens, as a share of the longest.
        """
        found = cls()
        by_worker: dict[str, list[tuple[GroupRolledOut, float, float]]] = {}
        for group, end_s in groups:
            if sum(group.lengths):
                by_worker.setdefault(group.worker, []).append((group, end_s - group.seconds, end_s))
        for own in by_worker.values():
            first_s, last_s = min(start for _, start, _ in own), max(end for _, _, end in own)
            width_s = (last_s - first_s) / SLICES
            for begin_s in (first_s + i * width_s for i in range(SLICES)):
                requests = tokens = 0.0
                for group, start_s, end_s in own:
                    shared_s = min(end_s, begin_s + width_s) - max(start_s, begin_s)
                    if shared_s > 0 and group.seconds > 0:
                        tokens += sum(group.lengths) * shared_s / group.seconds
                        requests += sum(group.lengths) / max(group.lengths) * shared_s / width_s
                running = min(requests, float(slots))
                if tokens > 0 and running > 0:
                    found.points.append((running, running * width_s / tokens))
        return found

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a step, and those that each request adds to it, neither below 0 (least squares)."""
        mean_n, mean_s = fmean(n for n, _ in self.points), fmean(s for _, s in self.points)
        spread = sum((n - mean_n) ** 2 for n, _ in self.points)
        slope = sum((n - mean_n) * (s - mean_s) for n, s in self.points) / spread if spread else 0.0
        slope = min(max(slope, 0.0), mean_s / mean_n)
        return mean_s - slope * mean_n, slope


def measured_profile(run: Path) -> str:
    """Write the profile of a run as YAML.

    Raises `ConfigError` for a folder that is no run, or a run of several policies; `DataError` if it recorded too
    little.
    """
    path = run / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run} is no run directory: it has no {CONFIG}")
    turns = Turns()
    for file in map(RolloutFile, rollout_paths(run)[-FILES:]):
        for place in range(len(file.group_ids)):
            if len(turns.per_episode) + file.num_episodes(place) > EPISODES:
                break
            for episode in file.record(place).episodes:
                turns.add(episode)
    if not turns.prompts:
        raise DataError(
            f"{run} has no rollouts, which tell the lengths of prompts: set record.rollouts_every, run again"
        )
    config, events = Config.load(path), list(_events(run / "events.jsonl"))
    try:
        return profile_of(config, events, turns, source=str(run))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{run} cannot be measured: its events are those of no run: {error!r}") from error


def _events(path: Path) -> Iterable[tuple[Event, float]]:
    """Yield the events of `KINDS` with their times."""
    if not path.is_file():
        raise DataError(f"{path} is missing: a profile is made of the events of a run")
    for line in lines_of(path):
        try:
            row = orjson.loads(line)
            if kind := KINDS.get(row["kind"]):
                yield decoder_of(kind)(row), decoder_of(float)(row["time_s"])
        except (ValueError, LookupError, TypeError, AttributeError):  # damage, or the last line of a killed run
            continue


def profile_of(config: Config, events: Sequence[tuple[Event, float]], turns: Turns, *, source: str) -> str:
    """Write the profile of a run with this configuration, from its events with their times. Raises `ConfigError`,
    `DataError`."""
    if config.policies:
        raise ConfigError("a profile is of one policy, and this run trained several")
    rollout, train, asynchrony = config.rollout, config.train, config.asynchrony
    groups = [(event, time_s) for event, time_s in events if isinstance(event, GroupRolledOut)]
    published = [event for event, _ in events if isinstance(event, WeightsPublished) and event.num_bytes]
    steps = [event for event, _ in events if isinstance(event, StepDone)]
    restarts = [event.seconds for event, _ in events if isinstance(event, WorkerRestarted)]

    def lasting(activity: str) -> list[float]:
        return [e.end_s - e.start_s for e, _ in events if isinstance(e, WorkerBusy) and e.activity == activity]

    arrived_s = sorted(time_s for event, time_s in events if isinstance(event, WeightsPublished))

    def load_s(pull: WorkerBusy) -> float:
        """Return the seconds of a pull from the version's arrival on, for which the replica may have waited."""
        place = bisect_left(arrived_s, pull.end_s)
        return pull.end_s - max(pull.start_s, arrived_s[place - 1] if place else 0.0)

    loads_s = [load_s(e) for e, _ in events if isinstance(e, WorkerBusy) and e.activity == "pulling"]
    if not (groups and published and len(steps) > 1):
        raise DataError(f"{source} has too few events: a profile needs two steps and the groups that they trained")
    decoding = Steps.of(groups, config.slots)
    overhead_s, sequence_s = decoding.line
    sequence_s = max(sequence_s, 1e-9)
    per_replica, ranks = rollout.tensor_parallel, train.mesh.num_ranks
    sampling = rollout.replicas * per_replica
    train_s = [step.metrics["time/train"] for step in steps[1:]]
    tokens = [step.metrics["perf/tokens_per_s"] * step.metrics["time/step"] for step in steps[1:]]
    last = published[-1]
    stall_s, sent_s = (median(max(getattr(p, name), 1e-6) for p in published) for name in ("stall_s", "seconds"))
    fewest, most = (pick(n for n, _ in decoding.points) for pick in (min, max))
    lines = [
        f"# Profile of {source}, by `rlsys profile`.",
        "# Not told by a run, and so left out: the time of environments, the cost of long contexts in decoding.",
        *_entry("gpus", sampling + ranks, "configuration: one for each shard of a replica and each rank that trains"),
        *_entry("gpus_per_node", sampling + ranks, "assumed: one machine"),
        *_entry("gpus_per_replica", per_replica, "configuration"),
        *_entry("inference_share", round(sampling / (sampling + ranks), 6), "configuration"),
        *_entry("slots", config.slots, "configuration"),
        *_entry("cache_tokens", config.slots * config.max_context_tokens, "assumed: every slot can be full"),
        f"decode:  # measured with {fewest:.0f} to {most:.0f} requests at once",
        *_entry("  overhead_s", overhead_s, "measured"),
        *_entry("  weights_s", sequence_s, "measured: not told apart from overhead_s"),
        *_entry("  sequence_s", sequence_s, "measured"),
        *_entry("  token_s", 0.0, "assumed: part of the above"),
        *_entry("prefill_tokens_per_s", 1e9, "assumed: part of decode, where it was measured"),
        *_entry("groups_per_step", train.groups_per_step, "configuration"),
        *_entry("group_size", config.algorithm.group_size, "configuration"),
        *_entry("prompt", _table(turns.prompts), "measured"),
        *_entry("response", _table(turns.replies), "measured"),
        *_entry("turns", _table(turns.per_episode), "measured: of the first agent"),
        *_entry("observation_tokens", round(fmean(turns.observations or [0])), "measured"),
        *_entry("reward_s", median(lasting("scoring") or [0.0]), "measured: median of a group"),
        *_entry("max_staleness", asynchrony.max_staleness, "configuration"),
        *_entry("window", asynchrony.window, "configuration"),
        *_entry("weight_change", rollout.change, "configuration"),
        *_entry("kv_cache", "recompute" if rollout.recomputes else "keep", "configuration"),
        *_entry("repack_s", CONSTANTS.repack_s, "as in a run"),
        "train:",
        *_entry("  fixed_s", 0.0, "assumed: part of tokens_per_s"),
        *_entry("  tokens_per_s", sum(tokens) / sum(train_s) / ranks, "measured, without the first step"),
        "weights:",
        *_entry("  num_bytes", last.num_bytes, "measured"),
        *_entry("  push_bytes_per_s", last.num_bytes / stall_s, "measured: median stall of a publish"),
        *_entry("  link_bytes_per_s", last.num_bytes / sent_s, "measured: median until the first relay had a version"),
        *_entry("  link_latency_s", 0.0, "assumed: part of the above"),
        *_entry("  load_s", median(loads_s or [0.0]), "measured: median of a replica, from the version's arrival on"),
    ]
    if restarts:
        lines += _entry("restart_s", median(restarts), "measured")
    return "\n".join(lines) + "\n"


def _entry(key: str, value: float | str, source: str) -> list[str]:
    """A line of YAML with its source."""
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return [f"{key}: {shown}  # {source}"]


def _table(values: Sequence[int]) -> str:
    """A distribution as the table of at most `TABLE` of its quantiles."""
    ordered, num = sorted(max(1, value) for value in values), min(TABLE, len(values))
    return f"{{table: [{', '.join(str(ordered[int((i + 0.5) * len(ordered) / num)]) for i in range(num))}]}}"
