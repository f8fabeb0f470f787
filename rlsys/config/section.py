"""Base of the sections of a configuration."""

from __future__ import annotations

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from rlsys.config.config_problems import problems_of_value, refuse


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys, documented by the string below each key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _means_something(cls, given: object, read: ValidatorFunctionWrapHandler) -> object:
        value = read(given)
        refuse(problems_of_value(given, value))
        return value
