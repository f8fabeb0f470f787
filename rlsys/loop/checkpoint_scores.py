"""Results of evaluations, by which the best checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlsys.types import PolicyVersion


@dataclass
class BestCheckpoints:
    """The best evaluated checkpoints by one metric of the evaluation."""

    count: int
    """Checkpoints to keep; 0: none."""
    metric: str = ""
    """Name of the metric, e.g. `eval/held_out/mean`."""
    is_highest: bool = True
    """Direction: the highest value is the best, else the lowest."""
    every: int = 0
    """Steps between two evaluations."""
    scores: dict[PolicyVersion, float | None] = field(default_factory=dict)
    """Value of the metric by evaluated version; None if the evaluation has no value for it. Part of a checkpoint."""

    def add(self, version: PolicyVersion, metrics: Mapping[str, float | None]) -> None:
        """Add the results of an evaluation on one data set. Those of other data sets are ignored."""
        if self.count and self.metric in metrics:
            value = metrics[self.metric]
            self.scores[version] = None if value is None or value != value else value

    def state(self) -> dict[str, dict[PolicyVersion, float | None]]:
        """Return the scores for a checkpoint, by the name of their metric."""
        return {self.metric: dict(self.scores)} if self.count else {}

    def restore(self, state: Mapping[str, Mapping[PolicyVersion, float | None]]) -> None:
        """Add the scores of an earlier session. Those of another metric are ignored."""
        self.scores.update(state.get(self.metric, {}))

    def is_due(self, step: int) -> bool:
        """Return True if `step` is evaluated, and so may be one of the best."""
        return self.count > 0 and step % self.every == 0

    def kept(self, steps: Sequence[int]) -> set[int]:
        """Return the best of `steps`, and those whose evaluation may still be running. Of equal ones, the newest."""
        sign = 1 if self.is_highest else -1
        scored = [(sign * score, step) for step in steps if (score := self.scores.get(step)) is not None]
        newest = max(self.scores, default=-1)
        pending = {step for step in steps if step > newest and self.is_due(step)}
        return pending | {step for _, step in sorted(scored)[max(0, len(scored) - self.count) :]}
