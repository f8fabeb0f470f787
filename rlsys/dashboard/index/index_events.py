"""Rows of the index from events: groups, steps, evaluations and the log in words."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import TypeAlias

import orjson

from rlsys.dashboard.index.groups import RewardRange
from rlsys.monitoring.events import (
    AlertRaised,
    CautionRaised,
    EndpointFailed,
    EndpointRecovered,
    EngineChosen,
    EvalDone,
    Event,
    EventLost,
    FileReplaced,
    FileSkipped,
    FileStalled,
    GroupDropped,
    GroupIssued,
    GroupReissued,
    GroupRolledOut,
    GroupScored,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
    WorkerFailed,
    WorkerJoined,
    WorkerLeft,
    WorkerRestarted,
)
from rlsys.monitoring.trackers.console import note_of

PUT_LOG = "INSERT INTO logs (file, time_s, level, worker, kind, text) VALUES (?, ?, ?, ?, ?, ?)"

_Value: TypeAlias = str | int | float | None

_DONE = ("trained", "dropped", "forgotten")
"""States from which a group that is issued begins anew. `forgotten`: a resumed run may not know it."""


class IndexedEvents:
    """Writer of the rows of events, in order, within a transaction of the caller."""

    def __init__(self, connection: sqlite3.Connection, file: str) -> None:
        self._connection, self._file = connection, file

    def put(self, event: Event, time_s: float) -> None:
        """Write the rows of an event."""
        match event:
            case GroupIssued():
                self._on_issued(event, time_s)
            case GroupRolledOut(group_id=group_id, task_id=task, lengths=lengths):
                self._group(
                    group_id,
                    task,
                    time_s,
                    {
                        "state": "rolled_out",
                        "worker": event.worker,
                        "oldest": event.oldest,
                        "truncated": event.num_truncated,
                        "episodes": len(lengths),
                        "length": sum(lengths) / len(lengths) if lengths else None,
                    },
                )
            case GroupScored(group_id=group_id, task_id=task):
                rewards = RewardRange.of(event.rewards)
                self._group(
                    group_id,
                    task,
                    time_s,
                    {
                        "state": "scored",
                        "scored_s": time_s,
                        "episodes": rewards.num_episodes,
                        "failed": rewards.num_failed,
                        "reward": rewards.mean,
                        "reward_min": rewards.min,
                        "reward_max": rewards.max,
                    },
                )
            case GroupDropped(group_id=group_id, task_id=task, reason=reason):
                self._group(group_id, task, time_s, {"state": "dropped", "reason": reason})
            case GroupReissued(group_id=group_id, task_id=task, reason=reason):
                self._group(group_id, task, time_s, {"state": "lost", "reason": reason})
            case StepDone():
                self._step(event, time_s)
            case EvalDone():
                self._evaluation(event, time_s)
            case RunStarted(first_step=first) | RolledBack(restored=first):
                self._forget_after(first)
            case _:
                pass
        if (text := note_of(event)) is not None:
            self._note(event, time_s, text)

    def forget(self) -> None:
        """Delete all rows of events, because their file was replaced."""
        for table in ("groups", "steps", "evaluations", "metrics"):
            self._connection.execute(f"DELETE FROM {table}")
        self._connection.execute("DELETE FROM logs WHERE file = ?", (self._file,))

    def _on_issued(self, event: GroupIssued, time_s: float) -> None:
        found = self._connection.execute("SELECT state FROM groups WHERE group_id = ?", (event.group_id,)).fetchone()
        if found is None or found[0] in _DONE:
            self._connection.execute("DELETE FROM groups WHERE group_id = ?", (event.group_id,))
            self._group(event.group_id, event.task_id, time_s, {"state": "issued", "episodes": event.size})
        else:
            again = "UPDATE groups SET state = 'issued', attempts = attempts + 1 WHERE group_id = ?"
            self._connection.execute(again, (event.group_id,))

    def _group(self, group_id: int, task: str, time_s: float, values: Mapping[str, _Value]) -> None:
        """Set columns of a group. A group without an issue event begins now."""
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        given = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._connection.execute(
            f"INSERT INTO groups (group_id, task, issued_s, {names}) VALUES (?, ?, ?, {marks}) "
            f"ON CONFLICT (group_id) DO UPDATE SET task = excluded.task, {given}",
            (group_id, task, time_s, *values.values()),
        )

    def _step(self, event: StepDone, time_s: float) -> None:
        self._connection.execute("DELETE FROM steps WHERE step >= ?", (event.step,))  # resumed without a start event
        metrics = orjson.dumps(event.metrics, default=dict).decode()
        self._connection.execute("INSERT INTO steps VALUES (?, ?, ?)", (event.step, time_s, metrics))
        self._names("steps", event.metrics)
        trained = "UPDATE groups SET step = ?, state = 'trained' WHERE group_id = ?"
        self._connection.executemany(trained, [(event.step, group_id) for group_id in event.group_ids])

    def _evaluation(self, event: EvalDone, time_s: float) -> None:
        metrics = {name.removeprefix(f"eval/{event.dataset}/"): value for name, value in event.metrics.items()}
        row = (event.step, event.dataset, time_s, event.seconds, orjson.dumps(metrics).decode())
        self._connection.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?)", row)
        self._names("evaluations", metrics)

    def _names(self, kind: str, metrics: Mapping[str, float]) -> None:
        names = [(kind, name) for name in metrics if '"' not in name]
        self._connection.executemany("INSERT OR IGNORE INTO metrics VALUES (?, ?)", names)

    def _forget_after(self, step: int) -> None:
        """Reset at the start of a session, or when steps are lost."""
        self._connection.execute("DELETE FROM steps WHERE step > ?", (step,))
        self._connection.execute("DELETE FROM evaluations WHERE step > ?", (step,))
        self._connection.execute(
            "UPDATE groups SET step = NULL, state = 'forgotten' "
            "WHERE step > ? OR (step IS NULL AND state NOT IN ('dropped', 'forgotten'))",
            (step,),
        )

    def _note(self, event: Event, time_s: float, text: str) -> None:
        worker, level = "", "info"
        match event:
            case WorkerFailed(worker=worker):
                level = "error"
            case (
                EngineChosen(worker=worker)
                | WorkerRestarted(worker=worker)
                | WorkerJoined(worker=worker)
                | WorkerLeft(worker=worker)
            ):
                pass
            case (
                AlertRaised()
                | CautionRaised()
                | EventLost()
                | EndpointFailed()
                | EndpointRecovered()
                | FileReplaced()
                | FileSkipped()
                | FileStalled()
            ):
                level = "warning"
            case RunEnded(reason="failed"):
                level = "error"
            case _:
                pass
        row = (self._file, time_s, level, worker, event.kind, text)
        self._connection.execute(PUT_LOG, row)
