"""Ranges of the numbers of a configuration, as types for pydantic.

Every number has a range: one without would hang what counts to it, or overflow what waits for it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10_000)]
"""Number of things of which a run makes one after the other, such as processes."""
CountFrom0 = Annotated[int, Field(ge=0, le=10_000)]
ManyFrom1 = Annotated[int, Field(ge=1, le=100_000)]
"""Number of groups, or of episodes of one."""
Seconds = Annotated[float, Field(gt=0, le=1e9)]
SecondsFrom0 = Annotated[float, Field(ge=0, le=1e9)]
