"""Computing again a step whose numbers were not finite."""

from __future__ import annotations

from pathlib import Path

from rlsys.config import Config
from rlsys.failed import CONFIG, read_failed
from rlsys.launch.preparing import check_model, prepare_imports
from rlsys.replayed import Replayed


def replay(folder: Path) -> Replayed:
    """Compute the step that a run kept in `RUN/failed/step_N` again, sample by sample, in this process and without Ray.

    The configuration is that of the run when it failed, the weights are those that failed; what other workers added is
    made again. Only for folders you trust: training state is unpickled by torch's checkpoint reader. Raises `DataError`
    or `ConfigError` if the folder is no such one, `CheckpointError` or `ModelError` if what it needs does not load.
    """
    failed = read_failed(folder)
    prepare_imports()
    config = Config.load(folder / CONFIG)
    check_model(config)
    from workers.train.replay import replay as compute

    return compute(config, folder, failed)
