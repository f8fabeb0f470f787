"""The `policies` section: several policies in one run, each as differences from the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError, model_validator

from rlsys.algorithm import Algorithm
from rlsys.config.config_problems import UNKNOWN, Problem, problems_in, refuse
from rlsys.config.eval_section import EvalSection
from rlsys.config.plugins import ALGORITHMS, STABILIZERS
from rlsys.config.server_section import ServerSection
from rlsys.stabilizer import StabilizerPlugin

OWN = ("model", "algorithm", "stabilizer", "resources", "rollout", "train", "critic", "reference")
"""Sections whose keys a policy may override."""
_MAY_BE_NULL = ("stabilizer", "train")
_SHARED = {"rollout": "only `engine` can differ", "resources": "only `actor`, `critic` and `reference` can differ"}
_FREE = {"rollout": {"engine"}, "resources": {"actor", "critic", "reference"}}
"""Keys of these sections that may differ between policies that share their replicas."""
PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
"""Name of a policy, also of its folder in `RUN/policies`."""
Differences = Annotated[
    dict[str, Any], BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)
]


class PolicySection(RootModel[dict[str, Differences | None]]):
    """One of several policies: the keys that differ from the sections of the run, by section."""

    model_config = ConfigDict(frozen=True)

    @property
    def is_frozen(self) -> bool:
        """True if the policy has the weights of its model for the whole run, without training: `train: null`."""
        return "train" in self.root and self.root["train"] is None

    def own(self, section: str) -> dict[str, Any]:
        """Keys of a section that differ."""
        return self.root.get(section) or {}

    def over(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the differences into these sections. Sections that differ become trees; the others are unchanged."""
        own = {name: keys for name, keys in self.root.items() if name != "train" or keys is not None}
        return {**sections, **{name: _merge_over(_tree(sections[name]), keys) for name, keys in own.items()}}

    @model_validator(mode="after")
    def _has_known_sections(self) -> Self:
        refuse(((name,), UNKNOWN) for name in self.root if name not in OWN)
        text = "null is for stabilizer, and for train of a policy that is not trained; leave the section out"
        refuse(((name,), text) for name, keys in self.root.items() if keys is None and name not in _MAY_BE_NULL)
        return self


def problems_of(
    config: type[BaseModel], policies: Mapping[str, PolicySection], sections: Mapping[str, Any]
) -> Iterator[Problem]:
    """Problems of the policies in a run whose other `sections` are valid; `config` is that of a run."""
    trained: dict[str, Algorithm] = {}
    owners: dict[str, str] = {}
    for name, policy in policies.items():
        for section, text in _SHARED.items():
            for key in sorted(policy.own(section).keys() - _FREE[section]):
                yield (name, section, key), f"the policies share their replicas: {text}"
        try:
            whole: Any = config.model_validate(policy.over(sections))
        except ValidationError as error:
            yield from (((name, *location), text) for location, text in problems_in(error))
            continue
        for url in whole.rollout.engine.urls if isinstance(whole.rollout.engine, ServerSection) else ():
            if (owner := owners.setdefault(url, name)) != name:
                yield (name, "rollout"), f"{url} samples for {owner}: give {name} servers of its own"
        if policy.is_frozen:
            for key in sorted(policy.root.keys() - {"train", "model", "rollout"}):
                yield (name, key), "a frozen policy is not trained: only its model and its engine can be set"
        else:
            trained[name] = whole.algorithm
    if policies:
        yield from _problems_together(trained, sections)


def _problems_together(trained: Mapping[str, Algorithm], sections: Mapping[str, Any]) -> Iterator[Problem]:
    if not trained:
        yield (), "all of them are frozen: there is nothing to train"
    sizes = {name: algorithm.group_size for name, algorithm in trained.items()}
    if len({*sizes.values()}) > 1:
        listing = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield (), f"they compare the same episodes, so that algorithm.group_size is the same for all ({listing})"
    for name, algorithm in trained.items():
        if any(column.is_paired for column in algorithm.columns):
            text = "pairs a completion with the prompt of another group, which may be another policy's"
            yield (name, "algorithm"), f"{type(algorithm).__name__} {text}: it trains a run of one policy"
    evaluation, curation = sections["eval"], sections["curation"]
    assert isinstance(evaluation, EvalSection)
    if evaluation.every:
        yield (), "the evaluation lane measures one policy: set eval.every to 0"
    if curation != type(curation)():
        yield (), "all draw the same groups: the section curation is for a run of one policy"


def _tree(section: object) -> dict[str, Any]:
    """A section in the form of a configuration file."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json")
    if isinstance(section, Mapping):  # `resources`
        return {role: _tree(own) for role, own in section.items()}
    if isinstance(section, Algorithm):
        return ALGORITHMS.to_section(section)
    return STABILIZERS.to_section(section) if isinstance(section, StabilizerPlugin) else {}


def _merge_over(tree: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Merge differences into a tree. A change of `type` replaces it, because the keys of the old type do not apply."""
    if own is None:
        return None
    if own.get("type", tree.get("type")) != tree.get("type"):
        return dict(own)
    are_nested = {key for key in own if isinstance(own[key], Mapping) and isinstance(tree.get(key), Mapping)}
    return {**tree, **own, **{key: _merge_over(tree[key], own[key]) for key in are_nested}}
