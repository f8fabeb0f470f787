"""Catalog of metrics: unit, meaning and other names of every number that a step or an evaluation reports.

The catalog is the page `rlsys/monitoring/metrics.md`: each row of its tables is a metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

NameSet: TypeAlias = Literal["rlsys", "verl", "trl"]

STALENESS_BUCKETS = ("s0", "s1", "s2", "s3", "s4plus")
"""Name of each staleness bucket; the index is the staleness. `sampler/*` is also reported per bucket, e.g. as
`sampler/s1/ess`, and so is the staleness histogram, e.g. as `async/staleness/s1`."""


class Metric(NamedTuple):
    """One metric, for tables, tooltips and trackers."""

    unit: str
    help: str
    verl: str = ""
    """Name of the same metric in verl's trainers; empty if they lack it."""
    trl: str = ""
    """The same for TRL on W&B and TensorBoard, where its trainer adds the prefix `train/`."""

    @property
    def meaning(self) -> str:
        """Meaning with the unit, e.g. `mean entropy of the next-token distribution [nats]`."""
        return f"{self.help} [{self.unit}]" if self.unit else self.help


def _rows() -> Iterator[tuple[str, Metric]]:
    for line in Path(__file__).with_name("metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            cells = (cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            key, unit, meaning, verl, trl = cells
            yield key.strip("`"), Metric(unit, meaning, verl.strip("`"), trl.strip("`"))


METRICS: Mapping[str, Metric] = dict(_rows())
"""Every metric of the framework and its algorithms by its name.

A name in braces is a placeholder: `eval/{dataset}/mean` matches `eval/held_out/mean`.
"""

_PLACE = re.compile(r"\{(\w+)\}")


def _pattern(key: str) -> re.Pattern[str]:
    parts = _PLACE.split(key)
    return re.compile("".join(f"(?P<{part}>.+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


_PATTERNS = {key: _pattern(key) for key in METRICS if "{" in key}


class Named(NamedTuple):
    """Metric name split into its catalog key and labels."""

    key: str
    """Key in `METRICS`, e.g. `eval/{dataset}/pass@{k}`."""
    labels: Mapping[str, str]
    """Values of the placeholders, e.g. `{"dataset": "held_out", "k": "4"}`."""


@lru_cache(maxsize=10_000)  # each row has the same names
def parse_metric(name: str) -> Named | None:
    """Split a name by the catalog; None if the catalog lacks it."""
    if name in METRICS:
        return Named(name, {})
    matches = ((key, pattern.fullmatch(name)) for key, pattern in _PATTERNS.items())
    return next((Named(key, match.groupdict()) for key, match in matches if match), None)


def metric_of(name: str) -> Metric | None:
    """Look up a name, e.g. `reward/by/exact`, in `METRICS`; None if the catalog lacks it."""
    found = parse_metric(name)
    return METRICS[found.key] if found else None


def undocumented_names(names: Iterable[str]) -> list[str]:
    """Names that `METRICS` does not explain, sorted. A run in the tests must have none."""
    return sorted(name for name in set(names) if metric_of(name) is None)


def rename_metrics(values: Mapping[str, float], names: NameSet) -> dict[str, float]:
    """Rename metrics to one set of names; a metric without a name in that set keeps its name."""
    return {alias(name, names, values): value for name, value in values.items()}


def alias(name: str, names: NameSet, values: Mapping[str, float] | None = None) -> str:
    """Name of a metric in one set. `values`: the metrics of the same row, since a name may contain a value."""
    found = parse_metric(name)
    theirs = getattr(METRICS[found.key], names) if found and names != "rlsys" else ""
    if found is None or not theirs:
        return name
    places = dict(found.labels)
    if "{samples}" in theirs:
        count = (values or {}).get(name.replace("/mean", "/samples"))
        if count is None:
            return name
        places["samples"] = f"{count:.0f}"
    return _PLACE.sub(lambda place: places[place[1]], theirs)
