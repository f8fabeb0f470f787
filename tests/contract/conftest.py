"""The fixtures of the engine contract, and of the training contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.engines import (
    ALL,
    Kit,
)
from tests.models import save_model, tiny_qwen3
from tests.training import JoinedRanks


@pytest.fixture(scope="session", params=ALL)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    yield request.param
    request.param.end()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model to train."""
    return save_model(tmp_path_factory.mktemp("qwen3"), tiny_qwen3())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedRanks]:
    """Two processes that have joined each other, for all tests of a file: each group of ranks has threads that poll as
    long as its processes live."""
    ranks = JoinedRanks(tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedRanks]:
    """Four processes that have joined each other, for all tests of a file."""
    ranks = JoinedRanks(tmp_path_factory.mktemp("rendezvous_of_four"), 4)
    yield ranks
    ranks.close()
