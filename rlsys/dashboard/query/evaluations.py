"""Lists of evaluations."""

from __future__ import annotations

from collections.abc import Iterable

from rlsys.dashboard.query.rollout_files import RolloutFiles
from rlsys.dashboard.responses import EvaluationRow
from rlsys.monitoring.events import EvalDone


def evaluation_row(done: EvalDone, samples: RolloutFiles | None) -> EvaluationRow:
    """Row of an evaluation; `samples` are those of its data set."""
    prefix = f"eval/{done.dataset}/"
    return EvaluationRow(
        dataset=done.dataset,
        step=done.step,
        scores={name.removeprefix(prefix): value for name, value in done.metrics.items()},
        failures=done.failures,
        seconds=done.seconds or None,
        has_samples=samples is not None and done.step in samples.steps(),
    )


def newest_first(done: Iterable[EvalDone]) -> list[EvalDone]:
    """Sort evaluations by step, the last one first, then by data set."""
    return sorted(done, key=lambda one: (-one.step, one.dataset))
