"""Which variants of a test run by day, and which only in `make nightly`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest


def first_by_day(values: Iterable[object], count: int = 1) -> list[object]:
    """Parameters of which `make test` runs the first `count`, and `make nightly` all: `first_by_day(range(10), 3)`.

    A tuple is the values of several parameters.
    """
    given = iter([value if isinstance(value, tuple) else (value,) for value in values])
    by_day = [pytest.param(*value) for value in islice(given, count)]
    return [*by_day, *(pytest.param(*value, marks=pytest.mark.nightly) for value in given)]
