"""A step that gave numbers which are not finite, kept so that it can be computed again.

    failed/step_000007/
        actor/                  weights and optimizer of the policy (written by the ranks)
        critic/                 the critic's, in a run that has one
        groups.jsonl            the groups of the step with their payloads
        config.resolved.yaml    the configuration under which it failed
        step.json               the rest, `FailedStep`; written last, so that a folder that has it is whole

The model that failed is as it was before the update that failed, `FailedStep.update`; the updates of the step before
that one are taken. The critic trains after the policy: if the policy failed, the critic is as it was before the step,
and if the critic failed, the policy has taken the step. The columns of the step are not kept: `rlsys replay` makes them
again, from the same models.
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
"""Names in the folder besides `step.json`."""


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The driver's part: what it had decided about the step."""

    version: PolicyVersion
    """Policy version that the step started from."""
    signals: tuple[Signal, ...]
    """Columns that the algorithm read."""
    assigned: tuple[tuple[TrajectoryAdvantage, ...], ...]
    """One tuple for each group of `groups.jsonl`, in order."""
    num_updates: int
    """Optimizer updates that the step was cut into."""
    error: str
    """What went wrong, in the words of the error that ended the run."""
    model: Literal["actor", "critic"] = "actor"
    """Whose numbers were not finite."""
    update: int | None = None
    """In which of the step's updates, from 0; None if it is not known, or was in none."""

    def write(self, folder: Path) -> None:
        """Complete `folder`, which holds the other files already. Raises `OSError`."""
        # The standard library writes and reads NaN and Infinity, which an advantage may be.
        write_atomically(folder / "step.json", json.dumps(asdict(self), indent=1))


_STEP = TypeAdapter(FailedStep)


def read_failed(folder: Path) -> FailedStep:
    """The step that `folder` holds. Raises `DataError` if it holds none."""
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
