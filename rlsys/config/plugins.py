"""Plug-in sections: `algorithm`, `stabilizer`, `rollout.workflow`, and the entries of `tracking`. Each has a `type`, a
name or `module:Name`, and the fields of that plug-in's dataclass.

Built-in and third-party plug-ins use the same entry point groups: `rlsys.algorithms`, `rlsys.stabilizers`,
`rlsys.workflows` and `rlsys.trackers`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast

from pydantic import ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from rlsys.agents.workflow import Workflow
from rlsys.algorithm import Algorithm
from rlsys.config.config_problems import nearest, nest_problems, problems_in, problems_of_value, refuse, short_repr
from rlsys.errors import ConfigError
from rlsys.monitoring.tracker import TrackerPlugin
from rlsys.stabilizer import StabilizerPlugin
from rlsys.util.importing import import_object

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class PluginKind(Generic[P]):
    """One kind of plug-in: reads, writes and validates its sections."""

    name: str
    """Name of its section, e.g. `algorithm`; its entry point group is `rlsys.algorithms`."""
    base: type[P]
    default: str | None
    """Default `type` of a section; None: `type` is required."""

    def entry_points(self) -> dict[str, list[EntryPoint]]:
        """Installed entry points by name; several under a name that more than one package defines."""
        by_name: dict[str, dict[str, EntryPoint]] = {}
        for point in _entry_points(f"rlsys.{self.name}s", _search_path()):
            by_name.setdefault(point.name, {}).setdefault(point.value, point)
        return {name: [*points.values()] for name, points in by_name.items()}

    def find(self, name: str) -> type[P]:
        """Load the class of an installed name or a `module:Name`. Raises `ConfigError` with the missing name, or with
        the packages that define it twice."""
        points = self.entry_points()
        if name in points:
            first, *others = points[name]
            if others:
                claims = " and ".join(f"{point.value} of {_package(point)}" for point in (first, *others))
                raise ConfigError(f"the {self.name} {name!r} is {claims}: uninstall one, or name it by `module:Name`")
            return self._import_class(first.value, is_installed=True)
        if ":" in name:
            return self._import_class(name)
        remedy = nearest(name, points, f"installed: {', '.join(points) or 'none'}; or `module:Name`")
        raise ConfigError(f"no {self.name} is named {name!r}; {remedy}")

    def _import_class(self, spec: str, *, is_installed: bool = False) -> type[P]:
        try:
            found = import_object(self.name, spec, is_installed=is_installed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not (isinstance(found, type) and issubclass(found, self.base) and dataclasses.is_dataclass(found)):
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{spec!r} is not a dataclass derived from {base}")
        if undeclared := next(_undeclared_names(found), None):
            raise ConfigError(
                f"{spec!r} has the field {undeclared!r}, but is no dataclass: decorate it with "
                "@dataclass(frozen=True, kw_only=True)"
            )
        return found

    def type_name(self, plugin: type[P]) -> str:
        """Value of `type` for this class: its installed name, else `module:Name`."""
        spec = f"{plugin.__module__}:{plugin.__qualname__}"
        mine = (name for name, points in self.entry_points().items() if [point.value for point in points] == [spec])
        return next(mine, spec)

    def read(self, section: object) -> P:
        """Build the plug-in of a section such as `{"type": "grpo", "clip_high": 0.3}` or `"grpo"`.

        An existing plug-in, as in `Config(algorithm=GRPO())`, is returned unchanged. Raises one pydantic error with
        every problem of the section.
        """
        if isinstance(section, self.base):
            return section
        if isinstance(section, str):
            section = {"type": section}
        if not isinstance(section, Mapping):
            raise nest_problems(
                [((), f"should be a name, or a section with a `type` and its keys (got {short_repr(section)})")]
            )
        fields = {str(key): value for key, value in section.items() if key != "type"}
        chosen = section.get("type", self.default)
        if chosen is None:
            raise nest_problems([(("type",), f"required: {', '.join(self.entry_points())} or `module:Name`")])
        try:
            plugin = adapter(self.find(str(chosen))).validate_python(fields)
        except ConfigError as error:
            raise nest_problems([(("type",), str(error))]) from None
        except ValidationError as error:
            raise nest_problems(problems_in(error)) from None
        odd = (problems_of_value(value, getattr(plugin, key), (key,)) for key, value in fields.items())
        refuse(chain.from_iterable(odd))
        return plugin

    def load_class(self, section: object) -> type[P]:
        """Load the class of a section. Raises `ConfigError` if there is none of its type."""
        if isinstance(section, self.base):
            return type(section)
        name = section.get("type", self.default) if isinstance(section, Mapping) else section
        return self.find(str(name))

    def to_section(self, plugin: P) -> dict[str, Any]:
        """Section that describes this plug-in: its type and every field."""
        fields = adapter(type(plugin)).dump_python(plugin, mode="json")
        return {"type": self.type_name(type(plugin)), **fields}

    def keys(self, section: object) -> list[str]:
        """Keys allowed in this section, or the sections allowed in this list. Raises `ConfigError` for an unknown
        type."""
        if isinstance(section, Sequence) and not isinstance(section, str):
            return list(dict.fromkeys(key for one in section for key in self.keys(one)))
        named = section if isinstance(section, str) else self.default
        chosen = section.get("type", self.default) if isinstance(section, Mapping) else named
        return ["type", *(f.name for f in dataclasses.fields(cast("Any", self.find(str(chosen)))))]

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(self.to_section)
        return core_schema.no_info_plain_validator_function(self.read, serialization=written)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        outside = {
            "description": f"Another {self.name}, by import path.",
            "type": "object",
            "properties": {"type": {"type": "string", "pattern": ":"}},
            "required": ["type"],
        }
        named = {"description": f"A {self.name} by its name or import path, with its defaults.", "type": "string"}
        described = [self._plugin_schema(name, plugin, handler) for name, plugin in self.loading().items()]
        return {"anyOf": [*described, outside, named]}

    def loading(self) -> dict[str, type[P]]:
        """Installed plug-ins that load, by name. A broken package does not hide the others."""
        found: dict[str, type[P]] = {}
        for name in self.entry_points():
            with suppress(ConfigError):  # reported by `rlsys algorithms`, and when a configuration names it
                found[name] = self.find(name)
        return found

    def _plugin_schema(self, name: str, plugin: type[P], handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = deepcopy(handler.resolve_ref_schema(handler(adapter(plugin).core_schema)))
        for base in filter(dataclasses.is_dataclass, plugin.__mro__):  # pydantic ignores docstrings of bases
            for key, field in adapter(base).json_schema().get("properties", {}).items():
                if "description" in field:
                    schema["properties"][key].setdefault("description", field["description"])
        schema["properties"] = {"type": {"const": name}, **schema.get("properties", {})}
        schema["required"] = ["type", *schema.get("required", [])]
        return cast("JsonSchemaValue", schema)


def _undeclared_names(plugin: type[object]) -> Iterator[str]:
    """Annotated names of a plug-in that are not fields, because a class in its inheritance chain is not a dataclass."""
    fields = {field.name for field in dataclasses.fields(cast("Any", plugin))}
    for base in plugin.__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if name not in fields and "ClassVar" not in str(annotation):
                yield name


@lru_cache(maxsize=16)
def _entry_points(group: str, search_path: tuple[tuple[Path, int], ...]) -> list[EntryPoint]:
    """Sorted entry points of a group. A search reads a file of every installed package, so it is repeated only after a
    change of `search_path`."""
    return sorted(entry_points(group=group))


def _search_path() -> tuple[tuple[Path, int], ...]:
    """Folders in which packages are searched for, with the time of the last change of each."""
    found: list[tuple[Path, int]] = []
    for folder in (Path(each).absolute() for each in sys.path):
        with suppress(OSError):  # such a folder has no packages for the search either
            found.append((folder, folder.stat().st_mtime_ns))
    return tuple(found)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "a package without a name"


@cache
def adapter(plugin: type[P]) -> TypeAdapter[P]:
    """Pydantic adapter for the fields of one plug-in; unknown fields are errors."""
    rules = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    return TypeAdapter(with_config(rules)(plugin))


ALGORITHMS = PluginKind("algorithm", Algorithm, "grpo")
STABILIZERS = PluginKind("stabilizer", StabilizerPlugin, "gac")
TRACKERS = PluginKind("tracker", TrackerPlugin, None)
WORKFLOWS = PluginKind("workflow", Workflow, "single_turn")
KINDS: tuple[PluginKind[Any], ...] = (ALGORITHMS, STABILIZERS, TRACKERS, WORKFLOWS)

AlgorithmSection = Annotated[Algorithm, ALGORITHMS]
StabilizerSection = Annotated[StabilizerPlugin, STABILIZERS]
TrackerSection = Annotated[TrackerPlugin, TRACKERS]
WorkflowSection = Annotated[Workflow, WORKFLOWS]
