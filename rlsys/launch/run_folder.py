"""The folder of a run: which checkpoint a run starts from, what may be written there, and what is in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import Config
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.config_history import keep_earlier
from rlsys.loop.checkpoint_files import (
    STEP,
    checkpoints_of,
    find_latest,
    local_checkpoint,
    newest_complete,
    newest_first,
    problem_of,
    step_of,
)
from rlsys.monitoring.events import CheckpointSaved
from rlsys.types import PolicyVersion
from rlsys.util.any_paths import AnyPath, RemotePath, any_path
from rlsys.util.bounded_yaml import excess_of
from rlsys.util.files import CONFIG, write_atomically
from rlsys.util.regular_files import lines_of

POLICIES = "policies"
"""Folder in the directory of a run of several policies, with a run directory for each trained policy."""

_STEP = re.compile(rb'"step":(\d{1,15})\b')


@dataclass(frozen=True)
class Start:
    """Beginning of a run: a checkpoint, or the initial model."""

    checkpoint: AnyPath | None
    """None: the initial model."""
    passed_over: Sequence[str] = ()
    """Problem of each newer checkpoint that was passed over for this one."""


def start_of(config: Config) -> Start:
    """Find where to start from, by `run.resume`. A run without steps may start again.

    Raises `ConfigError` if the run exists and is not to be resumed, or goes on from another that has done all of its
    steps, `CheckpointError` if a checkpoint is asked for and
    there is none, or if there are checkpoints and all are damaged.
    """
    resume, run = config.run.resume, config.run_dir
    if resume == "never":
        held = run if holds_run(run) else _newest_at(config) if config.checkpoint.to else None
        if held is not None:
            raise ConfigError(
                f"run.name: {held} holds a run already; choose another run.name, "
                "go on with run.resume=auto, or remove the folder"
            )
        return Start(None)
    own = _newest_of(config)
    if resume == "must" and own.checkpoint is None:
        raise CheckpointError(f"run.resume is must, and {config.checkpoints_at} has no complete checkpoint")
    if resume in ("auto", "must") or own.checkpoint is not None:
        return own
    other = any_path(resume)
    found = (
        _newest_in(other / "checkpoints") if isinstance(other, RemotePath) else _newest_in(checkpoints_of(other), other)
    )
    if found.checkpoint is None:
        raise CheckpointError(f"run.resume: {resume} has no complete checkpoint")
    if (done := step_of(found.checkpoint)) >= config.run.steps:
        raise ConfigError(
            f"run.resume: {resume} has done {done} steps, and run.steps, which counts them too, is {config.run.steps}: "
            f"no step is left; set it to more than {done}"
        )
    return found


def _newest_at(config: Config) -> AnyPath | None:
    """Return the newest checkpoint at `checkpoint.to`. Raises `ConfigError` if it cannot be read."""
    try:
        return next(newest_first(config.checkpoints_at), None)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.to: {error}") from error


def _newest_of(config: Config) -> Start:
    """Find the newest checkpoint of a run: where it writes them, or in its folder, where it may have written earlier
    ones."""
    run, place = config.run_dir, config.checkpoints_at
    has_begun = next(newest_first(place), None) is not None
    return _newest_in(place if has_begun else run / "checkpoints", run)


def _newest_in(checkpoints: AnyPath, run: Path | None = None) -> Start:
    """Find the newest checkpoint, of the run in the folder `run` if that is known."""
    found = Start(*newest_complete(checkpoints))
    if found.checkpoint is None and run is not None and (saved := _saved_steps(run)):
        raise CheckpointError(
            f"{checkpoints} is empty, and {run / 'events.jsonl'} lists a checkpoint of step {saved[-1]}: restore one "
            "from a copy, name the place where they are in checkpoint.to, or start a new run with another run.name"
        )
    return found


def _saved_steps(run: Path) -> list[int]:
    """Steps of all checkpoints that the run completed, by its events, in order."""
    beginning = f'{{"kind":"{CheckpointSaved.kind}"'.encode()
    try:
        lines = (line for line in lines_of(run / "events.jsonl") if line.startswith(beginning))
        return [int(match[1]) for line in lines if (match := _STEP.search(line))]
    except FileNotFoundError:
        return []


def check_run_dir(config: Config) -> None:
    """Raise `ConfigError` if the run directory contains another kind of run: with several policies instead of one, with
    one instead of several, or one policy of a larger run."""
    run = config.run_dir
    remedy = "choose another run.name, or remove the folder"
    if (whole := whole_of(run)) is not None:
        raise ConfigError(f"run.name: {run} is one policy of the run {whole}, which trains all of them: train {whole}")
    if not config.policies and (run / POLICIES).is_dir():
        raise ConfigError(f"run.name: {run} contains a run of several policies, and this run has one; {remedy}")
    if config.policies and holds_run(run):
        raise ConfigError(f"run.name: {run} contains a run of one policy, and this run has several; {remedy}")


def whole_of(run: Path) -> Path | None:
    """Run of several policies that contains this policy; None if this is a separate run."""
    folder = run.absolute().parent
    is_part = folder.name == POLICIES and (folder.parent / CONFIG).is_file()
    return folder.parent if is_part else None


def holds_run(run: Path) -> bool:
    """True if a run of one policy took a step here."""
    metrics = run / "metrics.jsonl"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return has_metrics or find_latest(run / "checkpoints") is not None


def make_run_dir(config: Config) -> None:
    """Create the run directory, for its user alone. Raises `ConfigError` if that fails."""
    try:
        config.run_dir.parent.mkdir(parents=True, exist_ok=True)
        config.run_dir.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {config.run_dir}: {error.strerror or error}") from error


def write_run_dir(config: Config, start: PolicyVersion = 0) -> None:
    """Create the run directory with the full configuration; the run goes on from its own checkpoint of step `start`.

    An earlier configuration that differs is kept for the steps up to it, see `rlsys.launch.config_history`. Raises
    `ConfigError` if the directory cannot be written.
    """
    run, text = config.run_dir, config.to_yaml()
    if excess := excess_of(text):
        raise ConfigError(f"the configuration, with the texts of chat templates, could not be read again: {excess}")
    try:
        make_run_dir(config)
        keep_earlier(run, text, start)
        write_atomically(run / CONFIG, text, is_private=True)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {config.run_dir}: {error.strerror or error}") from error


def check_is_run(run: Path) -> None:
    """Raise `ConfigError` unless this is the directory of a run of one policy, or of one policy of a run."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {CONFIG}")
    if (run / POLICIES).is_dir():
        raise ConfigError(f"{run} is a run of several policies: name the folder of one, {run / POLICIES / 'NAME'}")


def checkpoint_of(run: Path, step: str) -> Path:
    """Folder of a run's complete checkpoint of `step`, a number or `latest`; one at a URL is fetched.

    Raises `ConfigError` for an invalid run or step, `CheckpointError` if there is no such checkpoint.
    """
    check_is_run(run)
    checkpoints = checkpoints_of(run)
    if not (step == "latest" or step.isdecimal()):
        raise ConfigError(f"step {step!r} is neither a number nor `latest`")
    checkpoint = next(newest_first(checkpoints), None) if step == "latest" else checkpoints / STEP.format(int(step))
    if checkpoint is None or not checkpoint.exists():
        raise CheckpointError(f"{run} has no complete checkpoint of step {step}")
    found = local_checkpoint(checkpoint, run)
    if problem := problem_of(found):
        raise CheckpointError(f"{problem}; restore it from a copy, or remove {found} to use an older checkpoint")
    return found
