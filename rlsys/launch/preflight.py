"""Lookups and checks before anything expensive starts."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from pathlib import Path
from typing import TypeVar

from rlsys.algorithm import Column
from rlsys.config import Config
from rlsys.config.data_section import SourceSection
from rlsys.config.loader import of_tree, texts_in
from rlsys.config.policy_sections import PolicySection
from rlsys.config.rows_section import RowsSection
from rlsys.data.proposed_tasks import ProposedTasks
from rlsys.data.row_adapters import Columns
from rlsys.data.row_files import Place
from rlsys.data.task_file import load_tasks
from rlsys.data.task_mixture import Source, TaskMixture
from rlsys.data.task_source import Tasks, TaskSource
from rlsys.errors import ConfigError, DataError, ModelError
from rlsys.launch.doctor import ensure_not_shadowed
from rlsys.launch.passed_checks import PassedChecks
from rlsys.launch.prompt_checks import check_prompts, too_long
from rlsys.rewards.reward_function import RewardSum
from rlsys.rewards.verl_sources import ANSWERED, BOXED, GSM8K, is_known
from rlsys.types import Task
from rlsys.util.files import can_be_hub_name

AnyRows = TypeVar("AnyRows", bound=RowsSection)
UNPACKED_JOBS = "/runtime_resources/working_dir_files/"
"""Part of the path of each folder to which Ray unpacks the working directory of a job."""


@dataclass(frozen=True)
class Data:
    """The tasks of a run."""

    train: Tasks
    eval: Mapping[str, Sequence[Task]]
    """Tasks by data set; empty if training has no evaluation."""
    notes: Sequence[str] = ()
    """Notes for the user: how many prompts are left out."""


def check_code(run: Path, config: Path, overrides: Sequence[str] = ()) -> None:
    """Raise `ConfigError` if a configuration in a run folder names code that lies in this folder.

    Such code came with the folder, perhaps from others. Keys among the overrides are the user's own choice.
    """
    chosen = tuple(override.removeprefix("--").partition("=")[0] for override in overrides)
    for key, text in texts_in(config):
        inside = (file for file in _code_files(text) if file.resolve().is_relative_to(run.resolve()))
        if not (chosen and key.startswith(chosen)) and (file := next(inside, None)):
            raise ConfigError(
                f"{config}: {key}: {text} is code in the run folder itself ({file}), and may come from others: "
                "read it and move it elsewhere, or name it in an override, if the command takes overrides"
            )


def _code_files(text: str) -> Iterator[Path]:
    """Existing files and packages that `file.py:name` or `module:name` could mean."""
    place, colon, _ = text.rpartition(":")
    if place.endswith(".py"):
        yield from filter(Path.exists, [Path(place)])
    elif colon and all(part.isidentifier() for part in place.split(".")):
        for root in map(Path, ("", *sys.path)):
            stem = root.joinpath(*place.split("."))
            yield from stem.parent.glob(f"{stem.name}.*")
            yield from filter(Path.is_dir, [stem])


def check_model(config: Config) -> None:
    """Raise `ModelError` for a folder that does not exist, before anything starts. Workers check a hub name, and
    whether an adapter fits.

    Nothing is checked with a remote cluster, which may have other folders than this machine.
    """
    paths = {"model.path": config.model.path}
    if config.critic.path is not None and Column.VALUES in config.algorithm.columns:
        paths["critic.path"] = config.critic.path
    if config.reference.path is not None and config.has_reference:
        paths["reference.path"] = config.reference.path
    lora = config.train.lora
    if lora and lora.path is not None and config.ray_address is None and not Path(lora.path).is_dir():
        raise ModelError(
            f"train.lora.path: there is no folder {lora.path}; give one with an adapter that peft has written"
        )
    for key, path in paths.items():
        if config.ray_address is None and not can_be_hub_name(path) and not Path(path).is_dir():
            raise ModelError(f"{key}: there is no folder {path}; give one, or `org/name` on the hub")


def check_architectures(config: Config) -> None:
    """Raise `ModelError` for a model of a kind that cannot be trained, from its config.json alone: what is known of it,
    and what rows of a small copy compute.

    A folder without that file is passed over: a dry run needs no more than its tokenizer, and workers refuse it.
    """
    from workers.model.model_loading import supported_outline
    from workers.model.row_comparison import compare_rows

    paths = {"model.path": config.model.path}
    if config.critic.path is not None and Column.VALUES in config.algorithm.columns:
        paths["critic.path"] = config.critic.path
    for key, path in paths.items():
        if Path(path, "config.json").is_file() or not Path(path).is_dir():
            outline = supported_outline(path, key, max_context=config.max_context_tokens)
            compare_rows(outline, f"{key} {path!r}")


def check_rows(config: Config) -> None:
    """Raise `ConfigError` unless each sample fits in a row: rows are what memory is planned for."""
    longest, tokens = config.max_context_tokens, config.micro_batch_tokens
    if tokens < longest:
        raise ConfigError(
            f"train.micro_batch_tokens: a sample can have {longest} tokens (rollout.max_context_tokens, or "
            f"data.max_prompt_tokens + rollout.max_new_tokens), and would not fit in a row of {tokens}: set it to "
            f"{longest} or more, or lower "
            "the others"
        )


def look_up(config: Config) -> Data:
    """Look up everything that a run needs before it starts: model folder, tasks, reward functions, workflow.

    Raises the `RlsysError` that the run would end with.
    """
    ensure_not_shadowed()
    for own in [config.of(name) for name in config.policies] or [config]:
        check_model(own)
        check_rows(own)
    parts, sets = training_tasks(config), eval_sets(config) if config.eval.every else {}
    left_out = check_texts(config, parts, sets)
    return Data(stream_of(config, parts, left_out), sets, [*_left_out_lines(config, parts, left_out)])


def check_texts(
    config: Config, parts: Mapping[str, Sequence[Task]], sets: Mapping[str, Sequence[Task]]
) -> frozenset[str]:
    """Check what the models of a run read, unless they are in another cluster. Returns the ids of the tasks that are
    too long to train on.

    Raises the `RlsysError` of what they cannot read, or of a model that cannot be trained.
    """
    if config.ray_address is not None:
        return frozenset()
    found = frozenset[str]()
    for own in [config.of(name) for name in config.policies] or [config]:
        is_trained = not config.policies or own in config.trained_policies.values()
        found |= _check_texts(own, parts, sets, is_trained=is_trained)
    return found


def _check_texts(
    config: Config,
    parts: Mapping[str, Sequence[Task]],
    sets: Mapping[str, Sequence[Task]],
    *,
    is_trained: bool,
) -> frozenset[str]:
    """Check what a model reads, and whether it can be trained, unless that passed before; see `check_texts`."""
    trained = [(key_of(source), tasks) for source, tasks in parts.items()]
    texts = [*trained, *((f"eval.data.{name}", tasks) for name, tasks in sets.items())]
    passed = PassedChecks(config, texts, is_trained=is_trained)
    if (known := passed.too_long) is not None:
        return known
    for key, tasks in texts:
        check_prompts(config, key, tasks)
    if is_trained:
        check_architectures(config)
    found = frozenset(task_id for key, tasks in trained for task_id in too_long(config, key, tasks))
    passed.remember(sorted(found))
    return found


def _left_out_lines(config: Config, parts: Mapping[str, Sequence[Task]], left_out: Collection[str]) -> Iterator[str]:
    for source, tasks in parts.items():
        if num := sum(task.id in left_out for task in tasks):
            yield (
                f"{key_of(source)}: {num} of {len(tasks)} prompts are left out: they have more than "
                f"data.max_prompt_tokens = {config.data.max_prompt_tokens} tokens, or no room for a reply"
            )


def with_steps(config: Config) -> Config:
    """Return the configuration with `run.steps` in place of `run.epochs`, which takes the number of tasks.

    Raises the `RlsysError` of data that cannot be read, or of a configuration that so few steps do not allow.
    """
    if not config.run.epochs:
        return config
    ensure_not_shadowed()
    parts, per_step = training_tasks(config), config.train.groups_per_step
    left_out = check_texts(config, parts, {})
    tasks = sum(task.id not in left_out for own in parts.values() for task in own)
    tree = config.model_dump(mode="json")
    tree["run"] |= {"steps": math.ceil(config.run.epochs * tasks / per_step - 1e-9), "epochs": 0.0}
    return of_tree(Config, tree, f"run.epochs: {config.run.epochs:g} of {tasks} tasks, {per_step} a step")


def training_tasks(config: Config) -> dict[str, Sequence[Task]]:
    """Tasks of each source of data by its name, which is empty if there is one. Reward functions and the workflow are
    checked before anything expensive starts."""
    data, parts = config.data, dict[str, Sequence[Task]]()
    data.check_has_rows()
    for source in data.sources:
        name = source.name
        if source.is_proposed:
            continue
        parts[name] = [replace(task, id=f"{name}/{task.id}") for task in _tasks_of(key_of(name), name, source, config)]
    if isinstance(data.path, str):
        parts[""] = _tasks(key_of(""), data.path, data.columns)
    group_size, distribution = config.algorithm.group_size, config.rollout.distribution
    for source, tasks in parts.items():
        _check_rewards(key_of(source), tasks, config, source)
        config.rollout.workflow.check(tasks, group_size=group_size, distribution=distribution)
    return parts


def key_of(source: str) -> str:
    """Name of a source of data in messages."""
    return f"data.path: {source}" if source else "data.path"


def stream_of(config: Config, parts: Mapping[str, Sequence[Task]], left_out: Collection[str] = ()) -> Tasks:
    """Stream of the tasks of each source in the shares and orders of the configuration, but for those whose ids are
    `left_out`.

    With `data.balance_by`, the tasks with each value of that column are a stream of their own, with an equal part of
    the weight of their source. Raises `DataError` if no task has the column.
    """
    data, seed = config.data, config.run.seed
    if not data.sources and data.balance_by is None:
        return TaskSource(parts[""], seed, shuffle=data.shuffle, left_out=left_out)
    streams: dict[str, Source] = {}
    buckets: dict[str, list[str]] = {}
    """Names of the streams of each source."""
    sources = [SourceSection(path=data.path, name="tasks")] if isinstance(data.path, str) else data.path
    for source in sources:
        if source.is_proposed:
            streams[source.name] = ProposedTasks(source.name, source.system, source.template_kwargs)
            buckets[source.name] = [source.name]
            continue
        tasks = parts[source.name if data.sources else ""]
        is_shuffled = data.shuffle if source.shuffle is None else source.shuffle
        split = {source.name: tasks} if data.balance_by is None else _buckets(tasks, data.balance_by, source.name)
        split = {name: own for name, own in split.items() if any(task.id not in left_out for task in own)}
        streams |= {name: TaskSource(own, seed, shuffle=is_shuffled, left_out=left_out) for name, own in split.items()}
        buckets[source.name] = list(split)
    per_step = config.train.groups_per_step
    stages = data.weights_by_step or {0: {"tasks": 1.0}}
    shares = {
        step: {name: weight / len(buckets[source]) for source, weight in weights.items() for name in buckets[source]}
        for step, weights in stages.items()
    }
    return TaskMixture(streams, {step * per_step: weights for step, weights in shares.items()})


def _buckets(tasks: Sequence[Task], column: str, source: str) -> dict[str, list[Task]]:
    """Tasks by the value of a column, named `SOURCE/VALUE`."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(f"{source}/{task.info.get(column)}", []).append(task)
    if not any(column in task.info for task in tasks):
        known = sorted({name for task in tasks for name in task.info})
        raise DataError(
            f"data.balance_by: no task of {source} has a column {column!r}; there are: {', '.join(known) or 'none'}"
        )
    return found


def eval_sets(config: Config) -> dict[str, Sequence[Task]]:
    """Tasks of every data set of `eval`. Raises `DataError` with every data set that cannot be read."""
    sets: dict[str, Sequence[Task]] = {}
    problems: list[str] = []
    for name, rows in config.eval.data.items():
        try:
            sets[name] = _tasks_of(f"eval.data.{name}", name, rows, config)[: config.eval.limit]
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    for name, tasks in sets.items():
        _check_rewards(f"eval.data.{name}", tasks, config, name)
    return sets


def _tasks_of(key: str, name: str, rows: RowsSection, config: Config) -> list[Task]:
    """Load the tasks of a source or an evaluation called `name`, with what its section says of their conversations."""
    return [
        replace(task, source=name, system=rows.system, template_kwargs={**rows.template_kwargs, **task.template_kwargs})
        for task in _tasks(key, rows.path, config.data.columns if rows.columns is None else rows.columns)
    ]


def _tasks(key: str, path: str, columns: Columns) -> Sequence[Task]:
    """Load the tasks at `path`, the value of `key`. A `DataError` begins with `key`."""
    try:
        return load_tasks(path, columns)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _check_rewards(key: str, tasks: Sequence[Task], config: Config, source: str) -> None:
    """Raise `ConfigError` if a reward function of the source needs a column that some of the tasks lack, or is not the
    rule of their `data_source`."""
    _check_data_sources(key, tasks, config, source)
    rewards = RewardSum(config.reward_functions)
    try:
        rewards.check(reduce(and_, (task.info.keys() for task in tasks)), source)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_data_sources(key: str, tasks: Sequence[Task], config: Config, source: str) -> None:
    """Raise `ConfigError` if `verl` has no rule for a `data_source`, or if it has one and no function is given."""
    names = {str(task.info.get("data_source")) for task in tasks}
    known = sorted(filter(is_known, names))
    if config.algorithm.uses_rewards and config.reward.fn is None and known:
        raise ConfigError(
            f"reward.fn: the rows of {key} have the data_source {known[0]}, and no function is given: set "
            "reward.fn=verl to score them by its rule, or reward.fn=exact if a reply has to equal the answer"
        )
    scores_them = any(spec.fn == "verl" and spec.source in (None, source) for spec in config.reward_functions)
    if scores_them and (unknown := sorted(names - {*known})):
        raise ConfigError(
            f"reward.fn: verl has no rule for the data_source {unknown[0]} of {key}; it has rules for "
            f"{', '.join(sorted(GSM8K | BOXED))}, and names that begin with {' or '.join(ANSWERED)}: give a function "
            "of yours"
        )


def check_is_kept(folder: Path) -> None:
    """Raise `ConfigError` for a relative `run.folder` in the package of a submitted job, which Ray deletes."""
    if UNPACKED_JOBS in str(Path.cwd()) and not folder.is_absolute():
        raise ConfigError(
            f"run.folder: {folder} lies in the folder to which Ray unpacked this job, and Ray deletes that: give an "
            "absolute path that every node sees"
        )


def with_absolute_paths(config: Config) -> Config:
    """Copy of the configuration with absolute paths, because workers run in another folder, and with the text of the
    chat template, so that a resume has the same one."""
    path = config.data.path
    update: dict[str, object] = {
        "run": config.run.model_copy(update={"folder": config.run.folder.absolute()}),
        "reward": config.reward.with_absolute_paths(),
        "rollout": config.rollout.model_copy(update={"chat": config.rollout.chat.with_text()}),
        "data": config.data.model_copy(
            update={"path": _absolute_place(path) if isinstance(path, str) else tuple(map(_with_absolute_rows, path))}
        ),
        "eval": config.eval.model_copy(
            update={"data": {name: _with_absolute_rows(rows) for name, rows in config.eval.data.items()}}
        ),
    }
    config = with_model_paths(config, lambda _, path: _absolute_folder(path))
    if config.train.lora and config.train.lora.path is not None:
        lora = config.train.lora.model_copy(update={"path": _absolute_folder(config.train.lora.path)})
        update["train"] = config.train.model_copy(update={"lora": lora})
    update["policies"] = {name: _with_absolute_adapter(policy) for name, policy in config.policies.items()}
    return config.model_copy(update=update)


def with_model_paths(config: Config, path_of: Callable[[str, str], str]) -> Config:
    """Return the configuration with `path_of(key, path)` in place of the path of each model, `model.path` for one."""
    update: dict[str, object] = {
        name: section.model_copy(update={"path": path_of(f"{name}.path", section.path)})
        for name, section in (("model", config.model), ("critic", config.critic), ("reference", config.reference))
        if section.path is not None
    }
    policies: dict[str, PolicySection] = {}
    for name, policy in config.policies.items():
        own = {part: policy.own(part) for part in ("model", "critic") if policy.own(part).get("path") is not None}
        paths = {part: path_of(f"policies.{name}.{part}.path", keys["path"]) for part, keys in own.items()}
        policies[name] = PolicySection(policy.root | {part: own[part] | {"path": paths[part]} for part in own})
    return config.model_copy(update={**update, "policies": policies})


def _with_absolute_adapter(policy: PolicySection) -> PolicySection:
    train = policy.own("train")
    if not (lora := train.get("lora")) or lora.get("path") is None:
        return policy
    return PolicySection(policy.root | {"train": {**train, "lora": {**lora, "path": _absolute_folder(lora["path"])}}})


def _with_absolute_rows(rows: AnyRows) -> AnyRows:
    is_proposed = isinstance(rows, SourceSection) and rows.is_proposed
    return rows if is_proposed else rows.model_copy(update={"path": _absolute_place(rows.path)})


def _absolute_folder(path: str) -> str:
    """Absolute path of a model folder; a hub name is unchanged."""
    folder = Path(path)
    return str(folder.absolute()) if folder.is_dir() else path


def _absolute_place(path: str) -> str:
    return str(Place.of(path).absolute())


def local_cpus(config: Config, needed: float) -> int:
    """CPUs of a local cluster: those of the machine, or as many as needed. Ray only counts them."""
    return config.ray if isinstance(config.ray, int) else max(os.cpu_count() or 1, math.ceil(needed))
