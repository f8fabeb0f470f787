"""Computing again: a step whose numbers were not finite, and steps that a run took."""

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
from rlsys.loop.failed_step import CONFIG, read_failed
from rlsys.replay.non_finite import ReplayedStep
from rlsys.replay.rollout_log import RolloutRecord
from rlsys.replay.run_history import RecordedSteps
from rlsys.replay.step_comparison import RetrainedSteps

if TYPE_CHECKING:
    from workers.train.backend import TrainBackend


def replay(folder: Path) -> ReplayedStep:
    """Compute the step that a run kept in `RUN/failed/step_N` again, sample by sample, in this process and without Ray.

    The configuration is that of the run when it failed, the weights are those that failed; what other workers added is
    made again. Only for folders you trust: training state is unpickled by torch's checkpoint reader. Raises `DataError`
    or `ConfigError` if the folder is no such one, `CheckpointError` or `ModelError` if what it needs does not load.
    """
    failed = read_failed(folder)
    prepare_imports()
    config = Config.load(folder / CONFIG)
    check_model(config)
    from workers.replay.failed_step_replay import replay as compute

    return compute(config, folder, failed)


def replay_step(run: Path, step: int, *, debug: bool = False) -> RetrainedSteps:
    """Train step `step` of a run again, without Ray, and compare weights and metrics with what the run told of them.

    It begins from the newest checkpoint of the run that is older than the step, or from the initial model, and first
    trains the steps in between, all under the configuration that the step had. `debug` opens the debugger right
    before the step itself is trained; it needs a run of one rank. Only for folders you trust, as `replay`.

    Raises `ConfigError` for what is no run, `DataError` if something was not recorded, `CheckpointError` or
    `ModelError` if what it needs does not load.
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
    """Open the debugger, whose `c` goes on and trains `step`.

    `plan` is what is trained in which micro-batch, `groups` are the records of what was said, `backend` is the policy.
    """
    pdb.set_trace()  # not `breakpoint`, which Ray, where it was ever started, makes its own
