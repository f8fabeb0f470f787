"""Summary of a run: its status, progress and alerts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.index.series import SeriesColumns
from rlsys.dashboard.query.configs import RunConfig
from rlsys.dashboard.query.history import EventHistory
from rlsys.dashboard.responses import EvaluationScore, RunSummary, Status
from rlsys.monitoring.alerts import Alert

SUMMARY_STEPS = 20
"""Last steps over which a summary is made."""
_POINTS = 40
_LEAST_SILENCE_S = 60.0
_SILENT_STEPS = 10
_START_UP_S = 600.0
"""Most seconds that start-up or a step may take without an event, such as for loading models. Replicas are polled, and
reported every few seconds."""
_GONE_S = 15.0
"""Seconds without an event after which a run whose process is gone counts as killed."""

GONE = "process {pid} of the run is gone without a last event: it was killed. Go on with run.resume=auto"
"""Problem of a run that was killed on this machine."""

_ENDS: dict[str, Status] = {"finished": "finished", "interrupted": "interrupted"}


_BY_WEIGHT: Sequence[Status] = ("running", "starting", "silent", "failed", "interrupted", "finished")
"""Status of an unfinished run of several policies: the first of these that one of the policies has."""


def summary(folder: RunFolder, history: EventHistory, config: RunConfig, now_s: float) -> RunSummary:
    """Summarise a run as of `now_s`."""
    status, step_s = _status(folder, history, config, now_s), _step_s(history)
    total = _total_steps(history, config)
    rewards = history.columns.last("reward/mean", SUMMARY_STEPS)
    left = None if total is None or step_s is None else max(0, total - history.step) * step_s
    return RunSummary(
        id=folder.id,
        name=folder.name,
        status=status,
        model=config.text_of("model.path"),
        algorithm=config.text_of("algorithm.type"),
        step=history.step,
        total_steps=total,
        started_s=history.first_s,
        updated_s=history.last_s,
        step_s=step_s,
        eta_s=left if status == "running" else None,
        reward=fmean(rewards) if rewards else None,
        rewards=history.columns.outline("reward/mean", _POINTS),
        evaluations=_evaluations(history.columns),
        last_error=_last_error(history, folder if status == "silent" else None),
        num_alerts=len(open_alerts(history, config, now_s)),
    )


def summary_of_several(own: RunSummary, policies: Sequence[RunSummary]) -> RunSummary:
    """Summarise a run of several policies: progress and status are those of the slowest policy."""
    has_ended = own.status in ("finished", "interrupted", "failed")
    status = own.status if has_ended else min((row.status for row in policies), key=_BY_WEIGHT.index)
    return replace(
        own,
        status=status,
        step=min(row.step for row in policies),
        updated_s=max((row.updated_s for row in (own, *policies) if row.updated_s is not None), default=None),
        step_s=max((row.step_s for row in policies if row.step_s is not None), default=None),
        eta_s=None if has_ended else max((row.eta_s for row in policies if row.eta_s is not None), default=None),
    )


def open_alerts(history: EventHistory, config: RunConfig, now_s: float) -> list[Alert]:
    """Open alerts as of `now_s`, including an alert for silence if steps are left."""
    silent = None if _is_done(history, config) else history.alarms.silent(now_s)
    return [*history.alarms.open, *([silent] if silent else [])]


def _evaluations(columns: SeriesColumns) -> list[EvaluationScore]:
    """Last score on each data set."""
    last = columns.last_of("eval/")
    names = sorted(name.removesuffix("/mean") for name in last if name.endswith("/mean"))
    return [
        EvaluationScore(
            dataset=name.removeprefix("eval/"),
            step=last[f"{name}/mean"][0],
            **{of: last.get(f"{name}/{of}", (0, None))[1] for of in ("mean", "mean_ci95", "failed_frac")},
        )
        for name in names
    ]


def _status(folder: RunFolder, history: EventHistory, config: RunConfig, now_s: float) -> Status:
    """Compute the `Status` from the times of events. The clocks of the run's machine and this one must agree.

    A run that took all its steps without an end event is finished: older versions wrote no such event.
    """
    if history.ended:
        return _ENDS.get(history.ended.reason, "failed")
    has_started = history.started is not None or history.step > 0 or "start_up" in history.phases
    most_s = max(_LEAST_SILENCE_S, _SILENT_STEPS * (_step_s(history) or 0.0)) if has_started else _START_UP_S
    most_s = min(most_s, _START_UP_S)
    if folder.gone_process is not None:
        most_s = _GONE_S
    if now_s - (history.last_s or folder.written_s) > most_s:
        return "finished" if _is_done(history, config) else "silent"
    return "running" if has_started else "starting"


def _step_s(history: EventHistory) -> float | None:
    """Median seconds of its last steps."""
    times_s = history.columns.last("time/step", SUMMARY_STEPS)
    return median(times_s) if times_s else None


def _total_steps(history: EventHistory, config: RunConfig) -> int | None:
    return history.started.total_steps if history.started else config.int_of("run.steps")


def _is_done(history: EventHistory, config: RunConfig) -> bool:
    """True if no steps are left."""
    total = _total_steps(history, config)
    return total is not None and history.step >= total > 0


def _last_error(history: EventHistory, silent: RunFolder | None) -> str | None:
    """Error that ended the run, or the last failure of a worker. `silent`: the folder, if the run is silent."""
    if history.ended and history.ended.reason == "failed":
        return history.ended.detail or "it failed"
    if silent is not None and (pid := silent.gone_process) is not None:
        return GONE.format(pid=pid)
    failure = history.failure
    return f"{failure.worker} while {failure.phase}: {failure.detail}" if failure else None
