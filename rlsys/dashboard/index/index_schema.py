"""Tables of the index of a run, as SQLite stores them and as queries name them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from zlib import crc32

from rlsys.dashboard.index.series import MOST_METRICS
from rlsys.dashboard.index.sql_query import QueryColumn, QueryTable, literal
from rlsys.monitoring.metric_catalog import metric_of

STORED = """
CREATE TABLE files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, head BLOB, num_corrupt INTEGER);
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    file TEXT, dataset TEXT, step INTEGER, group_id INTEGER, episode INTEGER, task TEXT, source TEXT, policy TEXT,
    replica TEXT, reward REAL, advantage REAL, outcome TEXT, reason TEXT, agents TEXT, length INTEGER, turns INTEGER,
    tool_calls INTEGER, seconds REAL, staleness INTEGER, prompt_id INTEGER
);
CREATE INDEX episodes_by_file ON episodes (file);
CREATE INDEX episodes_by_group ON episodes (group_id, step);
CREATE TABLE answers (id INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,
    task TEXT, step INTEGER, state TEXT, worker TEXT, episodes INTEGER, failed INTEGER, truncated INTEGER,
    reward REAL, reward_min REAL, reward_max REAL, length REAL, oldest INTEGER, attempts INTEGER DEFAULT 1,
    reason TEXT DEFAULT '', issued_s REAL, scored_s REAL
);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE steps (step INTEGER PRIMARY KEY, time_s REAL, metrics TEXT);
CREATE TABLE evaluations (
    step INTEGER, dataset TEXT, time_s REAL, seconds REAL, metrics TEXT, PRIMARY KEY (step, dataset)
);
CREATE TABLE metrics (kind TEXT, name TEXT, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE logs (
    id INTEGER PRIMARY KEY, file TEXT, time_s REAL, level TEXT, worker TEXT, kind TEXT, text TEXT
);
CREATE INDEX logs_by_file ON logs (file);
"""
VERSION = crc32(f"2 {STORED}".encode()) >> 1
"""Version of the index. An index of another version is rebuilt; the number at its beginning counts versions with the
same tables."""

_TASKS = """
CREATE TEMP TABLE task_rows AS
WITH trained AS (
    SELECT *, step > :first AS is_later,
        row_number() OVER (PARTITION BY task, step > :first ORDER BY step DESC, group_id DESC) AS from_end,
        row_number() OVER (PARTITION BY task, step > :first ORDER BY step, group_id) AS from_start
    FROM main.groups WHERE step <= :last AND reward IS NOT NULL
)
SELECT task, count(*) FILTER (WHERE is_later) AS groups, sum(episodes) FILTER (WHERE is_later) AS episodes,
    avg(reward) FILTER (WHERE is_later) AS reward,
    coalesce(
        avg(reward) FILTER (WHERE NOT is_later AND from_end <= 3),
        avg(reward) FILTER (WHERE is_later AND from_start <= 3)
    ) AS reward_before,
    avg(reward) FILTER (WHERE is_later AND from_end <= 3) AS reward_after,
    avg(reward_min = reward_max) FILTER (WHERE is_later) AS equal,
    1.0 * sum(failed) FILTER (WHERE is_later) / sum(episodes) FILTER (WHERE is_later) AS failed,
    1.0 * sum(truncated) FILTER (WHERE is_later) / sum(episodes) FILTER (WHERE is_later) AS truncated,
    avg(length) FILTER (WHERE is_later) AS length,
    min(step) FILTER (WHERE is_later) AS first_step, max(step) FILTER (WHERE is_later) AS last_step
FROM trained GROUP BY task HAVING count(*) FILTER (WHERE is_later) > 0
"""

_NO_STEP = 2**53


def _episodes(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    return _of_episodes(
        connection, "episodes", "Recorded training episodes, of every step with rollouts.", "dataset = ''", ()
    )


def _samples(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    own = ("dataset",)
    return _of_episodes(connection, "samples", "Recorded samples of evaluations.", "dataset <> ''", own)


def _of_episodes(
    connection: sqlite3.Connection, name: str, description: str, kind: str, own: tuple[str, ...]
) -> QueryTable:
    columns = {
        "dataset": QueryColumn("text", "Data set of the evaluation; empty for training.", "dataset"),
        "step": QueryColumn("int", "Step that trained it, or version that was evaluated.", "step"),
        "group_id": QueryColumn("int", "Its group.", "group_id"),
        "episode": QueryColumn("int", "Its index in the group.", "episode"),
        "task": QueryColumn("text", "Id of its task.", "task"),
        "source": QueryColumn("text", "Source of the task's data.", "source"),
        "policy": QueryColumn("text", "Policy trained on it.", "policy"),
        "replica": QueryColumn("text", "Replica that rolled it out.", "replica"),
        "reward": QueryColumn("float", "Reward of its root; empty: it failed, or has none.", "reward"),
        "advantage": QueryColumn("float", "Advantage of its root; empty: not trained, or one per token.", "advantage"),
        "outcome": QueryColumn("text", "`ok`, `truncated` or `failed`.", "outcome"),
        "truncated": QueryColumn("bool", "Was it cut at the token limit?", "(outcome = 'truncated')"),
        "failed": QueryColumn("bool", "Did it fail?", "(outcome = 'failed')"),
        "reason": QueryColumn("text", "Why it failed, or was cut.", "reason"),
        "agents": QueryColumn("text", "Names of its agents, the root first.", "agents"),
        "length": QueryColumn("int", "Tokens sampled, by all its agents.", "length"),
        "turns": QueryColumn("int", "Turns of all its agents.", "turns"),
        "tool_calls": QueryColumn("int", "Tool calls.", "tool_calls"),
        "seconds": QueryColumn("float", "Seconds from its start to its end; empty: not recorded.", "seconds"),
        "staleness": QueryColumn(
            "int", "Versions between its oldest token and the weights that it trained.", "staleness"
        ),
        "prompt": QueryColumn("text", "Prompt of the task.", "(SELECT text FROM prompts WHERE prompts.id = prompt_id)"),
        "answer": QueryColumn(
            "text", "Replies of its root.", "(SELECT text FROM answers WHERE answers.id = episodes.id)"
        ),
    }
    return QueryTable(
        name=name,
        help=description,
        source=f"(SELECT * FROM main.episodes WHERE {kind}) AS episodes",
        key="episodes.id",
        columns=columns,
        shown=(*own, "step", "task", "reward", "outcome", "length", "staleness", "answer"),
        identity=(*own, "step", "group_id", "episode"),
        order_by="step desc, group_id, episode",
        searched=("prompt", "answer", "task", "reason"),
    )


def _groups(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    columns = {
        "group_id": QueryColumn("int", "Its id.", "group_id"),
        "task": QueryColumn("text", "Id of its task.", "task"),
        "step": QueryColumn("int", "Step that trained it; empty: none did.", "step"),
        "state": QueryColumn("text", "`issued`, `rolled_out`, `scored`, `trained`, `dropped` or `lost`.", "state"),
        "worker": QueryColumn("text", "Replica that rolled it out.", "worker"),
        "episodes": QueryColumn("int", "Its episodes.", "episodes"),
        "failed": QueryColumn("int", "Episodes without a reward.", "failed"),
        "truncated": QueryColumn("int", "Episodes cut at the token limit.", "truncated"),
        "reward": QueryColumn("float", "Mean reward.", "reward"),
        "reward_min": QueryColumn("float", "Least reward.", "reward_min"),
        "reward_max": QueryColumn("float", "Greatest reward.", "reward_max"),
        "equal": QueryColumn(
            "bool", "Are all its rewards equal?", "(coalesce(reward_min = reward_max, 0) AND episodes - failed > 1)"
        ),
        "length": QueryColumn("float", "Mean tokens sampled in an episode.", "length"),
        "staleness": QueryColumn(
            "int", "Versions between its oldest token and the weights that it trained.", "max(0, step - 1 - oldest)"
        ),
        "attempts": QueryColumn("int", "Times that it was issued.", "attempts"),
        "reason": QueryColumn("text", "Why it was dropped, or issued again.", "reason"),
        "seconds": QueryColumn("float", "Seconds from its issue to its score.", "(scored_s - issued_s)"),
        "issued_s": QueryColumn("time", "Time of its first issue.", "issued_s"),
        "recorded": QueryColumn(
            "bool",
            "Can its episodes be read?",
            "EXISTS (SELECT 1 FROM main.episodes AS episodes WHERE episodes.group_id = groups.group_id"
            " AND episodes.step = groups.step AND dataset = '')",
        ),
    }
    return QueryTable(
        name="groups",
        help="Every group from its issue on.",
        source="main.groups AS groups",
        key="groups.group_id",
        columns=columns,
        shown=(
            "step",
            "task",
            "state",
            "reward",
            "reward_min",
            "reward_max",
            "failed",
            "truncated",
            "length",
            "staleness",
        ),
        identity=("step", "group_id", "task", "recorded"),
        order_by="step desc, group_id",
        searched=("task", "reason", "worker"),
    )


def _tasks(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    first, last = between or (-1, _NO_STEP)
    columns = {
        "task": QueryColumn("text", "Its id.", "task"),
        "groups": QueryColumn("int", "Trained groups.", "groups"),
        "episodes": QueryColumn("int", "Episodes of these groups.", "episodes"),
        "reward": QueryColumn("float", "Mean reward of these groups.", "reward"),
        "reward_before": QueryColumn(
            "float",
            "Mean reward of its last three groups up to the first step of `between`; else of its first three.",
            "reward_before",
        ),
        "reward_after": QueryColumn("float", "Mean reward of its last three groups.", "reward_after"),
        "change": QueryColumn("float", "`reward_after` less `reward_before`.", "(reward_after - reward_before)"),
        "equal": QueryColumn("float", "Share of groups whose rewards are all equal.", "equal"),
        "failed": QueryColumn("float", "Share of episodes without a reward.", "failed"),
        "truncated": QueryColumn("float", "Share of episodes cut at the token limit.", "truncated"),
        "length": QueryColumn("float", "Mean tokens sampled in an episode.", "length"),
        "first_step": QueryColumn("int", "First step that trained it.", "first_step"),
        "last_step": QueryColumn("int", "Last step that trained it.", "last_step"),
    }
    return QueryTable(
        name="tasks",
        help="Trained tasks; with `between A and B`, their groups of the steps after A up to B.",
        source="temp.task_rows",
        key="task",
        columns=columns,
        shown=("task", "groups", "reward", "reward_before", "reward_after", "change", "failed", "truncated", "length"),
        identity=("task",),
        order_by="reward",
        searched=("task",),
        step="last_step",
        setup=[(_TASKS, {"first": first, "last": last})],
    )


def _steps(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    names = _metrics(connection, "steps")
    columns = {
        "step": QueryColumn("int", "Its number.", "step"),
        "time_s": QueryColumn("time", "Time of its end.", "time_s"),
        **{name: _metric(name, name) for name in names},
    }
    main = ("reward/mean", "reward/failed_frac", "completions/length_mean", "completions/truncated_frac", "time/step")
    return QueryTable(
        name="steps",
        help="Steps with their metrics, each of which is a column.",
        source="main.steps AS steps",
        key="step",
        columns=columns,
        shown=("step", "time_s", *(name for name in main if name in columns)),
        identity=("step",),
        order_by="step desc",
    )


def _evaluations(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    own = _metrics(connection, "evaluations")
    columns = {
        "step": QueryColumn("int", "Version that was evaluated.", "step"),
        "dataset": QueryColumn("text", "Its data set.", "dataset"),
        "time_s": QueryColumn("time", "Time of its end.", "time_s"),
        "seconds": QueryColumn("float", "Seconds that it took.", "seconds"),
        **{name: _metric(name, f"eval/any/{name}") for name in own},
    }
    return QueryTable(
        name="evaluations",
        help="Evaluations with their metrics, each of which is a column.",
        source="main.evaluations AS evaluations",
        key="evaluations.rowid",
        columns=columns,
        shown=("step", "dataset", *own),
        identity=("step", "dataset"),
        order_by="step desc, dataset",
        searched=("dataset",),
    )


def _logs(connection: sqlite3.Connection, between: tuple[int, int] | None) -> QueryTable:
    columns = {
        "id": QueryColumn("int", "Its number in the index.", "id"),
        "time_s": QueryColumn(
            "time", "Its time; of a line of a log file, that of the next sample of its worker, every 5 s.", "time_s"
        ),
        "level": QueryColumn("text", "`debug`, `info`, `warning` or `error`.", "level"),
        "worker": QueryColumn("text", "Worker that it is from or about; empty: the run.", "worker"),
        "kind": QueryColumn("text", "Kind of the event; `line` for a line of a log file.", "kind"),
        "file": QueryColumn("text", "File in the run's folder.", "file"),
        "text": QueryColumn("text", "What it says.", "text"),
    }
    return QueryTable(
        name="logs",
        help="Events in words, and the lines of logs/*.log.",
        source="main.logs AS logs",
        key="id",
        columns=columns,
        shown=("time_s", "level", "worker", "text"),
        identity=("id",),
        order_by="time_s desc",
        searched=("text", "worker"),
        step=None,
    )


def _metrics(connection: sqlite3.Connection, kind: str) -> list[str]:
    """Metrics of a kind that queries can name."""
    rows = connection.execute("SELECT name FROM metrics WHERE kind = ? ORDER BY name LIMIT ?", (kind, MOST_METRICS))
    return [name for (name,) in rows]


def _metric(name: str, documented: str) -> QueryColumn:
    metric = metric_of(documented)
    path = f'$."{name}"'
    description = f"{metric.help}{f' ({metric.unit})' if metric.unit else ''}" if metric else f"The metric `{name}`."
    return QueryColumn("float", description, f"json_extract(metrics, {literal(path)})")


INDEXED: Mapping[str, Callable[[sqlite3.Connection, tuple[int, int] | None], QueryTable]] = {
    "episodes": _episodes,
    "samples": _samples,
    "groups": _groups,
    "tasks": _tasks,
    "steps": _steps,
    "evaluations": _evaluations,
    "logs": _logs,
}
"""Tables of the index by name, as of now and for the steps of `between`."""
