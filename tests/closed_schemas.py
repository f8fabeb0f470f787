"""JSON schemas that know each key of a file: a key that is missing, or that nobody has looked up, is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}


def section(required: Schema, optional: Schema | None = None) -> Schema:
    """A mapping with these keys and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def problems(schema: Schema, value: object) -> list[str]:
    """Messages of all violations, each with its place in the value."""
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)]


def read_yaml(text: str) -> list[Any]:
    """Return the documents of a YAML text."""
    return list(YAML(typ="safe", pure=True).load_all(text))


def read_head(path: Path, num_lines: int = 5) -> str:
    """Return the first lines of a file, where it says what never ran."""
    return "\n".join(path.read_text().splitlines()[:num_lines])
