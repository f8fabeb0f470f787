"""Rules that read several sections of a configuration. A rule of one section is in the class of that section.

A parameter of a rule has the name of the section it reads, and a problem has the location of the key to change. A rule
is checked once all of its sections are valid, so an invalid one hides no problem between the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

from rlsys.algorithm import REFERENCE_COLUMNS, Algorithm, Column, version_after
from rlsys.config.config_problems import Problem, nearest
from rlsys.config.curation_section import CurationSection
from rlsys.config.data_section import DataSection
from rlsys.config.eval_section import EvalSection
from rlsys.config.placement_section import PlacementSection
from rlsys.config.policy_sections import PolicySection
from rlsys.config.reward_section import RewardSection
from rlsys.config.rollout_section import RolloutSection
from rlsys.config.run_sections import AsynchronySection, CheckpointSection, Resources, RunSection
from rlsys.config.server_section import ServerSection
from rlsys.config.train_section import ReferenceSection, TrainSection
from rlsys.stabilizer import StabilizerPlugin
from rlsys.types import Answers

_WRONG_ORIGIN: Mapping[Answers, str] = {
    "recorded": "its answers are recorded, and {} needs answers that the policy sampled: its loss compares with the "
    "sampler's probabilities; set algorithm.type to kto or sft",
    "sampled": "its answers are sampled, and {} would teach the policy what it does already: set "
    "algorithm.reward_above to train on the best, or take the workflow demonstrations or offline",
}

MOST_PASSES = 100
MOST_GROUPS = 1_000_000
"""Most groups in flight: each has a task of the driver's event loop."""


def _signals_are_made(algorithm: Algorithm) -> Iterator[Problem]:
    if unknown := sorted(str(signal) for signal in algorithm.columns if not isinstance(signal, Column)):
        asked, known = ", ".join(unknown), ", ".join(Column)
        text = f"{_name(algorithm)} asks for {asked}, which no worker makes; columns are {known}"
        yield ("algorithm",), text


def _passes_are_few(algorithm: Algorithm) -> Iterator[Problem]:
    if not 1 <= algorithm.passes <= MOST_PASSES:
        yield ("algorithm", "passes"), f"should be from 1 to {MOST_PASSES} (got {algorithm.passes})"


def _policy_is_trained(run: RunSection, algorithm: Algorithm) -> Iterator[Problem]:
    if run.steps and not any(map(algorithm.trains_policy, range(run.steps))):
        text = f"trains the policy in none of the {run.steps} steps (run.steps): its warm-up is longer"
        yield ("algorithm",), f"{_name(algorithm)} {text}"


def _stabilizer_begins(run: RunSection, algorithm: Algorithm, stabilizer: StabilizerPlugin | None) -> Iterator[Problem]:
    needed = stabilizer.synchronous_steps if stabilizer else 0
    if needed and run.steps and version_after(algorithm, needed, start=0, end=run.steps) >= run.steps:
        text = (
            f"{type(stabilizer).__name__} needs {needed} synchronous steps that train the policy before it does "
            f"anything, and the run ends first (run.steps is {run.steps}): make the run longer, or let it need fewer"
        )
        yield ("stabilizer",), text


def _replies_fit(data: DataSection, rollout: RolloutSection) -> Iterator[Problem]:
    longest = data.max_prompt_tokens
    if rollout.max_context_tokens is not None and rollout.max_context_tokens <= longest:
        text = f"should be more than data.max_prompt_tokens ({longest}): a reply comes after the prompt"
        yield ("rollout", "max_context_tokens"), text


def _answers_suit(algorithm: Algorithm, rollout: RolloutSection) -> Iterator[Problem]:
    if (answers := rollout.workflow.answers) not in algorithm.answers:
        yield ("rollout", "workflow"), _WRONG_ORIGIN[answers].format(_name(algorithm))


def _early_ends_suit(algorithm: Algorithm, rollout: RolloutSection) -> Iterator[Problem]:
    if rollout.early_ends and not algorithm.allows_early_ends:
        text = f"{_name(algorithm)} needs all episodes of a group; take an algorithm such as grpo, or false"
        yield ("rollout", "early_ends"), text


def _early_ends_have_rewards(rollout: RolloutSection, reward: RewardSection) -> Iterator[Problem]:
    if rollout.early_ends and reward.model is not None:
        yield ("rollout", "early_ends"), "a replica has no reward model: set this to false, or leave out the model"


def _gpus_suit_engine(resources: Resources, rollout: RolloutSection) -> Iterator[Problem]:
    gpus, shards = resources["rollout"].num_gpus, rollout.tensor_parallel
    if isinstance(rollout.engine, ServerSection):
        if gpus:
            yield ("resources", "rollout", "gpus"), "the server has the GPUs: set 0"
    elif shards > 1 and 0 < gpus < shards:
        text = f"should be {shards}, one for each shard (rollout.tensor_parallel)"
        yield ("resources", "rollout", "gpus"), text


def _devices_can_be_shared(
    placement: PlacementSection,
    resources: Resources,
    rollout: RolloutSection,
    train: TrainSection,
    eval: EvalSection,  # noqa: A002
    policies: Mapping[str, PolicySection],
) -> Iterator[Problem]:
    roles, num_ranks = placement.together, train.mesh.num_ranks
    if not roles:
        return
    here = ("placement", "together")
    if missing := [role for role in ("actor", "rollout") if role not in roles]:
        yield here, f"should have {' and '.join(missing)} too: sampling and training take turns"
    if policies:
        yield here, "several policies cannot share devices: leave this out"
    if isinstance(rollout.engine, ServerSection):
        yield here, "a vLLM server keeps its devices: leave this out, or let rlsys start the engines"
    if rollout.tensor_parallel > 1:
        yield (
            ("rollout", "tensor_parallel"),
            "should be 1 with placement.together: a replica shares the device of one rank",
        )
    on_gpus = [role for role in roles if resources[role].num_gpus]
    for role in roles if on_gpus else ():
        if resources[role].num_gpus != 1:
            text = f"should be 1, as placement.together has it share a whole device with {on_gpus[0]}"
            yield ("resources", role, "gpus"), text
    for role in roles:
        if resources[role].labels != resources[roles[0]].labels:
            yield ("resources", role, "labels"), f"should be those of {roles[0]}, whose nodes it shares"
    counts = {"rollout": rollout.replicas, **({"eval": eval.replicas} if eval.every else {})}
    for section, count in counts.items():
        if on_gpus and count > num_ranks:
            text = f"should be at most {num_ranks}, one on the device of each rank (placement.together)"
            yield (section, "replicas"), text


def _versions_have_room(rollout: RolloutSection, train: TrainSection) -> Iterator[Problem]:
    if rollout.weight_change == "beside" and train.lora is None and _is_vllm(rollout):
        text = (
            "should be set: with rollout.weight_change beside, vLLM keeps several adapters, and one version of "
            "whole weights; or set rollout.engine to local"
        )
        yield ("train", "lora"), text


def _reference_follows_whole_weights(reference: ReferenceSection, train: TrainSection) -> Iterator[Problem]:
    if reference.sync is not None and train.lora is not None:
        text = "should be null with train.lora: averages of adapters do not average their effects"
        yield ("reference", "sync"), text


def _reference_is_asked_for(reference: ReferenceSection, algorithm: Algorithm) -> Iterator[Problem]:
    if reference.sync is not None and not algorithm.columns & REFERENCE_COLUMNS:
        yield (
            ("reference", "sync"),
            f"{_name(algorithm)} asks for no reference: leave this out, or set algorithm.kl_coef",
        )


def _server_takes_what_is_trained(rollout: RolloutSection, train: TrainSection) -> Iterator[Problem]:
    if isinstance(rollout.engine, ServerSection):
        text = "a vLLM server takes whole weights, and tells nothing about experts: set this to "
        if train.lora is not None:
            yield ("train", "lora"), text + "null"
        if train.routing_replay:
            yield ("train", "routing_replay"), text + "false"


def _experts_are_recorded(resources: Resources, rollout: RolloutSection, train: TrainSection) -> Iterator[Problem]:
    if train.routing_replay and not resources["rollout"].num_gpus and _is_vllm(rollout):
        text = "vllm records no experts on a CPU: set rollout.engine to local, or resources.rollout.gpus"
        yield ("train", "routing_replay"), text


def _sources_have_names(
    data: DataSection,
    eval: EvalSection,  # noqa: A002
    reward: RewardSection,
) -> Iterator[Problem]:
    names = [*(source.name for source in data.sources), *eval.data]
    there = f"there are: {', '.join(names)}" if names else "data.path has one source, whose rewards name none"
    for index, item in enumerate(reward.items):
        if item.source is not None and item.source not in names:
            hint = nearest(item.source, names, there)
            text = f"no source of data or evaluation is called {item.source!r}; {hint}"
            yield ("reward", "fn", index, "source"), text


def _staleness_is_safe(algorithm: Algorithm, train: TrainSection, asynchrony: AsynchronySection) -> Iterator[Problem]:
    bound, staleness = algorithm.max_safe_staleness, asynchrony.bound(train.groups_per_step)
    if bound is not None and staleness > bound:
        text = (
            f"{staleness} is more than {_name(algorithm)} is safe for ({bound}): its loss does not correct for older "
            f"tokens; set it to {bound} or less, or choose an algorithm that corrects for them"
        )
        yield ("asynchrony", "max_staleness"), text


def _groups_have_room(train: TrainSection, asynchrony: AsynchronySection) -> Iterator[Problem]:
    num_groups = train.groups_per_step * (asynchrony.max_staleness + 1)
    if num_groups > MOST_GROUPS:
        text = f"with train.groups_per_step {train.groups_per_step}, {num_groups:,} groups may be in flight at once"
        yield ("asynchrony", "max_staleness"), f"{text}, and the driver has room for {MOST_GROUPS:,}: lower either"


def _curation_suits(
    algorithm: Algorithm, asynchrony: AsynchronySection, curation: CurationSection
) -> Iterator[Problem]:
    for key, text in curation.problems(algorithm, asynchrony.max_staleness):
        yield ("curation", *key), text


def _successes_are_put_in(reward: RewardSection, curation: CurationSection) -> Iterator[Problem]:
    if curation.stored_successes and not reward.workers:
        text = "a reward worker puts them into groups: set reward.workers to 1 or more"
        yield ("curation", "stored_successes"), text


def _sources_are_weighed(data: DataSection, curation: CurationSection) -> Iterator[Problem]:
    if curation.follows_reward_std and not data.sources:
        text = "there is one source of data: name several in data, or set fixed"
        yield ("curation", "source_weights"), text


def _replicas_have_servers(rollout: RolloutSection, eval: EvalSection) -> Iterator[Problem]:  # noqa: A002
    if eval.every and isinstance(rollout.engine, ServerSection):
        count, needed = len(rollout.engine.urls), rollout.replicas + eval.replicas
        if rollout.replicas <= count < needed:
            text = f"each replica needs its own server: give {needed} in rollout.engine.urls, not {count}"
            yield ("eval", "replicas"), text


def _best_is_measured(eval: EvalSection, checkpoint: CheckpointSection) -> Iterator[Problem]:  # noqa: A002
    for key, text in checkpoint.problems(eval):
        yield ("checkpoint", *key), text


def _agents_are_bound(policies: Mapping[str, PolicySection], agents: Mapping[str, str]) -> Iterator[Problem]:
    there = f"there are: {', '.join(policies)}" if policies else "name them in the section policies"
    for agent, policy in agents.items():
        if policy not in policies:
            yield ("agents", agent), f"no policy is called {policy}; {there}"


_RULES: Sequence[Callable[..., Iterator[Problem]]] = (
    _signals_are_made, _passes_are_few, _policy_is_trained, _stabilizer_begins, _replies_fit, _answers_suit,
    _early_ends_suit, _early_ends_have_rewards, _gpus_suit_engine, _devices_can_be_shared, _versions_have_room,
    _server_takes_what_is_trained, _reference_follows_whole_weights, _reference_is_asked_for, _experts_are_recorded,
    _sources_have_names, _staleness_is_safe, _groups_have_room, _curation_suits, _successes_are_put_in,
    _sources_are_weighed, _replicas_have_servers, _best_is_measured, _agents_are_bound,
)  # fmt: skip
_READ = {rule: signature(rule).parameters.keys() for rule in _RULES}
"""Sections that each rule reads."""


def broken_rules(sections: Mapping[str, Any], newest: str) -> Iterator[Problem]:
    """Problems between valid sections, of the rules that read the `newest` of them."""
    for rule, names in _READ.items():
        if newest in names and names <= sections.keys():
            yield from rule(**{name: sections[name] for name in names})


def _name(algorithm: Algorithm) -> str:
    return type(algorithm).__name__


def _is_vllm(rollout: RolloutSection) -> bool:
    return rollout.engine == "vllm" or rollout.tensor_parallel > 1
