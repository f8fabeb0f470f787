"""The configurations of a run, which may be resumed with another one.

    RUN/config.resolved.yaml               of the session that began last
    RUN/configs/until_step_000010.yaml     of the steps up to 10, from which a session with another one went on

Each step has that of the session which took it last.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlsys.config import Config
from rlsys.loop.checkpoint import STEP, step_of
from rlsys.loop.failed_step import CONFIG
from rlsys.types import PolicyVersion
from rlsys.util.files import write_atomically
from rlsys.util.leaves import leaves

KEPT = "configs"
"""Folder in the directory of a run."""
_UNTIL = "until_"


def keep_earlier(run: Path, text: str, start: PolicyVersion) -> None:
    """Keep the configuration of the steps up to `start`, if the session that goes on from there has another, `text`.

    Those of later steps, which the run forgets, go.
    """
    earlier = path_at(run, start)
    if start and earlier.is_file() and (before := earlier.read_text()) != text:
        (run / KEPT).mkdir(exist_ok=True)
        write_atomically(run / KEPT / f"{_UNTIL}{STEP.format(start)}.yaml", before)
    for path in _kept(run):
        if _end_of(path) > start:
            path.unlink()


def path_at(run: Path, step: int) -> Path:
    """Where the configuration is that step `step` was trained under."""
    return next((path for path in _kept(run) if _end_of(path) >= step), run / CONFIG)


def changed_keys(run: Path, steps: Iterable[int]) -> tuple[str, ...]:
    """The keys that had not the same value in all of these steps, e.g. `train.lr`. Raises `ConfigError`."""
    paths = dict.fromkeys(path_at(run, step) for step in steps)
    configs = [dict(leaves(Config.load(path).model_dump(mode="json"))) for path in paths]
    keys = dict.fromkeys(key for config in configs for key in config)
    return tuple(key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs))


def _kept(run: Path) -> list[Path]:
    """In the order of steps."""
    return sorted((run / KEPT).glob(f"{_UNTIL}step_*[0-9].yaml"), key=_end_of)


def _end_of(path: Path) -> int:
    """The last step that a kept configuration is of."""
    return step_of(Path(path.stem.removeprefix(_UNTIL)))
