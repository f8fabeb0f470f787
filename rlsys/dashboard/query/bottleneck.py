"""Bottleneck of a run: the worker or the stage that delays the others.

From the times that steps report, the speed of workers beside that of their peers, groups that are ready while the
trainer waits, and the time that episodes spend on tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlsys.dashboard.query.history import EventHistory
from rlsys.dashboard.responses import Bottleneck

_STEPS = 20
_TOO_MUCH = 0.15
"""Share of a step below which waiting needs no remedy."""
_ALL_THE_TIME = 0.85
"""Share of time above which a stage is always busy: it can be relieved, but more overlap does not make it faster."""

_SLOWER = 2.0
"""A worker that takes this many times as long as its peers is what to look at first."""
_MOST = 0.5
"""Share of time above which a stage, or the tools of an episode, may be what delays the rest."""

_SHARES: Mapping[str, str] = {
    "rollout": "time/rollout",
    "reward": "time/reward",
    "annotate": "time/annotate",
    "train": "time/train",
    "fetch": "time/fetch",
    "columns": "time/columns",
    "publish": "time/publish",
    "record": "time/record",
    "checkpoint": "time/checkpoint",
    "trainer waits": "time/wait_batch",
    "rollouts wait": "time/wait_permit",
    "wait for weights": "time/weights_wait",
    "wait for evaluation": "time/eval_wait",
}

_WORK: Mapping[str, Sequence[str]] = {
    "trainer": ("train", "fetch", "columns", "publish", "record", "checkpoint"),
    "annotate": ("annotate",),
    "reward": ("reward",),
    "rollout": ("rollout",),
    "weights": ("wait for weights",),
    "evaluation": ("wait for evaluation",),
}
"""Stage -> shares that measure its delay. Of equal stages the first is named: the trainer does one thing at a time,
while a replica with many groups looks busy as long as any of them is there."""

_MORE_CORES = (
    "add ranks (train.mesh.shard), or give it more cores or a GPU (resources.actor.threads, resources.actor.gpus)"
)
_REMEDY_OF_TRAINER: Mapping[str, str] = {
    "publish": "look in the lanes at how long publishing takes",
    "record": "write rollouts less often (record.rollouts_every)",
    "checkpoint": "save less often (checkpoint.every)",
}
"""Remedy by the trainer's longest activity; all other activities have `_MORE_CORES`."""


def bottleneck(history: EventHistory, bound: int | None) -> Bottleneck | None:
    """Stage or worker that delays the others, over the last 20 steps; None if these steps lack times.

    `bound`: the run's `max_staleness`.
    """
    columns, step = history.columns, history.step - _STEPS
    steps_s = columns.sum_since("time/step", step)
    if steps_s <= 0:
        return None
    shares = {
        name: columns.sum_since(metric, step) / steps_s for name, metric in _SHARES.items() if columns.last(metric)
    }
    work = {who: sum(shares.get(part, 0.0) for part in parts) for who, parts in _WORK.items()}
    if not any(work.values()):
        return None
    busiest = max(work, key=lambda who: round(work[who], 2))
    waits = (shares.get(name, 0.0) for name in ("trainer waits", "rollouts wait", "wait for evaluation"))
    if max(waits) < _TOO_MUCH:
        return Bottleneck(who="balanced", worker="", sentence=_balance_text(shares), shares=shares)
    seen = _Evidence(history, bound, shares, work, busiest, (history.last_s or 0.0) - steps_s, step)
    found = next((cause for looks in _CAUSES if (cause := looks(seen))), None) or _stage(seen)
    return Bottleneck(who=found.who, worker=found.worker, sentence=found.sentence, shares=shares)


class _Cause(NamedTuple):
    who: str
    worker: str
    sentence: str


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Evidence of the last steps, for every cause that may be found."""

    history: EventHistory
    bound: int | None
    shares: Mapping[str, float]
    work: Mapping[str, float]
    busiest: str
    from_s: float
    """Time at which these steps began."""
    before: int
    """Step before them."""

    @property
    def trainer_waits(self) -> float:
        return self.shares.get("trainer waits", 0.0)


def _straggler(seen: _Evidence) -> _Cause | None:
    """One replica or reward worker that is far slower than its peers, while the trainer waits."""
    if seen.trainer_waits < _TOO_MUCH:
        return None
    kinds = [kind for kind in ("rollout", "reward") if seen.work[kind] > _MOST]
    stragglers = [(kind, found) for kind in kinds if (found := seen.history.paces.straggler(kind, seen.from_s))]
    kind, found = max(stragglers, key=lambda one: one[1].sure, default=("", None))
    if found is None or found.sure < _SLOWER:
        return None
    unit = "token" if kind == "rollout" else "episode"
    return _Cause(
        "straggler",
        found.worker,
        f"The trainer waits for groups {_percent(seen.trainer_waits)} of the time, and {found.worker} takes "
        f"{found.ratio:.1f} times as long per {unit} as its peers: look at what else its machine does, and stop its "
        "process to have it replaced. More workers would not help as much.",
    )


def _order(seen: _Evidence) -> _Cause | None:
    """Groups that are ready while the trainer waits for older ones."""
    history = seen.history
    num_ready = history.columns.means_since("async/queue_depth", seen.before).get("", 0.0)
    per_step = len(history.groups.by_step.get(history.step, ()))
    if seen.trainer_waits < _TOO_MUCH or not per_step or num_ready < per_step:
        return None
    oldest = min(history.groups.pending, key=lambda facts: facts.issued_s, default=None)
    is_late = oldest is not None and oldest.state != "waits to be trained"
    now = f" Now it is group {oldest.group_id} of task `{oldest.task_id}`." if oldest and is_late else ""
    return _Cause(
        "order",
        oldest.where if oldest and is_late else "",
        f"The trainer waits for older groups {_percent(seen.trainer_waits)} of the time, while {num_ready:.0f} others "
        f"are ready, and a step takes {per_step}: let it choose among more (asynchrony.window), or shorten the longest "
        f"completions (rollout.max_new_tokens).{now}",
    )


def _environment(seen: _Evidence) -> _Cause | None:
    """Episodes that wait for tools or their environment for most of the time that they are rolled out."""
    tools_s = seen.history.columns.means_since("agents/tool_s/", seen.before)
    group_s = seen.history.paces.group_s(seen.from_s)
    if seen.busiest != "rollout" or seen.trainer_waits < _TOO_MUCH or not tools_s or not group_s:
        return None
    share = sum(tools_s.values()) / group_s
    if share < _MOST:
        return None
    slowest = max(tools_s, key=lambda name: tools_s[name])
    what = "the environment" if slowest == "environment" else f"the tool `{slowest}`"
    return _Cause(
        "environment",
        "",
        f"The trainer waits for groups {_percent(seen.trainer_waits)} of the time, and an episode spends "
        f"{_percent(share)} of its {group_s:.3g} s on tools and environments, {tools_s[slowest]:.3g} s on "
        f"{what}: make {what} faster, or play more episodes at a time (rollout.slots). Faster replicas would not help.",
    )


def _lockstep(seen: _Evidence) -> _Cause | None:
    """Stages of a synchronous run that take turns."""
    rollouts_wait, at_work = seen.shares.get("rollouts wait", 0.0), seen.work[seen.busiest]
    if seen.bound != 0 or min(seen.trainer_waits, rollouts_wait) < _TOO_MUCH or at_work > _ALL_THE_TIME:
        return None
    return _Cause(
        "lockstep",
        "",
        "The run is synchronous, so that rollouts and trainer take turns: the trainer waits "
        f"{_percent(seen.trainer_waits)} of the time, rollouts {_percent(rollouts_wait)}, and the busiest stage, "
        f"“{seen.busiest}”, is at work {_percent(at_work)} of it. Let rollouts run one step ahead "
        "(asynchrony.max_staleness=1).",
    )


_CAUSES = (_straggler, _order, _environment, _lockstep)
"""Causes within or between stages, the most specific first. Without any of them, the busiest stage is named."""


def _stage(seen: _Evidence) -> _Cause:
    who = seen.busiest
    worker = seen.history.paces.busiest(who, seen.from_s) if who in ("rollout", "reward") else ""
    return _Cause(who, worker, _sentence(who, worker, seen.shares, seen.work) + _overlap(who, seen.work[who]))


def _sentence(who: str, worker: str, shares: Mapping[str, float], work: Mapping[str, float]) -> str:
    trainer_waits, at_work = _percent(shares.get("trainer waits", 0.0)), _percent(work[who])
    named = f" ({worker})" if worker else ""
    match who:
        case "rollout":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and the busiest replica{named} is at work "
                f"{at_work} of it: add replicas (rollout.replicas), or shorten completions (rollout.max_new_tokens)."
            )
        case "reward":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and the busiest reward worker{named} is at "
                f"work {at_work} of it, the busiest replica {_percent(work['rollout'])}: add reward workers "
                "(reward.workers), or make the reward function faster."
            )
        case "annotate":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and the busiest annotator is at work "
                f"{at_work} of it, the trainer {_percent(work['trainer'])}: give it more cores or a GPU "
                "(resources.reference.threads, resources.reference.gpus), or do without the column it adds."
            )
        case "trainer":
            part = max(_WORK["trainer"], key=lambda part: shares.get(part, 0.0))
            return (
                f"Rollouts wait for the trainer {_percent(shares.get('rollouts wait', 0.0))} of the time, which is at "
                f"work {at_work} of it, “{part}” alone {_percent(shares.get(part, 0.0))}: "
                f"{_REMEDY_OF_TRAINER.get(part, _MORE_CORES)}."
            )
        case "weights":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and a group waits for weights "
                f"{at_work} of a step: look in the lanes at how long publishing and pulling take."
            )
        case _:
            return (
                f"The trainer waits for evaluations {at_work} of the time: evaluate less often (eval.every), on fewer "
                "tasks (eval.limit), or with more replicas (eval.replicas)."
            )


def _overlap(who: str, at_work: float) -> str:
    """Further remedy if no stage is busy all the time."""
    if who == "evaluation" or at_work > _ALL_THE_TIME:
        return ""
    return (
        " No stage is at work all the time, so the stages wait for each other in turn: let rollouts run further ahead "
        "(asynchrony.max_staleness)."
    )


def _balance_text(shares: Mapping[str, float]) -> str:
    trainer_waits, rollouts_wait = shares.get("trainer waits", 0.0), shares.get("rollouts wait", 0.0)
    return (
        f"Nobody waits much: the trainer {_percent(trainer_waits)} of the time for groups, rollouts "
        f"{_percent(rollouts_wait)} for the trainer."
    )


def _percent(share: float) -> str:
    """Share of time; groups that overlap a step may add up to more than all of it."""
    return f"{100 * min(1.0, share):.0f} %"
