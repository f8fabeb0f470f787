"""The fixture of the engine contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.engines import (
    ALL,
    Kit,
)


@pytest.fixture(scope="session", params=ALL)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    yield request.param
    request.param.end()
