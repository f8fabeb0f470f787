"""Field types of our algorithms; pydantic checks them, so that all errors are listed at once.

A class with `@dataclass(frozen=True, kw_only=True, config=RULES)`, the decorator of pydantic, raises `ValueError` for
wrong fields wherever it is built: by a configuration, or as `GRPO(clip_low=2)`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field

RULES = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
"""At least 0 and less than 1."""
AtLeastOne = Annotated[float, Field(ge=1)]
AtMostOne = Annotated[float, Field(gt=0, le=1)]
"""More than 0 and at most 1."""

Over: TypeAlias = Literal["tokens", "sequences", "budget", "agents"]
"""Unit that a loss is averaged over: see `rlsys.algorithm.Aggregation`."""
