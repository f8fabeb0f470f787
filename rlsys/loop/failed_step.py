"""A step that produced non-finite numbers, saved so that it can be computed again.

    failed/step_000007/
        actor/                  weights and optimizer of the policy (written by the ranks)
        critic/                 weights and optimizer of the critic, in a run that has one
        groups.jsonl            the groups of the step with their payloads
        config.resolved.yaml    the configuration of the failed run
        step.json               the rest, `FailedStep`; written last, so a folder that has it is complete

The failed model is saved as it was before the update `FailedStep.update`, with the earlier updates of the step applied.
The critic trains after the policy. If the policy failed, the critic is as it was before the step. If the critic failed,
the policy has taken the step. Columns of the step are not saved: `rlsys replay` recomputes them from the same models.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rlsys.algorithm import Signal, TrajectoryAdvantage
from rlsys.errors import DataError
from rlsys.types import PolicyVersion
from rlsys.util.files import write_atomically

GROUPS, ACTOR, CRITIC, CONFIG = "groups.jsonl", "actor", "critic", "config.resolved.yaml"
"""File names in the folder besides `step.json`."""


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The driver's decisions about the step."""

    version: PolicyVersion
    """Policy version that the step started from."""
    signals: tuple[Signal, ...]
    """Columns that the algorithm read."""
    assigned: tuple[tuple[TrajectoryAdvantage, ...], ...]
    """One tuple for each group of `groups.jsonl`, in order."""
    num_updates: int
    """Optimizer updates of the step."""
    error: str
    """Text of the error that ended the run."""
    model: Literal["actor", "critic"] = "actor"
    """The model with non-finite numbers."""
    update: int | None = None
    """Index of the failed update in the step, from 0; None if unknown, or outside any update."""

    def write(self, folder: Path) -> None:
        """Write `step.json`, which completes `folder`. Raises `OSError`."""
        # The standard library writes and reads NaN and Infinity, which an advantage may be.
        write_atomically(folder / "step.json", json.dumps(asdict(self), indent=1))


_STEP = TypeAdapter(FailedStep)


def read_failed(folder: Path) -> FailedStep:
    """Read the step in `folder`. Raises `DataError` if there is none."""
    path = folder / "step.json"
    try:
        return _STEP.validate_python(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} holds no failed step: there is no {path.name} in it; "
            "give the folder that the error of the run names, RUN/failed/step_N; or, for a step that was trained, the "
            "run and the number of the step: rlsys replay RUN --step N"
        ) from None
    except (OSError, ValueError, ValidationError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; it belongs to another version of rlsys, or is damaged"
        ) from error
