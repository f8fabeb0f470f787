"""Configuration of a run, and differences between the configurations of runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, TypeAlias

from rlsys.dashboard.index.folders import RunFolder
from rlsys.dashboard.responses import Difference
from rlsys.util.files import CONFIG
from rlsys.util.leaves import leaves
from rlsys.util.regular_files import read_regular

_Tree: TypeAlias = Mapping[str, Any]

_BRIEF = Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxstring, _BRIEF.maxother = 3, 100, 100, 1000, 100

_MOST_BYTES = 2**20
"""Most bytes of a configuration that is shown. One that is too large to be parsed is shown as text alone."""
_SECTION = re.compile(r"^(?=\w+:)", re.MULTILINE)
"""Beginning of a section, in YAML with one key per line as runs write it."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configuration of a run from `config.resolved.yaml` of any version; empty if there is no readable file."""

    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Key -> value, e.g. `train.lr`."""
    thresholds: Mapping[str, float | None] = field(default_factory=dict)
    """Thresholds of alerts."""

    def text_of(self, key: str) -> str:
        """Value as text; empty if the key is missing or null."""
        value = self.values.get(key)
        return "" if value is None else value_text(value)

    def int_of(self, key: str) -> int | None:
        """Value as an integer; None if it is not one."""
        value = self.values.get(key)
        return value if type(value) is int and value.bit_length() < 64 else None


def read_config(folder: RunFolder, sections: Sequence[str] = ()) -> RunConfig:
    """Read the configuration of a run; with `sections`, at least the values of these, which is much faster."""
    path = folder.file(CONFIG)
    try:
        text = read_regular(path, _MOST_BYTES).decode(errors="replace") if path else ""
    except OSError:  # deleted just now, not readable, or too large
        return RunConfig()
    try:
        return _config_of(text, sections)
    except (ValueError, KeyError, RecursionError):  # foreign YAML: an invalid date, `!!bool x`, a recursive mapping
        return RunConfig(text)


def _config_of(text: str, sections: Sequence[str]) -> RunConfig:
    parts = [part for part in _SECTION.split(text) if part.partition(":")[0] in sections]
    tree = _parse_yaml("".join(parts)) or _parse_yaml(text)
    alerts = tree.get("alerts")
    given = alerts.items() if isinstance(alerts, Mapping) else ()
    thresholds = {str(name): value for name, value in given if value is None or isinstance(value, float | int)}
    return RunConfig(text, dict(leaves(tree)), thresholds)


def modification_stamp(folder: RunFolder) -> tuple[int, int]:
    """Modification time in ns and size of the file; they change with the configuration."""
    path = folder.file(CONFIG)
    try:
        found = path.stat() if path else None
    except OSError:  # deleted just now
        found = None
    return (found.st_mtime_ns, found.st_size) if found else (-1, -1)


def differences(configs: Sequence[RunConfig]) -> list[Difference]:
    """Keys whose value differs between these configurations."""
    keys = dict.fromkeys(key for config in configs for key in config.values)
    rows = [Difference(key, [_key_text(config, key) for config in configs]) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def _parse_yaml(text: str) -> _Tree:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    from rlsys.util.bounded_yaml import excess_of, grows_without_bound

    try:
        if excess_of(text) or ("*" in text and grows_without_bound(YAML(typ="safe", pure=True).compose(text))):
            return {}
        tree = YAML(typ="safe").load(text)
    except YAMLError:  # incomplete or foreign; its text is shown anyway
        return {}
    return tree if isinstance(tree, Mapping) else {}


def _key_text(config: RunConfig, key: str) -> str | None:
    return value_text(config.values[key]) if key in config.values else None


def value_text(value: object) -> str:
    """Value as text. Of lists and mappings, a bounded part: aliases of foreign YAML can make them enormous."""
    try:
        return _BRIEF.repr(value) if isinstance(value, Collection) and not isinstance(value, str) else str(value)
    except ValueError:  # foreign YAML: a number of more than 4300 digits
        return "a number too long to show"
