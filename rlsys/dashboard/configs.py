"""The configuration that a run was started with, and in which keys runs differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlsys.dashboard.folders import CONFIG, RunFolder
from rlsys.dashboard.responses import Difference
from rlsys.util.leaves import leaves

_Tree: TypeAlias = Mapping[str, Any]

_SECTION = re.compile(r"^(?=\w+:)", re.MULTILINE)
"""Where one begins, in YAML of a key to a line as runs write it."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What a run's `config.resolved.yaml` says, of whatever version; nothing if it has none that can be read."""

    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value, e.g. `train.lr`."""
    thresholds: Mapping[str, float | None] = field(default_factory=dict)
    """Of alerts."""

    def text_of(self, key: str) -> str:
        """A value as text; empty if the key is not there or null."""
        value = self.values.get(key)
        return "" if value is None else str(value)

    def int_of(self, key: str) -> int | None:
        """A whole number; None if it is none."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_config(folder: RunFolder, sections: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run; with `sections`, at least the values of these, which takes a fraction of the time."""
    path = folder.file(CONFIG)
    try:
        text = path.read_text(errors="replace") if path else ""
    except OSError:  # deleted a moment ago, or somebody else's
        return RunConfig()
    try:
        return _config_of(text, sections)
    except (ValueError, RecursionError):  # of somebody else: a date that is none, a mapping that holds itself
        return RunConfig(text)


def _config_of(text: str, sections: Sequence[str]) -> RunConfig:
    parts = [part for part in _SECTION.split(text) if part.partition(":")[0] in sections]
    tree = _parsed("".join(parts)) or _parsed(text)
    alerts = tree.get("alerts")
    given = alerts.items() if isinstance(alerts, Mapping) else ()
    thresholds = {str(name): value for name, value in given if value is None or isinstance(value, float | int)}
    return RunConfig(text, dict(leaves(tree)), thresholds)


def changed_at(folder: RunFolder) -> tuple[int, int]:
    """When its file was written, in ns, and its size: another pair, another configuration."""
    path = folder.file(CONFIG)
    try:
        found = path.stat() if path else None
    except OSError:  # deleted a moment ago
        found = None
    return (found.st_mtime_ns, found.st_size) if found else (-1, -1)


def differences(configs: Sequence[RunConfig]) -> list[Difference]:
    """The keys that are not the same in all of them."""
    keys = dict.fromkeys(key for config in configs for key in config.values)
    rows = [Difference(key, [_shown(config, key) for config in configs]) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def _parsed(text: str) -> _Tree:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        tree = YAML(typ="safe").load(text)
    except YAMLError:  # half written, or of somebody else; its text is shown all the same
        return {}
    return tree if isinstance(tree, Mapping) else {}


def _shown(config: RunConfig, key: str) -> str | None:
    return str(config.values[key]) if key in config.values else None
