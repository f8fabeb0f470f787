"""The `algorithm` section: a name or `module:Name`, and the fields of that algorithm's dataclass.

Ours and yours come through one door: entry point group `rlsys.algorithms`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, cast

from pydantic import ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from rlsys.algorithm import Algorithm
from rlsys.config.problems import Location, nested, problems_in
from rlsys.errors import ConfigError

GROUP = "rlsys.algorithms"
DEFAULT = "grpo"


def installed() -> dict[str, EntryPoint]:
    """Every installed algorithm by name, ours and plug-ins'."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def algorithm_class(name: str) -> type[Algorithm]:
    """The class behind an installed name or a `module:Name`. Raises `ConfigError` naming what is missing."""
    points = installed()
    if name in points:
        spec = points[name].value
    elif ":" in name:
        spec = name
    else:
        close = difflib.get_close_matches(name, points, n=1)
        remedy = (
            f"did you mean `{close[0]}`?" if close else f"installed: {', '.join(points) or 'none'}; or `module:Name`"
        )
        raise ConfigError(f"no algorithm is named {name!r}; {remedy}")
    return _imported(spec)


def _imported(spec: str) -> type[Algorithm]:
    module, _, attribute = spec.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"cannot import algorithm {spec!r}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"module {module!r} has no {attribute!r}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"{spec!r} is not a dataclass derived from rlsys.algorithm.Algorithm")
    return found


def type_name(algorithm: type[Algorithm]) -> str:
    """What `type` calls this class: its installed name, else `module:Name`."""
    spec = f"{algorithm.__module__}:{algorithm.__qualname__}"
    return next((name for name, point in installed().items() if point.value == spec), spec)


@cache
def adapter(algorithm: type[Algorithm]) -> TypeAdapter[Algorithm]:
    """Reads the fields of one algorithm, unknown ones refused."""
    rules = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    return TypeAdapter(with_config(rules)(algorithm))


def algorithm_of(section: object) -> Algorithm:
    """The algorithm that a section like `{"type": "grpo", "clip_high": 0.3}` describes.

    An algorithm that exists already is passed through, as `Config(algorithm=GRPO())` hands it in. Raises one pydantic
    error that holds every problem of the section.
    """
    if isinstance(section, Algorithm):
        return section
    if not isinstance(section, Mapping):
        raise nested([((), f"should be a section with a `type` and keys of its own (got {section!r})")])
    fields = {str(key): value for key, value in section.items() if key != "type"}
    try:
        return adapter(algorithm_class(str(section.get("type", DEFAULT)))).validate_python(fields)
    except ConfigError as error:
        raise nested([(("type",), str(error))]) from None
    except ValidationError as error:
        found: list[tuple[Location, str]] = [(p.location, p.text) for p in problems_in(error)]
        raise nested(found) from None


def section_of(algorithm: Algorithm) -> dict[str, Any]:
    """The section that describes this algorithm: its type and every field."""
    fields = adapter(type(algorithm)).dump_python(algorithm, mode="json")
    return {"type": type_name(type(algorithm)), **fields}


class _AlgorithmSchema:
    """Tells pydantic how an `Algorithm` is read, written and described."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(section_of)
        return core_schema.no_info_plain_validator_function(algorithm_of, serialization=written)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [_described(name) for name in installed()] + [_OUTSIDE]}


_OUTSIDE = {
    "description": "An algorithm by import path.",
    "type": "object",
    "properties": {"type": {"type": "string", "pattern": ":"}},
    "required": ["type"],
}


def _described(name: str) -> JsonSchemaValue:
    schema = adapter(algorithm_class(name)).json_schema()
    schema["properties"] = {"type": {"const": name}, **schema.get("properties", {})}
    schema["required"] = ["type", *schema.get("required", [])]
    return cast("JsonSchemaValue", schema)


AlgorithmSection = Annotated[Algorithm, _AlgorithmSchema()]
