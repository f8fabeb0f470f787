"""The folder of a run: which checkpoint a run starts from, what may be written there, and what is in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.config import Config
from rlsys.errors import CheckpointError, ConfigError
from rlsys.launch.config_history import keep_earlier
from rlsys.loop.checkpoint_files import STEP, find_latest, newest_complete, newest_first, problem_of, step_of
from rlsys.loop.remote_checkpoints import RemoteCheckpoints
from rlsys.monitoring.events import CheckpointSaved
from rlsys.types import PolicyVersion
from rlsys.util.bounded_yaml import excess_of
from rlsys.util.files import CONFIG, write_atomically
from rlsys.util.regular_files import lines_of

POLICIES = "policies"
"""Folder in the directory of a run of several policies, with a run directory for each trained policy."""
FETCHED = "fetched"
"""Folder in a run directory, with the checkpoint of another run until this run has started from it."""

_STEP = re.compile(rb'"step":(\d{1,15})\b')


@dataclass(frozen=True)
class Start:
    """Beginning of a run: a checkpoint, or the initial model."""

    checkpoint: Path | None
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
        held = str(run) if holds_run(run) else config.copies if config.copies and _copies_in(config.copies) else None
        if held is not None:
            raise ConfigError(
                f"run.name: {held} holds a run already; choose another run.name, "
                "go on with run.resume=auto, or remove the folder"
            )
        return Start(None)
    own = _newest_of(config)
    if resume == "must" and own.checkpoint is None:
        raise CheckpointError(f"run.resume is must, and {run} has no complete checkpoint")
    if resume in ("auto", "must"):
        return own
    is_url = "://" in resume
    if is_url and own.checkpoint is not None:
        return own  # the other need not be fetched again
    other = _fetch(f"{resume.rstrip('/')}/checkpoints", run / FETCHED) if is_url else _newest_in(Path(resume))
    if other.checkpoint is None:
        raise CheckpointError(f"run.resume: {resume} has no complete checkpoint")
    if own.checkpoint is not None:
        return own
    if (done := step_of(other.checkpoint)) >= config.run.steps:
        raise ConfigError(
            f"run.resume: {resume} has done {done} steps, and run.steps, which counts them too, is {config.run.steps}: "
            f"no step is left; set it to more than {done}"
        )
    return other


def may_fetch(config: Config) -> bool:
    """Return True if `start_of` may write a checkpoint into the run directory."""
    return config.copies is not None or "://" in config.run.resume


def _newest_of(config: Config) -> Start:
    """Find the newest whole checkpoint of a run; fetch that of its copies if there is none on this machine."""
    if config.copies is None:
        return _newest_in(config.run_dir)
    try:
        own = _newest_in(config.run_dir)
    except CheckpointError as error:
        fetched = _fetch(config.copies, config.run_dir / "checkpoints")
        if fetched.checkpoint is None:
            raise
        return Start(fetched.checkpoint, [str(error), *fetched.passed_over])
    return _fetch(config.copies, config.run_dir / "checkpoints") if own.checkpoint is None else own


def _fetch(copies: str, into: Path) -> Start:
    return Start(*RemoteCheckpoints(copies).fetch_newest(into))


def _copies_in(url: str) -> bool:
    """Return True if a run has copies at `url`. Raises `ConfigError` if it cannot be read."""
    try:
        return bool(RemoteCheckpoints(url).names())
    except ConfigError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"checkpoint.copy_to: {url} cannot be read: {error!r}") from error


def _newest_in(run: Path) -> Start:
    found = Start(*newest_complete(run / "checkpoints"))
    if found.checkpoint is None and (saved := _saved_steps(run)):
        raise CheckpointError(
            f"{run / 'checkpoints'} is empty, and {run / 'events.jsonl'} lists a checkpoint of step {saved[-1]}: "
            "restore one from a copy, or start a new run with another run.name"
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


def keep_fetched(run: Path, checkpoint: Path | None) -> None:
    """Move `checkpoint`, which the run has started from, to those of the run if it was fetched from another run.

    Deletes what a refused start has fetched.
    """
    if checkpoint is not None and checkpoint.parent == run / FETCHED:
        kept = run / "checkpoints" / checkpoint.name
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(exist_ok=True)
        checkpoint.rename(kept)
    shutil.rmtree(run / FETCHED, ignore_errors=True)


def check_is_run(run: Path) -> None:
    """Raise `ConfigError` unless this is the directory of a run of one policy, or of one policy of a run."""
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not a run directory: it has no {CONFIG}")
    if (run / POLICIES).is_dir():
        raise ConfigError(f"{run} is a run of several policies: name the folder of one, {run / POLICIES / 'NAME'}")


def checkpoint_of(run: Path, step: str) -> Path:
    """Folder of a run's complete checkpoint of `step`, a number or `latest`.

    Raises `ConfigError` for an invalid run or step, `CheckpointError` if there is no such checkpoint.
    """
    check_is_run(run)
    checkpoints = run / "checkpoints"
    if not (step == "latest" or step.isdecimal()):
        raise ConfigError(f"step {step!r} is neither a number nor `latest`")
    checkpoint = next(newest_first(checkpoints), None) if step == "latest" else checkpoints / STEP.format(int(step))
    if checkpoint is None or not checkpoint.is_dir():
        raise CheckpointError(f"{run} has no complete checkpoint of step {step}")
    if problem := problem_of(checkpoint):
        raise CheckpointError(f"{problem}; restore it from a copy, or remove {checkpoint} to use an older checkpoint")
    return checkpoint
