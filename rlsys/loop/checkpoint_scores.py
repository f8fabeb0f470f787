"""Results of evaluations, by which the best checkpoints are kept and a run ends early."""

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
    patience: int = 0
    """Evaluations in a row without a better value that end the run; 0: never."""
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

    @property
    def early_stop(self) -> str:
        """Reason for which the run ends now; empty if it goes on.

        An evaluation without a value is one without a better value. The count needs no state besides `scores`.
        """
        sign = 1 if self.is_highest else -1
        best: tuple[float, PolicyVersion] | None = None
        num_since = 0
        for version, score in sorted(self.scores.items()):
            if score is not None and (best is None or sign * score > sign * best[0]):
                best, num_since = (score, version), 0
            else:
                num_since += 1
        if not self.patience or num_since < self.patience:
            return ""
        there = (
            f"the best value is {best[0]:.6g}, first reached at step {best[1]}" if best else "it had no value at all"
        )
        return f"stopped early: {self.metric} did not improve in {num_since} evaluations; {there}"

    def rank_steps(self, steps: Sequence[int]) -> list[int]:
        """Return those of `steps` that have a value, the best last; of equal ones, the newest is the best."""
        sign = 1 if self.is_highest else -1
        scored = [(sign * score, step) for step in steps if (score := self.scores.get(step)) is not None]
        return [step for _, step in sorted(scored)]

    def steps_to_keep(self, steps: Sequence[int]) -> set[int]:
        """Return the best of `steps`, and those whose evaluation may still be running."""
        ranked, newest = self.rank_steps(steps), max(self.scores, default=-1)
        pending = {step for step in steps if step > newest and self.is_due(step)}
        return pending | {*ranked[max(0, len(ranked) - self.count) :]}
