"""Weights that a run takes from an earlier one, and changes of the configuration between two sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.config.loader import tree_in
from rlsys.errors import CheckpointError, ConfigError, ModelError
from rlsys.launch.config_history import path_at
from rlsys.launch.offline_commands import export_once
from rlsys.launch.preflight import with_model_paths
from rlsys.loop.checkpoint_files import newest_local, step_of
from rlsys.util.any_paths import AnyPath, RemotePath
from rlsys.util.files import CONFIG
from rlsys.util.leaves import leaves

OWN = frozenset({"run.name", "run.folder", "run.resume"})
"""Keys that say which run goes on; a change of them is no change of the run."""
SCHEDULE = ("lr", "warmup_steps", "final_lr_fraction", "lr_schedule")
"""Keys under `train` that, with `run.steps`, set the learning rate of a step."""
_MOST_LETTERS = 200
"""Letters of a value in a sentence."""


def with_models_of_runs(config: Config) -> Config:
    """Return the configuration with a model folder in place of each run that it names as a model.

    The folder has the run's newest whole weights. It is written beside their checkpoint, once. A run that is resumed
    keeps the one that it began with, whatever the other run has trained since. Raises `ModelError` for a run without a
    whole checkpoint.
    """
    return with_model_paths(config, lambda key, path: _model_at(path, key, config.run_dir))


def _model_at(path: str, key: str, own_run: Path) -> str:
    """Return the model folder that `path`, the value of `key`, means in the run `own_run`."""
    folder = Path(path).absolute()
    if not (folder / CONFIG).is_file() or (folder / "config.json").exists():
        return path
    if (began := _began_with(own_run, key)) is not None and Path(began).is_relative_to(folder):
        if not Path(began).is_dir():
            raise ModelError(f"{key}: {own_run} began with {began}, which is gone; restore it from a copy")
        return began
    try:
        checkpoint, _ = newest_local(folder)
    except CheckpointError as error:
        raise ModelError(f"{key}: {error}") from error
    if checkpoint is None:
        raise ModelError(f"{key}: the run {path} has no complete checkpoint; let it train, or name a model folder")
    return str(export_once(checkpoint))


def _began_with(run: Path, key: str) -> str | None:
    found = _keys_in(run / CONFIG).get(key)
    return found if isinstance(found, str) else None


def _keys_in(path: Path) -> Mapping[str, Any]:
    """Return the keys of a configuration as they stand there: what they name is not looked at."""
    return dict(leaves(tree_in(path))) if path.is_file() else {}


def changes_since(config: Config, checkpoint: AnyPath) -> list[str]:
    """Say which keys have other values than in the session that saved `checkpoint`, and what that does.

    A plug-in's own keys are compared while its `type` is the same. Raises `ConfigError` for a model whose weights are
    not those the run began with: the policy would go on from the checkpoint, with another reference.
    """
    run = config.run_dir if isinstance(checkpoint, RemotePath) else checkpoint.parent.parent
    before = _keys_in(path_at(run, step_of(checkpoint)))
    after = dict(leaves(config.model_dump(mode="json")))
    changed = [key for key in after if key in before and before[key] != after[key] and key not in OWN]
    if "model.path" in changed:
        _check_is_same_model(config, str(before["model.path"]))
    keys = [f"{key} is {_excerpt(after[key])} (was {_excerpt(before[key])})" for key in changed]
    notes = [f"going on from step {step_of(checkpoint)} with other keys: {', '.join(keys)}"] if keys else []
    return [*notes, *_schedule_notes(config, before, step_of(checkpoint))]


def _check_is_same_model(config: Config, before: str) -> None:
    from workers.model.adapter_files import base_hash

    now = config.model.path
    if Path(before).is_dir() and Path(now).is_dir() and base_hash(before) != base_hash(now):
        raise ConfigError(
            f"model.path: {config.run_dir} began with {before}, and {now} has other weights: the policy would go on "
            f"from its checkpoint, with another reference; give model.path={before}, or another run.name"
        )


def _schedule_notes(config: Config, before: Mapping[str, Any], step: int) -> Iterator[str]:
    from workers.train.optimizer import learning_rate, optimizer_settings

    now = optimizer_settings(config)
    keys = {name: before.get(f"train.{name}", getattr(now, name)) for name in SCHEDULE}
    then = replace(now, **keys, total_steps=before.get("run.steps") or now.total_steps)
    new, old = learning_rate(step, now), learning_rate(step, then)
    if keys == {name: getattr(now, name) for name in SCHEDULE} and abs(new - old) > 1e-9 * max(new, old):
        yield (
            f"run.steps is {now.total_steps} (was {then.total_steps}), which train.lr falls over: step {step + 1} has "
            f"{new:.3g} and would have had {old:.3g}"
        )


def _excerpt(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
