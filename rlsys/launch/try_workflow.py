"""Trial of a workflow: play and print one session, with a configuration's model or a scripted policy, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlsys.agents.agent import Policy
from rlsys.agents.session_budget import Said, shown_line
from rlsys.agents.workflow import Session, play
from rlsys.batch.samples import Sample, samples_of
from rlsys.config import Config
from rlsys.config.data_section import NO_ROWS
from rlsys.data.row_adapters import RowProblem, sniff, task_of
from rlsys.errors import ConfigError, DataError
from rlsys.launch.doctor import ensure_not_shadowed
from rlsys.launch.preflight import check_model, training_tasks
from rlsys.rewards.reward_function import RewardInput, RewardSum
from rlsys.types import POLICY, Episode, Json, Score, Task
from rlsys.util.importing import import_object
from rlsys.util.seeds import group_seed

_NONE = "none"
"""Placeholder for a model or data that this command does not read."""


@dataclass(frozen=True)
class ShownSample:
    """Unit of training as text, special tokens included."""

    heading: str
    parts: tuple[tuple[bool, str], ...]
    """Runs of tokens in order: True for what the policy sampled, which is trained, and False for context."""

    @classmethod
    def of(cls, heading: str, sample: Sample, policy: Policy) -> ShownSample:
        """Spell a sample."""
        ids = (*sample.prompt_ids, *sample.completion_ids)
        trained = (*((False,) * len(sample.prompt_ids)), *sample.is_trained)
        runs = groupby(zip(ids, trained, strict=True), key=itemgetter(1))
        return cls(heading, tuple((key, policy.spell([token for token, _ in run])) for key, run in runs))


@dataclass(frozen=True)
class Tried:
    """One session and its result."""

    workflow: str
    task: Task
    episode: Episode
    said: tuple[Said, ...]
    score: Score | None
    """Score of the reward functions, if requested."""
    samples: tuple[ShownSample, ...]
    """What would be trained, in order."""

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: the messages, and the result of each agent."""
        yield f"{self.workflow} on task {self.task.id}"
        yield from map(shown_line, self.said)
        for agent in self._agents():
            of = "" if agent["parent"] is None else f" of #{agent['parent']}"
            policy = "" if agent["policy"] == POLICY else f" ({agent['policy']})"
            reason = f" ({agent['reason']})" if agent["reason"] else ""
            reward = "" if agent["reward"] is None else f", reward {agent['reward']:g}"
            yield (
                f"#{agent['index']} {agent['agent']}{of}{policy}: {agent['outcome']}{reason}, "
                f"turns {agent['turns']}, tokens {agent['tokens']}{reward}"
            )
        if self.score is not None:
            value = self.score.failure if self.score.value is None else f"{self.score.value:g}"
            parts = "".join(f", {name} {part:g}" for name, part in self.score.parts.items())
            yield f"reward: {value}{parts}"

    def as_json(self) -> dict[str, Json]:
        """Session as JSON, with complete texts."""
        messages: list[Json] = [{**asdict(each)} for each in self.said]
        score: Any = None if self.score is None else {**asdict(self.score), "parts": dict(self.score.parts)}
        samples: list[Any] = [asdict(sample) for sample in self.samples]
        return {
            "workflow": self.workflow, "task_id": self.task.id, "said": messages, "agents": [*self._agents()],
            "reward": score, "samples": samples,
        }  # fmt: skip

    def _agents(self) -> Iterator[dict[str, Json]]:
        for index, t in enumerate(self.episode.trajectories):
            yield {
                "index": index, "agent": t.agent, "parent": t.parent, "policy": t.policy, "turns": len(t.turns),
                "tokens": sum(len(turn.output_ids) for turn in t.turns), "outcome": t.outcome.kind.value,
                "reason": t.outcome.reason, "reward": t.reward,
            }  # fmt: skip


def config_to_try(what: Sequence[str], overrides: Sequence[str]) -> Config:
    """Load the configuration in the files `what`, or the default one of the workflow that `what` names.

    Raises `ConfigError`.
    """
    if all(Path(word).suffix in (".yaml", ".yml", ".toml") for word in what):
        return Config.load(what, overrides)
    if len(what) > 1:
        raise ConfigError(f"give configuration files, or one workflow: {', '.join(what)}")
    workflow = f"rollout.workflow={json.dumps(what[0])}"
    return Config.load([], ["run.steps=1", f"model.path={_NONE}", workflow, *overrides])


def try_workflow(
    config: Config, task: str, *, policy: str | None = None, seed: int | None = None, with_reward: bool = False
) -> Tried:
    """Play one session of the configuration's workflow.

    `task` is the index of a row of `data.path` from 0, the id of a row, or a row as JSON. `policy` scripts all replies:
    `scripted:REPLY`, or `module:function`, which receives the text of the session so far; None loads the model. A bug
    in the workflow raises `WorkflowError` with the messages until then. A task that the workflow cannot play raises the
    error of its `check`.
    """
    ensure_not_shadowed()
    row = _task_of(config, task)
    rewards = RewardSum(config.reward_functions) if with_reward else None
    if with_reward and not config.reward_functions:
        raise ConfigError("reward.fn: there is no reward function to judge by")
    seed = group_seed(config.run.seed if seed is None else seed, 0)
    workflow = config.rollout.workflow
    workflow.check([row], group_size=config.algorithm.group_size, distribution=config.rollout.distribution)
    name = type(workflow).__name__
    session, episode, samples = asyncio.run(_play_task(config, row, _policies(config, policy), seed))
    score = None
    if rewards is not None and not episode.trajectories[0].outcome.is_failed:
        (score,) = rewards.score(row, [RewardInput.of(episode)])
    return Tried(name, row, episode, tuple(session.log), score, samples)


async def _play_task(
    config: Config, task: Task, policies: AbstractAsyncContextManager[Mapping[str, Policy]], seed: int
) -> tuple[Session, Episode, tuple[ShownSample, ...]]:
    async with policies as speaking:
        workflow = config.rollout.workflow
        session = workflow.session(task, speaking, seed, 0, config.agents)
        episode = await play(workflow, session, "rlsys workflow try")
        return session, episode, tuple(_shown_samples(episode, speaking))


def _shown_samples(episode: Episode, policies: Mapping[str, Policy]) -> Iterator[ShownSample]:
    for index, trajectory in enumerate(episode.trajectories):
        policy = policies[trajectory.policy]
        stops = f", replies end at {' '.join(policy.stop_texts)}" if policy.stop_texts else ""
        for number, sample in enumerate(samples_of(trajectory), 1):
            yield ShownSample.of(f"#{index} {trajectory.agent}, sample {number}{stops}:", sample, policy)


def _policies(config: Config, script: str | None) -> AbstractAsyncContextManager[Mapping[str, Policy]]:
    if script is not None:
        scripted = _scripted_policy(script, config.rollout.max_new_tokens)
        return nullcontext(dict.fromkeys(config.policies or [POLICY], scripted))
    if config.model.path == _NONE:
        raise ConfigError(
            "there is no model to play: give a configuration file, model.path=FOLDER, or a scripted policy with "
            "--policy scripted:REPLY"
        )
    check_model(config)
    from workers.rollout.local_policies import live_policies

    return live_policies(config)


def _scripted_policy(script: str, max_new_tokens: int) -> Policy:
    from rlsys.testing.scripted_policy import ScriptedPolicy

    where, colon, what = script.partition(":")
    if where == "scripted" and colon:
        return ScriptedPolicy(lambda prompt: what, max_new_tokens)
    remedy = "give scripted:REPLY, or module:function of yours, from text to text"
    try:
        reply = import_object("policy", script)
    except ValueError as error:
        raise ConfigError(f"--policy: {error}; {remedy}") from error
    if not callable(reply):
        raise ConfigError(f"--policy {script}: it is no function; {remedy}")
    return ScriptedPolicy(lambda prompt: str(reply(prompt)), max_new_tokens)


def _task_of(config: Config, text: str) -> Task:
    if text.lstrip().startswith("{"):
        try:
            row = json.loads(text)
            return task_of(row, sniff([row], config.data.columns))
        except (ValueError, RowProblem) as problem:
            raise DataError(f"--task: not a row of data: {problem}") from None
    if config.data.path == NO_ROWS:
        raise DataError(f'--task {text}: there is no data to find it in; give a row, as in \'{{"prompt": "2+3?"}}\'')
    tasks = [task for own in training_tasks(config).values() for task in own]
    named = next((task for task in tasks if task.id == text), None)
    if named is None and text.isdecimal() and int(text) < len(tasks):
        return tasks[int(text)]
    if named is None:
        raise DataError(f"--task {text}: the data has {len(tasks)} tasks, 0 to {len(tasks) - 1}, and no such id")
    return named
