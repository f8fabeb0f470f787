"""Group-relative policy optimisation."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.dataclasses import dataclass

from algorithms.fields import RULES
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient
from rlsys.algorithm import TrajectoryAdvantage
from rlsys.types import Group


@dataclass(frozen=True, kw_only=True, config=RULES)
class GRPO(ClippedSurrogate, PolicyGradient):
    """Group-relative policy optimisation (arXiv:2402.03300) with clip-higher and token mean (DAPO, arXiv:2503.14476).

    A = (R - mean) / (std + 1e-6) over the group, std unbiased; `over: sequences` is the original paper's mean.

    With one update per step and `correction: tis` its gradient is min(rho, cap) A ∇log pi, rho being the importance
    ratio of the token: AIPO (arXiv:2505.24034). The clip then acts only with several updates.
    """

    std_normalize: bool = True
    """Divide advantages by the group's standard deviation; false as in Dr. GRPO (arXiv:2503.20783)."""

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        """A = (R - mean) / (std + 1e-6) over peers."""
        return self.group_relative(group, std_normalize=self.std_normalize)
