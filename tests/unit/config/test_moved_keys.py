"""Keys that have another name or none: an error names each, with what does the same."""

import re

import pytest

from rlsys.config import Config
from rlsys.config.moved_keys import MOVED
from rlsys.errors import ConfigError

NEEDED = ["run.steps=2", "model.path=m"]


def refusal(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load([], [*NEEDED, *overrides])
    return str(caught.value).splitlines()[1:]


def given(key: str) -> list[str]:
    """Overrides with a key that is in `MOVED`, and no other mistake."""
    section, _, name = key.rpartition(".")
    if section in ("data", "data.path", "data.sources"):
        return [f"{section}=[{{path: a, {name}: 1}}]", *(["data.path=a"] if section == "data.sources" else [])]
    if key == "data.sources":
        return ["data={path: a, sources: [{path: b}]}"]
    return ["data.path=a", f"policies.one.{name}=true" if section == "policies" else f"{key}=1"]


@pytest.mark.parametrize("key", MOVED)
def test_a_moved_key_is_answered_by_name_with_the_remedy(key: str):
    told = "\n".join(refusal(*given(key)))
    assert f"{key.rpartition('.')[2]}: no such key: {MOVED[key]}" in told
    assert "unknown key" not in told


@pytest.mark.parametrize("remedy", sorted({*MOVED.values()}))
def test_a_remedy_names_keys_that_exist(remedy: str):
    for key in re.findall(r"`([a-z]+)\.[a-z_.]+", remedy):
        assert key in Config.model_fields


def test_keys_of_policies_and_of_sections_are_answered_together_with_other_problems():
    told = refusal("data.path=d", "policies={a: {train: {num_gpus: 1}}}", "rollout.kv_cache=keep", "train.lr=-1")
    assert len(told) == 3
    assert "policies.a.train.num_gpus: no such key: set `resources.actor.gpus`" in told[0]
    assert "rollout.kv_cache: no such key: set `rollout.weight_change: inflight_recompute`" in told[1]
    assert "train.lr: input should be greater than 0" in told[2]


def test_a_number_in_place_of_a_section_is_an_unknown_key(tmp_path):
    (tmp_path / "job.yaml").write_text("run: {steps: 5}\n2: 3\n")
    with pytest.raises(ConfigError, match="keys should be strings"):
        Config.load(tmp_path / "job.yaml")
