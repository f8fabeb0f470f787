"""Commands on a run or a model outside training: evaluate, export, replay, inspect data."""

from __future__ import annotations

import asyncio
import json
import os
import pdb
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rlsys.batch.packing import BatchPlan
from rlsys.config import Config
from rlsys.config.chat_section import NO_TEMPLATE, ChatSection
from rlsys.config.loader import load_sections, of_tree, tree_in
from rlsys.config.placement_section import PlacementSection
from rlsys.config.resource_plan import evaluation_roles, needs
from rlsys.data.inspection import Inspection, Rendering, inspect
from rlsys.data.row_adapters import AS_FOUND, Columns
from rlsys.errors import CheckpointError, ConfigError, first_of
from rlsys.launch import preflight, run_folder
from rlsys.launch.config_history import changed_keys, path_at
from rlsys.launch.doctor import ensure_not_shadowed
from rlsys.launch.hub_repo import HubRepo
from rlsys.loop.build_driver import best_of, evaluator_of, shape_of
from rlsys.loop.checkpoint import read_failed, read_state
from rlsys.loop.checkpoint_files import (
    checkpoints_of,
    find_latest,
    hash_files,
    model_problem_of,
    newest_first,
    step_of,
    write_manifest,
)
from rlsys.loop.evaluation import EVALUATIONS, EvalMetrics, Evaluator, Record, recall_scores, result_path
from rlsys.monitoring.events import Events, FileSkipped
from rlsys.monitoring.trackers.console import ConsoleSink
from rlsys.replay.replay_results import ReplayedStep, RetrainedSteps
from rlsys.replay.rollout_json import RolloutRecord
from rlsys.replay.run_history import RecordedSteps
from rlsys.types import Task
from rlsys.util.event_loops import run_to_end
from rlsys.util.files import CONFIG

if TYPE_CHECKING:
    from workers.train.fsdp import FsdpBackend


EXPORTED = ("run", "model", "data", "train")
"""Sections that an export depends on, or that have no default."""
EVAL_FILES = "eval-"
"""Beginning of the names of the workers' files of `evaluate`, because training has workers of the same names."""


def evaluate(
    target: str,
    *,
    config_overrides: Sequence[str] = (),
    data: Mapping[str, str] | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    limit: int | None = None,
) -> dict[str, EvalMetrics]:
    """Evaluate the latest checkpoint of a run directory, or a model (folder or hub name), on every data set.

    A run has its own configuration; a model gets the defaults, and overrides such as `reward.fn=...`. The arguments
    replace the keys of `eval`: `data` maps names to files, and replaces all data sets. The results of a run stay in its
    folder, see `measure_and_keep`, with the logs of the workers. Raises `ConfigError` or `DataError`, before anything
    starts, if there is no data set or one cannot be read.
    """
    ensure_not_shadowed()
    run = Path(target)
    is_run = (run / CONFIG).is_file()
    keys = {"eval.samples": samples, "eval.temperature": temperature, "eval.limit": limit}
    overrides = [*config_overrides, *(_override(key, value) for key, value in keys.items() if value is not None)]
    if data is not None:
        overrides += [_override("eval.data", data)]
    if is_run:
        _check_has_one_policy(run)
        preflight.check_code(run, run / CONFIG, overrides)
        config = Config.load(run / CONFIG, overrides)
    else:
        needed = {"run.steps": 1, "model.path": target}
        config = Config.load([], [*(_override(key, value) for key, value in needed.items()), *overrides])
        _check_target(config)
        preflight.check_model(config)
    return _evaluate_sets(config, run.absolute() if is_run else None, data)


def evaluate_initial(config: Config, data: Mapping[str, str] | None = None) -> dict[str, EvalMetrics]:
    """Evaluate the model that a run of this configuration starts from, on `data` (name to file) or on `eval.data`.

    Raises the errors of `evaluate`.
    """
    ensure_not_shadowed()
    if data is not None:
        sections = config.model_dump(mode="json")
        config = of_tree(Config, {**sections, "eval": {**sections["eval"], "data": dict(data)}}, "the program")
    return _evaluate_sets(config, None, data)


def _evaluate_sets(config: Config, run: Path | None, data: Mapping[str, str] | None) -> dict[str, EvalMetrics]:
    """Evaluate the newest checkpoint of a run, or the model of the configuration, on the sets `data`, or on all."""
    if data is not None:  # the run's own sets are read until here: rewards may name them
        asked = {name: config.eval.data[name] for name in data}
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"data": asked})})
    if not config.eval.data:
        raise ConfigError(
            "eval.data: there is nothing to evaluate on; set it, or give a file: `--data [NAME=]PATH`, in Python `data`"
        )
    config = preflight.with_absolute_paths(config)
    sets = preflight.eval_sets(config)
    checkpoint = run_folder.checkpoint_of(run, "latest") if run else None
    try:
        return run_to_end(lambda: _evaluate(config, checkpoint, sets))
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None


def _check_has_one_policy(run: Path) -> None:
    """Raise `ConfigError` for a run of several policies, or one of them: alone it would play both sides of a game."""
    whole = run if (run / run_folder.POLICIES).is_dir() else run_folder.whole_of(run)
    if whole is not None:
        policy = "NAME" if whole is run else run.name
        raise ConfigError(
            f"{run}: the episodes of the run {whole} need all of its policies, and one is measured at a time; write "
            f"its model with `rlsys export {whole / run_folder.POLICIES / policy} --to FOLDER`, and evaluate FOLDER"
        )


def _check_target(config: Config) -> None:
    """Raise `ConfigError` for a local path that is neither a run nor a model, and so no hub name either."""
    target = config.model.path
    path = Path(target)
    is_local = path.exists() or (config.ray_address is None and "/" in target and path.parent.exists())
    if is_local and not (path / "config.json").is_file():
        raise ConfigError(f"{target} is neither a run directory (it has no {CONFIG}) nor a model folder")


def _override(key: str, value: object) -> str:
    """Format an override; JSON is valid YAML."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


async def _evaluate(
    config: Config, checkpoint: Path | None, sets: Mapping[str, Sequence[Task]]
) -> dict[str, EvalMetrics]:
    from workers.ray import cluster as ray_cluster
    from workers.ray import vitals
    from workers.ray.placement import check_fits, live_nodes
    from workers.worker_set import start_fixed_rollouts, start_recorder, start_rewards

    config = config.model_copy(update={"placement": PlacementSection()})  # nothing else runs beside the replicas
    roles = evaluation_roles(config)
    num_cpus, _ = needs(roles)
    cluster = ray_cluster.connect(config.ray_address, preflight.local_cpus(config, num_cpus))
    run = checkpoint.parent.parent if checkpoint else None
    try:
        async with cluster.watch.during():
            check_fits(roles, live_nodes())
            model_path = config.model.path if checkpoint is None else str(export_once(checkpoint))
            with vitals.of_run(run, EVAL_FILES) if run else nullcontext():
                rollouts, rewards = start_fixed_rollouts(config, model_path), start_rewards(config)
                recorder = start_recorder(config, model_path)
                try:
                    await asyncio.gather(rollouts.ready(), rewards.ready())
                    evaluator = evaluator_of(config, rollouts, rewards, sets, Events([ConsoleSink(total_steps=0)]))
                    record = recorder.write_evaluated if config.record.rollouts_every else None

                    async def measure_dataset(name: str) -> EvalMetrics:
                        if checkpoint is None:
                            return await evaluator.measure(name)
                        return await measure_and_keep(checkpoint, evaluator, name, record)

                    async with asyncio.TaskGroup() as work:
                        measuring = {name: work.create_task(measure_dataset(name)) for name in sets}
                    return {name: done.result() for name, done in measuring.items()}
                finally:
                    recorder.close()
                    await asyncio.gather(rollouts.close(), rewards.close())
    finally:
        cluster.close()


async def measure_and_keep(checkpoint: Path, evaluator: Evaluator, dataset: str, record: Record | None) -> EvalMetrics:
    """Evaluate a checkpoint on one data set; keep the result and, with `record`, the samples in the form of training.

    They get a new folder, the first of `RUN/evaluations/DATASET@1`, `@2`, ... that does not exist. No data set has such
    a name, so no file of training or of another command is replaced, now or later. A file that cannot be written is an
    event. Raises the errors of `Evaluator.measure`.
    """
    step, folder, sampled = step_of(checkpoint), checkpoint.parent.parent / EVALUATIONS, await evaluator.sample(dataset)
    try:
        path = result_path(folder, _new_folder(folder, dataset), step)
    except OSError as error:
        evaluator.events.emit(FileSkipped(str(folder), str(error)))
        return evaluator.metrics_of(dataset, sampled)
    if record is not None:
        await evaluator.record(path.with_suffix(".parquet"), dataset, step, sampled, record)
    measures = evaluator.metrics_of(dataset, sampled)
    evaluator.write(path, dataset, step, measures, {})
    return measures


def _new_folder(folder: Path, dataset: str) -> str:
    """Create the first of `DATASET@1`, `DATASET@2`, ... in `folder` that does not exist; returns its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        try:
            (folder / (name := f"{dataset}@{number}")).mkdir()
        except FileExistsError:
            continue
        return name
    raise AssertionError("unreachable")


def export_once(checkpoint: Path) -> Path:
    """Export a checkpoint of a run as a model folder, once; it is stored with the checkpoint and deleted with it.

    A damaged model folder is written again. Raises `CheckpointError` if it cannot be written.
    """
    run, step = checkpoint.parent.parent, checkpoint.name.removeprefix("step_")

    def make(folder: Path) -> None:
        export(run, folder, step)
        write_manifest(folder, hash_files(folder))

    try:
        if (model := checkpoint / "model").exists() and model_problem_of(model):
            shutil.rmtree(model)
        return make_once(model, make)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint}: cannot write the model folder that is evaluated: {error.strerror or error}; write it "
            f"elsewhere with `rlsys export {run} --to FOLDER --step {step}`, and evaluate that"
        ) from error


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Create `folder` atomically with `make` unless it exists; of concurrent processes, the first one wins.

    Raises `OSError` if the folder can be neither written nor found.
    """
    if folder.is_dir():
        return folder
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as beside:
            make(Path(beside, folder.name))
            Path(beside, folder.name).rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    return folder


def export(run: Path, to: Path, step: str = "latest", *, as_adapter: bool = False) -> Path:
    """Write a checkpoint of a run as a model folder (safetensors, config, tokenizer); returns the folder.

    The adapter of a run with `train.lora` is merged into its base; with `as_adapter` it is written alone, for
    `peft.PeftModel.from_pretrained`. Of the configuration only `EXPORTED` is read, and no code that it names is
    imported. `step` is a number, `latest`, or `best`: the checkpoint with the best value of `checkpoint.best_by`.
    Raises `CheckpointError` if the run has no such complete checkpoint, `ConfigError` if it has no adapter.
    """
    step = _best_step(run) if step == "best" else step
    checkpoint = run_folder.checkpoint_of(run, step)
    from workers.worker_set import export_checkpoint

    config = load_sections(Config, run / CONFIG, EXPORTED, ["stabilizer=null"])  # the default one needs longer runs
    if as_adapter and config.train.lora is None:
        raise ConfigError(
            f"{run} trained all weights (train.lora is null) and has no adapter: leave --adapter, `as_adapter`, out"
        )
    template = template_of_run(run / CONFIG)
    export_checkpoint(config, checkpoint / "actor", to, as_adapter=as_adapter)
    if template is not None:
        (to / "chat_template.jinja").write_text(template, encoding="utf-8")
    return to


def push(run: Path, name: str, step: str = "latest", *, as_adapter: bool = False, is_public: bool = False) -> str:
    """Export a checkpoint of a run as `export` does, and upload it to `org/name` on the Hugging Face Hub; returns the
    URL.

    The repository is private unless `is_public`; one that exists gets another commit. The folder that is uploaded,
    `RUN/exports/step_N`, stays. Raises the errors of `export` and of `HubRepo`; those of the name and the token before
    anything is written.
    """
    checkpoint = run_folder.checkpoint_of(run, _best_step(run) if step == "best" else step)
    folder = run / "exports" / f"{checkpoint.name}{'-adapter' * as_adapter}"
    number = step_of(checkpoint)
    repo = HubRepo.open(name, is_public=is_public)
    shutil.rmtree(folder, ignore_errors=True)  # all files of the folder are uploaded
    export(run, folder, str(number), as_adapter=as_adapter)
    return repo.upload(folder, f"Step {number} of {run.resolve().name}")


def template_of_run(config: Path) -> str | None:
    """Chat template that the run with this configuration had in place of the tokenizer's, if any: others use it too.

    Raises `ConfigError` for a section that no run writes, and for one that names a file, where that of a run has the
    text: the configuration was changed, and the file may be private.
    """
    rollout = tree_in(config).get("rollout")
    section = rollout.get("chat") if isinstance(rollout, dict) else None
    chat = of_tree(ChatSection, section if isinstance(section, dict) else {}, f"{config}: rollout.chat")
    if chat.template is None or chat.template == NO_TEMPLATE:
        return None
    if "{" not in chat.template:
        raise ConfigError(
            f"rollout.chat.template: {config} names the file {chat.template}, which an export does not read: "
            "put the text of the template in its place"
        )
    return chat.template


def _best_step(run: Path) -> str:
    """Step of the checkpoint of a run with the best value of `checkpoint.best_by`.

    Raises `ConfigError` if the run compares no checkpoints, `CheckpointError` if none of them has a value.
    """
    run_folder.check_is_run(run)
    checkpoints = checkpoints_of(run)
    config = load_sections(Config, run / CONFIG, (*EXPORTED, "eval", "checkpoint"), ["stabilizer=null"])
    if not config.checkpoint.keep_best:
        raise ConfigError(f"{run} has no best checkpoint (checkpoint.keep_best is 0): give a number, or latest")
    if (latest := find_latest(checkpoints)) is None:
        raise CheckpointError(f"{run} has no complete checkpoint")
    best, steps = best_of(config), [step_of(checkpoint) for checkpoint in newest_first(checkpoints)]
    recall_scores(run / EVALUATIONS, read_state(latest), steps, best)
    if not (ranked := best.rank_steps(steps)):
        raise CheckpointError(f"no checkpoint of {run} has a value of {best.metric} yet: give a number, or latest")
    return str(ranked[-1])


def replay(folder: Path) -> ReplayedStep:
    """Compute the failed step in `RUN/failed/step_N` again, sample by sample, in this process and without Ray.

    Configuration and weights are those of the failure; columns of other workers are computed again. Use only folders
    that you trust: the code which the configuration names is imported. Raises `DataError` or `ConfigError` if the
    folder is not a failed step, `CheckpointError` or `ModelError` if a checkpoint or model does not load.
    """
    failed = read_failed(folder)
    ensure_not_shadowed()
    preflight.check_code(folder.parent.parent if folder.parent.name == "failed" else folder, folder / CONFIG)
    config = Config.load(folder / CONFIG)
    preflight.check_model(config)
    from workers.replay.step_replay import replay as compute

    return compute(config, folder, failed)


def replay_step(run: Path, step: int, *, debug: bool = False) -> RetrainedSteps:
    """Train step `step` of a run again, without Ray, and compare weights and metrics with the recorded ones.

    Training begins from the newest checkpoint older than the step, or from the initial model, and first repeats the
    steps in between. All steps use the configuration of `step`. `debug` opens the debugger right before `step` is
    trained; it needs a run of one rank. Use only folders that you trust, as with `replay`.

    Raises `ConfigError` for an invalid run, `DataError` if records are missing, `CheckpointError` or `ModelError` if a
    checkpoint or model does not load.
    """
    run_folder.check_is_run(run)
    recording = RecordedSteps.of(run, step)
    ensure_not_shadowed()
    for path in dict.fromkeys(path_at(run, each) for each in (*recording.steps, step)):
        preflight.check_code(run, path)
    config, changed = Config.load(path_at(run, step)), changed_keys(run, recording.steps)
    preflight.check_model(config)
    if debug and (num_ranks := config.train.mesh.num_ranks) > 1:
        raise ConfigError(f"--debug: {run} was trained on {num_ranks} ranks, and a debugger sees one process")
    from workers.replay.step_replay import retrain

    found = retrain(config, shape_of(config), recording, stop_here if debug else None)
    return replace(found, changed=changed)


def stop_here(step: int, plan: BatchPlan, groups: Sequence[RolloutRecord], backend: FsdpBackend) -> None:
    """Open the debugger; its command `c` continues and trains `step`.

    `plan` assigns samples to micro-batches, `groups` are the rollout records, `backend` is the policy.
    """
    pdb.set_trace()  # not `breakpoint`: Ray replaces it once it was started


def inspect_data(
    path: str | os.PathLike[str],
    *,
    columns: Columns = AS_FOUND,
    model: str | None = None,
    max_prompt_tokens: int | None = None,
    chat: ChatSection | None = None,
) -> Inspection:
    """Inspect a data file; with `model` (folder or hub name), through that model's tokenizer and chat template, or as
    `chat` changes it.

    Starts no workers, and needs no network for files. Raises `DataError` where a run would, `ModelError` for a model
    without a tokenizer.
    """
    if model is None:
        return inspect(path, columns)
    ensure_not_shadowed()
    from workers.text.tokenizer import TextTokenizer

    codec = TextTokenizer.load(model, (chat or ChatSection()).with_text())
    rendering = Rendering(codec.encode_task, codec.encode, codec.extend, codec.spell, codec.template, codec.stop_texts)
    return inspect(path, columns, rendering, max_prompt_tokens)
