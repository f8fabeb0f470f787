"""The `policies` section: several policies in one run, each as differences from the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from rlsys.algorithm import Algorithm
from rlsys.config.config_problems import Problem, problems_in
from rlsys.config.plugins import ALGORITHMS, STABILIZERS
from rlsys.config.sections import EvalSection, Section
from rlsys.config.server_section import ServerSection
from rlsys.stabilizer import StabilizerPlugin

OWN = ("model", "algorithm", "stabilizer", "rollout", "train", "critic", "reference")
"""Sections whose keys a policy may override."""
PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
"""Name of a policy, also of its folder in `RUN/policies`."""
Differences = Annotated[
    dict[str, Any], BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)
]


class PolicySection(Section):
    """One of several policies. A key that is not set here has the value of the section of that name."""

    is_frozen: bool = False
    """Use the weights of `model.path` for the whole run, without training."""
    model: Differences = Field(default={})
    """Keys of `model` that differ."""
    algorithm: Differences = Field(default={})
    """Keys of `algorithm` that differ; with another `type`, all of its keys. `group_size` is the same for all."""
    stabilizer: Differences | None = Field(default={})
    """Keys of `stabilizer` that differ; null: none."""
    rollout: Differences = Field(default={})
    """Another `engine`, `{engine: {type: vllm_server, urls: [...]}}`: servers of its own. No other key of `rollout`."""
    train: Differences = Field(default={})
    """Keys of `train` that differ, such as `lr` or `groups_per_step`."""
    critic: Differences = Field(default={})
    """Keys of `critic` that differ."""
    reference: Differences = Field(default={})
    """Keys of `reference` that differ."""

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if key in self.model_fields_set}

    def over(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the differences into these sections. Sections that differ become trees; the others are unchanged."""
        own = {name: getattr(self, name) for name in OWN if name in self.model_fields_set}
        return {**sections, **{name: _laid_over(_tree(sections[name]), own[name]) for name in own}}


def problems_of(
    config: type[BaseModel], policies: Mapping[str, PolicySection], sections: Mapping[str, Any]
) -> Iterator[Problem]:
    """Problems of the policies in a run whose other `sections` are valid; `config` is that of a run."""
    trained: dict[str, Algorithm] = {}
    owners: dict[str, str] = {}
    for name, policy in policies.items():
        for key in sorted(policy.rollout.keys() - {"engine"}):
            yield (name, "rollout", key), "the policies share their replicas: only `engine` can differ"
        try:
            whole: Any = config.model_validate(policy.over(sections))
        except ValidationError as error:
            yield from (((name, *location), text) for location, text in problems_in(error))
            continue
        for url in whole.rollout.engine.urls if isinstance(whole.rollout.engine, ServerSection) else ():
            if (owner := owners.setdefault(url, name)) != name:
                yield (name, "rollout"), f"{url} samples for {owner}: give {name} servers of its own"
        if policy.is_frozen:
            for key in sorted(policy.model_fields_set - {"is_frozen", "model", "rollout"}):
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
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield (), f"they compare the same episodes, so that algorithm.group_size is the same for all ({told})"
    for name, algorithm in trained.items():
        if any(signal.is_paired for signal in algorithm.signals):
            text = "pairs a completion with the prompt of another group, which may be another policy's"
            yield (name, "algorithm"), f"{type(algorithm).__name__} {text}: it trains a run of one policy"
    evaluation, curation = sections["eval"], sections["curation"]
    assert isinstance(evaluation, EvalSection)
    if evaluation.every:
        yield (), "the evaluation lane measures one policy: set eval.every to 0"
    if curation != type(curation)():
        yield (), "all draw the same groups: the section curation is for a run of one policy"


def unbound(agents: Mapping[str, str], policies: Mapping[str, PolicySection]) -> Iterator[Problem]:
    """Agents bound to policies that do not exist."""
    there = f"there are: {', '.join(policies)}" if policies else "name them in the section policies"
    for agent, policy in agents.items():
        if policy not in policies:
            yield (agent,), f"no policy is called {policy}; {there}"


def _tree(section: object) -> dict[str, Any]:
    """A section in the form of a configuration file."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json")
    if isinstance(section, Algorithm):
        return ALGORITHMS.written(section)
    return STABILIZERS.written(section) if isinstance(section, StabilizerPlugin) else {}


def _laid_over(tree: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Merge differences into a tree. A change of `type` replaces it, because the keys of the old type do not apply."""
    if own is None:
        return None
    return dict(own) if own.get("type", tree.get("type")) != tree.get("type") else {**tree, **own}
