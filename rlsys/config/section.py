"""Base of the sections of a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from rlsys.config.config_problems import problems_of_value, refuse


def expand_home(text: str) -> str:
    """Write a path below the home directory out, if it begins with `~`."""
    return os.path.expanduser(text)  # noqa: PTH111  (a `Path` would change hub names and URLs)


PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_home)]
"""Path, or what may be one: a hub name or a URL."""
Folder = Annotated[Path, AfterValidator(Path.expanduser)]


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys, documented by the string below each key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _means_something(cls, given: object, read: ValidatorFunctionWrapHandler) -> object:
        value = read(given)
        refuse(problems_of_value(given, value))
        return value
