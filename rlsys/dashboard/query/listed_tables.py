"""Tables of queries that are made from answers of the dashboard: the list of runs, alerts and other short lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from rlsys.dashboard.index.event_decoding import WHOLE
from rlsys.dashboard.index.sql_query import Kind, QueryColumn, QueryTable, literal
from rlsys.dashboard.query.configs import RunConfig, value_text
from rlsys.dashboard.responses import PendingRow, ReplicaRow, RestartRow, RunSummary
from rlsys.monitoring.alerts import Alert
from rlsys.monitoring.metric_catalog import metric_of
from rlsys.types import Json


class RunRow(NamedTuple):
    """Run in the table of runs."""

    summary: RunSummary
    config: RunConfig
    metrics: Mapping[str, float]
    """Metric -> mean over its last steps, or value of its last evaluation."""


_RUNS: Mapping[str, tuple[Kind, str]] = {
    "id": ("text", "Its folder below the served one."),
    "name": ("text", "Its name."),
    "status": ("text", "`starting`, `running`, `silent`, `finished`, `interrupted` or `failed`."),
    "model": ("text", "Model that it trains."),
    "algorithm": ("text", "Algorithm."),
    "step": ("int", "Steps done."),
    "total_steps": ("int", "Steps to do."),
    "reward": ("float", "Mean reward of its last 20 steps."),
    "started_s": ("time", "Time of its first event."),
    "updated_s": ("time", "Time of its last event."),
    "step_s": ("float", "Median seconds of its last 20 steps."),
    "eta_s": ("float", "Estimated seconds left, while it runs."),
    "num_alerts": ("int", "Open alerts."),
    "last_error": ("text", "Error that ended it, or the last failure of a worker."),
}
_ALERTS: Mapping[str, tuple[Kind, str]] = {
    "alert": ("text", "Name of its rule."),
    "step": ("int", "Step at which it was raised."),
    "until_step": ("int", "Step at which it closed; empty: it is open."),
    "time_s": ("time", "Time at which it was raised."),
    "value": ("float", "Value that raised it."),
    "threshold": ("float", "Threshold of its rule."),
    "unit": ("text", "Unit of both."),
    "metric": ("text", "Metric to look at."),
    "sentence": ("text", "The problem and its remedy."),
}
_PENDING: Mapping[str, tuple[Kind, str]] = {
    "group_id": ("int", "Its id."),
    "task_id": ("text", "Its task."),
    "state": ("text", "What it waits for."),
    "worker": ("text", "Worker that is processing it."),
    "age_s": ("float", "Seconds since it was first issued."),
    "state_s": ("float", "Seconds in its state."),
    "num_attempts": ("int", "Times that it was issued."),
    "last_reason": ("text", "Reason of the last reissue."),
    "is_overdue": ("bool", "Does it take far longer than others?"),
}
_REPLICAS: Mapping[str, tuple[Kind, str]] = {
    "worker": ("text", "Its name."),
    "version": ("int", "Version of its weights."),
    "behind": ("int", "Versions behind the newest."),
    "is_stale": ("bool", "Is it further behind than allowed, or silent?"),
    "answers": ("bool", "Does it answer?"),
    "is_loading": ("bool", "Does it load weights?"),
    "num_running": ("int", "Sequences that it decodes."),
    "num_waiting": ("int", "Sequences that wait."),
    "kv_used": ("float", "Share of its cache in use."),
    "tokens_per_s": ("float", "Tokens sampled a second."),
    "seen_s": ("time", "Time of its last answer."),
    "restarts": ("int", "Times that it was replaced."),
}
_FAILURES: Mapping[str, tuple[Kind, str]] = {
    "worker": ("text", "Its name."),
    "phase": ("text", "What it was doing."),
    "detail": ("text", "How it failed."),
    "failed_s": ("time", "Time of the failure."),
    "back_s": ("time", "Time of its replacement; empty: not yet, or never."),
}


def runs_table(runs: Sequence[RunRow]) -> QueryTable:
    """Make the table of runs: their summary, and each configuration key and metric as a column."""
    table = _listing_table("runs", "Runs of the served folder.", _RUNS, [run.summary for run in runs], "updated_s")
    facts: list[tuple[str, str, Json]] = []
    for run in runs:
        own = {name: _plain(value) for name, value in run.config.values.items()} | dict(run.metrics)
        facts += ((run.summary.id, name, value) for name, value in own.items())
    numbers: dict[str, bool] = {}
    for _, name, value in facts:
        if value is not None:
            numbers[name] = numbers.get(name, True) and isinstance(value, int | float)
    columns = dict(table.columns)
    for name, is_number in numbers.items():
        metric = metric_of(name)
        description = metric.help if metric else "Key of the configuration."
        value = f"(SELECT value FROM facts WHERE facts.run = runs.id AND facts.name = {literal(name)})"
        columns.setdefault(name, QueryColumn("float" if is_number else "text", description, value))
    made = "CREATE TABLE main.facts (run TEXT, name TEXT, value, PRIMARY KEY (run, name)) WITHOUT ROWID"
    return replace(
        table,
        columns=columns,
        identity=("id",),
        order_by="started_s desc",
        searched=("id", "model", "algorithm", "last_error"),
        step=None,
        setup=[*table.setup, (made, ())],
        rows={**table.rows, "facts": [list(fact) for fact in facts]},
    )


def alerts_table(alerts: Sequence[Alert]) -> QueryTable:
    """Make the table of alerts, open ones first."""
    return _listing_table("alerts", "Alerts of the run, open ones first.", _ALERTS, alerts, "")


def pending_table(pending: Sequence[PendingRow]) -> QueryTable:
    """Make the table of groups that are neither trained nor dropped."""
    return _listing_table("pending", "Groups that are neither trained nor dropped.", _PENDING, pending, "age_s")


def replicas_table(replicas: Sequence[ReplicaRow]) -> QueryTable:
    """Make the table of rollout replicas."""
    return _listing_table("replicas", "Rollout replicas as of their last answer.", _REPLICAS, replicas, "")


def failures_table(failures: Sequence[RestartRow]) -> QueryTable:
    """Make the table of failures of workers."""
    return _listing_table("worker_failures", "Failures of workers.", _FAILURES, failures, "failed_s")


def _listing_table(
    name: str, description: str, fields: Mapping[str, tuple[Kind, str]], rows: Iterable[Any], newest: str
) -> QueryTable:
    """Make a table of rows with these fields, by default with the greatest of `newest` first."""
    names, values = ", ".join(f'"{field}"' for field in fields), attrgetter(*fields)
    return QueryTable(
        name=name,
        help=description,
        source=f"main.{name} AS {name}",
        key=f"{name}.rowid",
        columns={field: QueryColumn(kind, text, f'"{field}"') for field, (kind, text) in fields.items()},
        shown=list(fields),
        order_by=f"{newest} desc" if newest else "",
        searched=[field for field, (kind, _) in fields.items() if kind == "text"],
        step="step" if "step" in fields else None,
        setup=[(f"CREATE TABLE main.{name} ({names})", ())],
        rows={f"main.{name}": [[_storable(v) for v in values(row)] for row in rows]},
    )


def _plain(value: Json) -> Json:
    """Value of a configuration as a number or text."""
    if isinstance(value, bool):
        return str(value).lower()
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < WHOLE)
    return _storable(value if value is None or is_number else value_text(value))


def _storable(value: Json) -> Json:
    """Value without halves of characters, which foreign YAML can contain and SQLite refuses."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
