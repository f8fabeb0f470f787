"""Commands that compute again: a step with non-finite numbers, and recorded steps of a run."""

from __future__ import annotations

import pdb
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsys.batch.packing import BatchPlan
from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.launch.config_history import changed_keys, path_at
from rlsys.launch.preflight import check_is_run, check_model, prepare_imports
from rlsys.loop.build_driver import shape_of
from rlsys.loop.checkpoint import CONFIG, read_failed
from rlsys.replay.non_finite import ReplayedStep
from rlsys.replay.rollout_log import RolloutRecord
from rlsys.replay.run_history import RecordedSteps
from rlsys.replay.step_comparison import RetrainedSteps

if TYPE_CHECKING:
    from workers.train.backend import TrainBackend


def replay(folder: Path) -> ReplayedStep:
    """Compute the failed step in `RUN/failed/step_N` again, sample by sample, in this process and without Ray.

    Configuration and weights are those of the failure; columns of other workers are computed again. Use only trusted
    folders: torch's checkpoint reader unpickles training state. Raises `DataError` or `ConfigError` if the folder is
    not a failed step, `CheckpointError` or `ModelError` if a checkpoint or model does not load.
    """
    failed = read_failed(folder)
    prepare_imports()
    config = Config.load(folder / CONFIG)
    check_model(config)
    from workers.replay.failed_step_replay import replay as compute

    return compute(config, folder, failed)


def replay_step(run: Path, step: int, *, debug: bool = False) -> RetrainedSteps:
    """Train step `step` of a run again, without Ray, and compare weights and metrics with the recorded ones.

    Training begins from the newest checkpoint older than the step, or from the initial model, and first repeats the
    steps in between. All steps use the configuration of `step`. `debug` opens the debugger right before `step` is
    trained; it needs a run of one rank. Use only trusted folders, as with `replay`.

    Raises `ConfigError` for an invalid run, `DataError` if records are missing, `CheckpointError` or `ModelError` if a
    checkpoint or model does not load.
    """
    check_is_run(run)
    recording = RecordedSteps.of(run, step)
    prepare_imports()
    config, changed = Config.load(path_at(run, step)), changed_keys(run, recording.steps)
    check_model(config)
    if debug and config.train.ranks > 1:
        raise ConfigError(f"--debug: {run} was trained on {config.train.ranks} ranks, and a debugger sees one process")
    from workers.replay.step_retrain import retrain

    found = retrain(config, shape_of(config), recording, stop_here if debug else None)
    return replace(found, changed=changed)


def stop_here(step: int, plan: BatchPlan, groups: Sequence[RolloutRecord], backend: TrainBackend) -> None:
    """Open the debugger; its command `c` continues and trains `step`.

    `plan` assigns samples to micro-batches, `groups` are the recorded rollouts, `backend` is the policy.
    """
    pdb.set_trace()  # not `breakpoint`: Ray replaces it once it was started
