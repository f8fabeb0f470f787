"""Base of every section of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys, documented by the string below each key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _name_or_import(value: str) -> str:
    module, colon, name = value.rpartition(":")
    if value.endswith(".py"):
        raise ValueError(f"{value} is a file; say what in it is meant, as in `{value}:name`")
    if not name.isidentifier() or (colon and not module):
        raise PydanticCustomError("spec", "should be the name of a built-in, or `module:name` of yours")
    return value


ImportSpec = Annotated[str, AfterValidator(_name_or_import)]
"""Name of a built-in, or `module:name`."""
