"""Configurations of a run, which may be resumed with another configuration.

    RUN/config.resolved.yaml               of the last session
    RUN/configs/until_step_000010.yaml     of the steps up to 10; a session with another configuration resumed there

The configuration of a step is that of the last session that took the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlsys.config import Config
from rlsys.loop.checkpoint_files import STEP, step_of
from rlsys.types import PolicyVersion
from rlsys.util.files import CONFIG, write_atomically
from rlsys.util.leaves import leaves

KEPT = "configs"
"""Folder in the run directory."""
_UNTIL = "until_"


def keep_earlier(run: Path, text: str, start: PolicyVersion) -> None:
    """Keep the configuration of the steps up to `start` if the session that resumes there has another one, `text`.

    Kept configurations of later steps are deleted, because the run discards these steps.
    """
    earlier = path_at(run, start)
    if start and earlier.is_file() and (before := earlier.read_text()) != text:
        (run / KEPT).mkdir(exist_ok=True)
        write_atomically(run / KEPT / f"{_UNTIL}{STEP.format(start)}.yaml", before, is_private=True)
    for path in _old_configs(run):
        if _end_of(path) > start:
            path.unlink()


def path_at(run: Path, step: int) -> Path:
    """Path of the configuration that step `step` was trained with."""
    return next((path for path in _old_configs(run) if _end_of(path) >= step), run / CONFIG)


def changed_keys(run: Path, steps: Iterable[int]) -> tuple[str, ...]:
    """Keys whose value differs between these steps, e.g. `train.lr`. Raises `ConfigError`."""
    paths = dict.fromkeys(path_at(run, step) for step in steps)
    configs = [dict(leaves(Config.load(path).model_dump(mode="json"))) for path in paths]
    keys = dict.fromkeys(key for config in configs for key in config)
    return tuple(key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs))


def _old_configs(run: Path) -> list[Path]:
    return sorted((run / KEPT).glob(f"{_UNTIL}step_*[0-9].yaml"), key=_end_of)


def _end_of(path: Path) -> int:
    return step_of(Path(path.stem.removeprefix(_UNTIL)))
