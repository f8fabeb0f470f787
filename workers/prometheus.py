"""The tracker `prometheus`: metrics as gauges that Ray exports beside its own, on every node's metrics port."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsys.monitoring.events import AlertRaised
from rlsys.monitoring.metric_catalog import METRICS, Named, parse_metric
from rlsys.monitoring.tracker import EndReason, RunFacts, TrackedEpisode, TrackerPlugin

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


@dataclass(frozen=True, kw_only=True)
class Prometheus(TrackerPlugin):
    """Prometheus, through Ray: `reward/mean` is the gauge `ray_rlsys_reward_mean`. Needs a driver on a node of Ray."""

    def start(self, run: RunFacts) -> Gauges:
        return Gauges(run)


class Gauges:
    """One gauge per key of the metric catalog. Labels: the run, the policy, and the values of the braces in the key.

    Counts are gauges too, so a resumed run starts them at zero.
    """

    def __init__(self, run: RunFacts) -> None:
        self._labels = {"run": run.name, "policy": run.policy}
        self._gauges: dict[str, Gauge] = {}
        self._step = run.first_step

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges to these values. An evaluation of an older step does not lower the gauge `step`."""
        self._step = max(self._step, step)
        for name, value in {**values, "step": self._step}.items():
            found = parse_metric(name) or Named(name, {})
            self._gauge(found).set(float(value), {**self._labels, **found.labels})

    def rollouts(self, step: int, rows: Sequence[TrackedEpisode]) -> None:
        """Do nothing: a gauge has no text."""

    def alert(self, alert: AlertRaised) -> None:
        """Do nothing: Prometheus raises its own alerts, see `deploy/prometheus`."""

    def close(self, reason: EndReason) -> None:
        """Do nothing: Ray removes the gauges when the process ends."""

    def _gauge(self, found: Named) -> Gauge:
        from ray.util.metrics import Gauge  # imported here, so that a configuration can be read without Ray

        if found.key not in self._gauges:
            labels = (*self._labels, *found.labels)
            metric = METRICS.get(found.key)
            meaning = metric.meaning if metric else "not in the table of metrics of rlsys"
            self._gauges[found.key] = Gauge(gauge_name(found.key), meaning, labels)
        return self._gauges[found.key]


def gauge_name(key: str) -> str:
    """Gauge name of a catalog key, e.g. `rlsys_eval_pass` for `eval/{dataset}/pass@{k}`. Prometheus shows it with the
    prefix `ray_`."""
    words = re.findall(r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*", re.sub(r"\{\w+\}", "", key))
    return "_".join(["rlsys", *words])
