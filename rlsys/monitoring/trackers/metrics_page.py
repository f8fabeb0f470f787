"""Page of all metrics: `python -m rlsys.monitoring.trackers.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby

from rlsys.monitoring.metric_catalog import METRICS
from rlsys.monitoring.trackers.metric_aliases import TRL, VERL

HEAD = """\
# Metrics

Every number that a run reports, by the name it has in `metrics.jsonl`, on the dashboard and in trackers. What stands
in braces is any text: `eval/{dataset}/mean` is `eval/held_out/mean` for a data set `held_out`. An algorithm of your own
may report others.

With `names: verl` or `names: trl` a tracker calls a metric what those frameworks call it, as far as they report the
same figure; the last two columns say which. `{samples}` is the number of samples per task. In Prometheus `reward/mean`
is `ray_rlsys_reward_mean`: `/` and `@` become `_`, and what stands in braces becomes a label, beside `run` and
`policy`: `ray_rlsys_eval_pass{dataset="held_out", k="4"}`. In MLflow `@` becomes `_at_`.

This page is made from `rlsys/monitoring/metric_catalog.py` and `rlsys/monitoring/trackers/metric_aliases.py` by `python
-m rlsys.monitoring.trackers.metrics_page`.
"""


def page() -> str:
    """The page in Markdown, with a table for each family of metrics."""
    families = groupby(METRICS, lambda key: key.partition("/")[0])
    return "\n".join([HEAD, *(line for family, keys in families for line in _table(family, keys))])


def _table(family: str, keys: Iterator[str]) -> Iterator[str]:
    yield from (f"## {family}", "", "| Metric | Unit | Meaning | verl | TRL |", "| --- | --- | --- | --- | --- |")
    for key in keys:
        metric = METRICS[key]
        cells = (f"`{key}`", metric.unit, metric.help.replace("|", "\\|"), _code(VERL.get(key)), _code(TRL.get(key)))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


if __name__ == "__main__":
    sys.stdout.write(page())
