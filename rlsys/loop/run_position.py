"""Where a run stands: versions of its weights, and the optimizer steps behind them."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.types import PolicyVersion


@dataclass
class RunPosition:
    """Versions of one session. A version is published once: the steps of some are lost if models are replaced."""

    version: PolicyVersion = 0
    """The last finished step, or that of the restored weights."""
    restored: PolicyVersion = 0
    """Version of the weights that this session began with, or went back to."""
    num_lost: int = 0
    """Versions of the whole run whose steps were lost with the actor: `version - num_lost` steps are behind the
    weights."""
