"""Bottleneck of a run: the stage that delays the others, from the times that steps report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlsys.dashboard.responses import Bottleneck
from rlsys.dashboard.series import SeriesColumns

_STEPS = 20
_TOO_MUCH = 0.15
"""Share of a step below which waiting needs no remedy."""
_ALL_THE_TIME = 0.85
"""Share of time above which a stage is always busy: it can be relieved, but more overlap does not make it faster."""

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

_MORE_CORES = "add ranks (train.mesh.shard), or give it more cores or a GPU (train.threads, train.num_gpus)"
_REMEDY_OF_TRAINER: Mapping[str, str] = {
    "publish": "look in the lanes at how long publishing takes",
    "record": "write rollouts less often (record.rollouts_every)",
    "checkpoint": "save less often (checkpoint.every)",
}
"""Remedy by the trainer's longest activity; all other activities have `_MORE_CORES`."""


def bottleneck(columns: SeriesColumns, step: int) -> Bottleneck | None:
    """Stage that delays the others, over the 20 steps up to `step`; None if these steps lack times."""
    steps_s = columns.sum_since("time/step", step - _STEPS)
    if steps_s <= 0:
        return None
    shares = {
        name: columns.sum_since(metric, step - _STEPS) / steps_s
        for name, metric in _SHARES.items()
        if columns.last(metric)
    }
    work = {who: sum(shares.get(part, 0.0) for part in parts) for who, parts in _WORK.items()}
    if not any(work.values()):
        return None
    busiest = max(work, key=lambda who: round(work[who], 2))
    waits = (shares.get(name, 0.0) for name in ("trainer waits", "rollouts wait", "wait for evaluation"))
    if max(waits) < _TOO_MUCH:
        return Bottleneck(who="balanced", sentence=_balanced(shares), shares=shares)
    sentence = _sentence(busiest, shares, work) + _overlap(busiest, work[busiest])
    return Bottleneck(who=busiest, sentence=sentence, shares=shares)


def _sentence(who: str, shares: Mapping[str, float], work: Mapping[str, float]) -> str:
    trainer_waits, at_work = _percent(shares.get("trainer waits", 0.0)), _percent(work[who])
    match who:
        case "rollout":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and the busiest replica is at work "
                f"{at_work} of it: add replicas (rollout.replicas), or shorten completions (rollout.max_new_tokens)."
            )
        case "reward":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and the busiest reward worker is at work "
                f"{at_work} of it, the busiest replica {_percent(work['rollout'])}: add reward workers "
                "(reward.workers), or make the reward function faster."
            )
        case "annotate":
            return (
                f"The trainer waits for groups {trainer_waits} of the time, and the busiest annotator is at work "
                f"{at_work} of it, the trainer {_percent(work['trainer'])}: give it more cores or a GPU "
                "(reference.threads, reference.num_gpus), or do without the column it adds."
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


def _balanced(shares: Mapping[str, float]) -> str:
    trainer_waits, rollouts_wait = shares.get("trainer waits", 0.0), shares.get("rollouts wait", 0.0)
    return (
        f"Nobody waits much: the trainer {_percent(trainer_waits)} of the time for groups, rollouts "
        f"{_percent(rollouts_wait)} for the trainer."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
