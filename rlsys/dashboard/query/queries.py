"""All queries of the dashboard, answered from the files of runs.

    readings = Readings(Path("runs"))
    readings.runs().runs[0].status                            # "running"
    readings.series("sort-seed0", ["reward/mean"]).series[0].values[-1]

Each query first reads what was written since the last one, so answers are up to date.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlsys.dashboard.index.folders import RunFolder, all_runs, as_text, find_run
from rlsys.dashboard.query.cluster_view import cluster, window
from rlsys.dashboard.query.configs import differences
from rlsys.dashboard.query.episodes import episode_answer, group_answer
from rlsys.dashboard.query.evaluations import evaluation_row, newest_first
from rlsys.dashboard.query.open_run import OpenedRun
from rlsys.dashboard.query.pending_groups import ledger
from rlsys.dashboard.query.rollout_listing import ScoredGroup, neighbours
from rlsys.dashboard.query.run_preview import Glimpses
from rlsys.dashboard.query.summary import SUMMARY_STEPS, open_alerts, summary, summary_of_several
from rlsys.dashboard.responses import (
    AlertRule,
    AlertsAnswer,
    Axis,
    Change,
    ClusterAnswer,
    CompareAnswer,
    EpisodeAnswer,
    EvaluationsAnswer,
    FailuresAnswer,
    GroupAnswer,
    GroupsAnswer,
    LedgerAnswer,
    MachineAnswer,
    MetricsAnswer,
    RunAnswer,
    RunsAnswer,
    RunSummary,
    SeriesAnswer,
    TaskAnswer,
)
from rlsys.monitoring.alert_rules import RULES

MOST_OPENED = 32
"""Most runs kept in memory, least recently used evicted first: as many as can be compared."""


class ListedRun(NamedTuple):
    """Run in the list of runs."""

    folder: RunFolder
    summary: RunSummary
    metrics: Mapping[str, float]
    """Metric -> mean over its last 20 steps, or value of its last evaluation."""


class RolloutReadings:
    """Answers about the groups and episodes of runs. Thread-safe.

    Every method raises `NoSuch` for a run, step, group, episode or task that does not exist.
    """

    def __init__(self, open_run: Callable[[str], OpenedRun]) -> None:
        """`open_run`: gets a run by its id, to be entered."""
        self._open = open_run

    def groups(self, run: str, step: int | None = None) -> GroupsAnswer:
        """Groups trained by a step."""
        with self._open(run) as opened:
            return opened.lists.step(step)

    def scored_groups(self, run: str) -> list[ScoredGroup]:
        """Groups with a reward, of all steps whose rollouts were written."""
        with self._open(run) as opened:
            return list(opened.lists.scored_groups())

    def evaluations(self, run: str) -> EvaluationsAnswer:
        """Every evaluation."""
        with self._open(run) as opened:
            samples = {name: opened.rollouts_of(name) for name in opened.datasets()}
            done = newest_first(opened.history.evaluations.values())
            return EvaluationsAnswer([evaluation_row(one, samples.get(one.dataset)) for one in done])

    def group(self, run: str, step: int, group_id: int, dataset: str = "") -> GroupAnswer:
        """A group trained by a step, or a task of the evaluation of that version on a data set."""
        with self._open(run) as opened:
            rollouts = opened.rollouts_of(dataset)
            record = rollouts.record(step, group_id)
            near = neighbours(rollouts.group_ids(step), group_id) if dataset else opened.lists.beside(step, group_id)
            return group_answer(record, near)

    def episode(self, run: str, step: int, group_id: int, episode: int, dataset: str = "") -> EpisodeAnswer:
        """An episode of `group`."""
        with self._open(run) as opened:
            record = opened.rollouts_of(dataset).record(step, group_id)
            is_replayable = not dataset and opened.is_replayable(record)
            return episode_answer(record, episode, opened.folder.path if is_replayable else None)

    def task(self, run: str, task: str) -> TaskAnswer:
        with self._open(run) as opened:
            return opened.lists.task(task)


class Readings:
    """Answers about a folder of runs, or one run. Thread-safe.

    Every method raises `NoSuch` for a run, step, group, episode or task that does not exist, and `BadRequest` for
    invalid arguments.
    """

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        """`now`: current time in Unix seconds, for ages and silence."""
        self._root, self._now = root.resolve(), now
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, OpenedRun] = OrderedDict()
        """Runs by id, least recently used first."""
        self._glimpses = Glimpses()
        self.rollouts = RolloutReadings(self._open)

    @property
    def num_opened(self) -> int:
        """Runs in memory; the list of runs needs none."""
        return len(self._opened)

    def runs(self) -> RunsAnswer:
        """Every run, newest first."""
        return RunsAnswer(as_text(self._root), [listed.summary for listed in self.runs_with_metrics()])

    def runs_with_metrics(self) -> list[ListedRun]:
        """Every run with its metrics, newest first."""
        found = [self._at_a_glance(folder) for folder in all_runs(self._root)]
        return sorted(found, key=lambda listed: listed.summary.started_s or 0.0, reverse=True)

    def folder(self, run: str) -> RunFolder:
        """Folder of a run. Raises `NoSuch`."""
        return find_run(self._root, run)

    def run(self, run: str) -> RunAnswer:
        with self._open(run) as opened:
            history, steps = opened.history, opened.rollouts.steps()
            return RunAnswer(
                summary=self._summary(opened),
                folder=as_text(opened.folder.path),
                config=opened.config.text,
                phases=dict(history.phases),
                engines=dict(history.engines),
                num_corrupt=history.num_corrupt + opened.rollouts.num_corrupt,
                num_unknown=history.num_unknown,
                has_groups=bool(history.groups.by_group_id),
                has_spans=history.spans.num_lines > 0,
                steps_written=(steps[0], steps[-1]) if steps else None,
                policies=self._policies(opened.folder),
            )

    def config_values(self, run: str) -> Mapping[str, Any]:
        """Keys of the configuration, such as `train.lr`, with their values."""
        with self._open(run) as opened:
            return opened.config.values

    def series(
        self,
        run: str,
        names: Sequence[str],
        points: int = 1000,
        x: Axis = "step",
        stretch: tuple[float | None, float | None] = (None, None),
    ) -> SeriesAnswer:
        with self._open(run) as opened:
            columns = opened.history.columns
            axis = columns.axis(x)
            return SeriesAnswer(columns.series(names, points, axis, stretch), "step" if axis is None else x)

    def metrics(self, run: str) -> MetricsAnswer:
        with self._open(run) as opened:
            return MetricsAnswer(opened.history.columns.names())

    def alerts(self, run: str) -> AlertsAnswer:
        """Open and closed alerts, and the rules."""
        with self._open(run) as opened:
            alarms = opened.history.alarms
            closed = [alert for alert in alarms.history if alert.until_step is not None]
            rows = [*reversed(open_alerts(opened.history, opened.config, self._now())), *reversed(closed)]
            rules = [
                AlertRule(name, alarms.thresholds.get(name), rule.unit, rule.meaning) for name, rule in RULES.items()
            ]
            return AlertsAnswer(rows, rules)

    def cluster(
        self, run: str, from_s: float | None = None, to_s: float | None = None, width: int = 1000
    ) -> ClusterAnswer:
        """Activity of every worker in a time window, and the state of replicas now."""
        with self._open(run) as opened:
            bound = opened.config.int_of("asynchrony.max_staleness")
            return cluster(opened.history, bound, window(opened.history, from_s, to_s), width)

    def machine(self, run: str, points: int = 500) -> MachineAnswer:
        """Use of processors, memory, GPUs and networks by every worker and node."""
        with self._open(run) as opened:
            opened.machine.look()
            return opened.machine.answer(points)

    def failures(self, run: str) -> FailuresAnswer:
        """Reasons for which episodes of training failed."""
        with self._open(run) as opened:
            return opened.history.failures.answer()

    def ledger(self, run: str) -> LedgerAnswer:
        """Pending groups; for an ended or silent run, as of its last event."""
        with self._open(run) as opened:
            history, now_s = opened.history, self._now()
            is_live = self._summary(opened).status in ("starting", "running")
            return ledger(history.groups, now_s if is_live else history.last_s or now_s)

    def compare(self, runs: Sequence[str]) -> CompareAnswer:
        """Compare several runs."""
        rows, configs = [], []
        for run in runs:
            with self._open(run) as opened:
                rows.append(self._summary(opened))
                configs.append(opened.config)
        return CompareAnswer(rows, differences(configs))

    def change(self, run: str | None = None) -> Change:
        """Current revision of a run; without `run`, of the list of runs."""
        if run is None:
            found = [(folder.id, folder.num_bytes) for folder in all_runs(self._root)]
            return Change(sum(num_bytes for _, num_bytes in found) + len(found), 0, "running")
        with self._open(run) as opened:
            row = self._summary(opened)
            return Change(opened.folder.num_bytes, row.step, row.status)

    def _open(self, run: str) -> OpenedRun:
        """Get the run, to be entered. Raises `NoSuch`."""
        folder = find_run(self._root, run)
        with self._lock:
            opened = self._opened.pop(folder.id, None) or OpenedRun(folder)
            self._opened[folder.id] = opened
            while len(self._opened) > MOST_OPENED:
                self._opened.popitem(last=False)
        return opened

    def _at_a_glance(self, folder: RunFolder) -> ListedRun:
        """Summary and metrics of a run, without opening it if that would take long."""
        glimpse = None if folder.id in self._opened else self._glimpses.of(folder)
        if glimpse is not None:
            row = summary(folder, glimpse.history, glimpse.config, self._now())
            return ListedRun(folder, row, glimpse.history.columns.recent(SUMMARY_STEPS))
        with self._open(folder.id) as opened:
            return ListedRun(folder, self._summary(opened), opened.history.columns.recent(SUMMARY_STEPS))

    def _summary(self, opened: OpenedRun) -> RunSummary:
        """Summary of a run that was entered."""
        own = summary(opened.folder, opened.history, opened.config, self._now())
        policies = self._policies(opened.folder)
        return summary_of_several(own, policies) if policies else own

    def _policies(self, folder: RunFolder) -> list[RunSummary]:
        """Summaries of the policies of a run. A policy is entered after its run, never before, to avoid a deadlock."""
        return [self._at_a_glance(policy).summary for policy in folder.policies]
