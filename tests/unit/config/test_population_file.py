"""The file of a population, and what is refused in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.loader import load
from rlsys.config.population_file import PopulationFile
from rlsys.errors import ConfigError

EXAMPLE = Path("examples/sort/population.yaml")


def test_the_example_is_valid():
    assert set(load(PopulationFile, [EXAMPLE], []).keys) == {"train.lr"}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("keys={run.steps: {low: 1, high: 2}}", "run.steps cannot change in a run; search train.lr"),
        ("keys={algorithm.group_size: {low: 1, high: 2}}", "algorithm.group_size cannot change in a run"),
        ("keys={train.lr: {low: 2, high: 1}}", "low, 2, is above high, 1"),
        ("keys={train.lr: {low: 0, high: 1}}", "keys.train.lr.low"),
        ("members=1", "members"),
        ("share=0.7", "share"),
        ("serch=pbt", "search"),
    ],
)
def test_what_cannot_be_searched_is_refused(override, told):
    with pytest.raises(ConfigError) as refused:
        load(PopulationFile, [EXAMPLE], [override])
    assert told in str(refused.value)
