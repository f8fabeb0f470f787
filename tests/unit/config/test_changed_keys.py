"""Which keys of a run's configuration have another value than by default."""

from __future__ import annotations

from typing import Any

from rlsys.config import Config
from rlsys.config.changed_keys import changed_keys
from rlsys.util.leaves import leaves


def changed(**sections: Any) -> dict[str, tuple[Any, Any]]:
    config = Config.model_validate({"run": {"steps": 3}, "model": {"path": "m"}, "data": {"path": "d"}} | sections)
    found = changed_keys(dict(leaves(config.model_dump(mode="json"))))
    return {
        one.key: (one.value, one.default) for one in found if one.key not in ("run.steps", "model.path", "data.path")
    }


def test_a_configuration_of_defaults_has_no_changed_keys() -> None:
    assert changed() == {}


def test_a_changed_key_has_its_value_and_its_default() -> None:
    assert changed(train={"lr": 3e-4}) == {"train.lr": (3e-4, 1e-6)}


def test_another_algorithm_is_compared_with_its_own_defaults() -> None:
    assert changed(algorithm={"type": "ppo", "group_size": 3}) == {
        "algorithm.type": ("ppo", "grpo"),
        "algorithm.group_size": (3, 8),
    }


def test_an_algorithm_that_is_not_installed_is_changed_as_a_whole() -> None:
    found = changed_keys({"algorithm.type": "mine:Mine", "algorithm.size": 4})
    assert {one.key for one in found} == {"algorithm.type", "algorithm.size"}
