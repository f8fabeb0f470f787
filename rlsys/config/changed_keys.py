"""Keys of a run's configuration whose value is not the default. Imports no code that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rlsys.config.plugins import PluginKind
from rlsys.config.schema import ALGORITHMS, STABILIZERS, WORKFLOWS, Config
from rlsys.errors import ConfigError
from rlsys.util.leaves import leaves

_PLUGINS: Mapping[str, PluginKind[Any]] = {
    "algorithm": ALGORITHMS,
    "stabilizer": STABILIZERS,
    "rollout.workflow": WORKFLOWS,
}


class ChangedKey(NamedTuple):
    """Key with its value and its default; None also for a key without a default."""

    key: str
    value: Any
    default: Any


def changed_keys(values: Mapping[str, Any]) -> list[ChangedKey]:
    """List the keys of a configuration whose value is not the default. `values`: key -> value, e.g. `train.lr`."""
    defaults = dict(leaves(_defaults(Config)))
    for section, kind in _PLUGINS.items():
        type_key = f"{section}.type"
        if (chosen := values.get(type_key)) != defaults[type_key]:
            kept = {
                key: value for key, value in defaults.items() if key == type_key or not key.startswith(f"{section}.")
            }
            defaults = kept | dict(leaves(_of_plugin(kind, chosen), f"{section}."))
    found = (ChangedKey(key, value, defaults.get(key)) for key, value in values.items())
    return [one for one in found if one.value != one.default]


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    """Defaults of a section and its subsections; keys that are required are missing."""
    required = {
        name: _defaults(info.annotation)
        for name, info in section.model_fields.items()
        if info.is_required() and isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }
    return {**required, **section.model_construct().model_dump(mode="json")}


def _of_plugin(kind: PluginKind[Any], name: object) -> dict[str, Any]:
    """Defaults of an installed plug-in; none for one that is not."""
    if str(name) not in kind.entry_points():
        return {}
    try:
        plugin = kind.find(str(name))
    except ConfigError:  # two packages claim the name
        return {}
    made = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(plugin)
        if field.default is not MISSING or field.default_factory is not MISSING
    }
    return to_jsonable_python(made)
