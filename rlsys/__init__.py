"""rlsys: reinforcement-learning post-training of language models, orchestrated on Ray.

    from rlsys import Config, train

    result = train(Config.load("run.yaml", ["train.lr=1e-5"]))

Importing this package loads neither torch nor ray; `train`, `evaluate` and `export` load them on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsys.agents.environment import Environment, Step
    from rlsys.agents.tools import Tool, Toolbox, tool
    from rlsys.agents.workflow import Agent, Session, Workflow
    from rlsys.algorithm import (
        Aggregation,
        Algorithm,
        Column,
        LossInputs,
        LossOutput,
        StepAdvantages,
        TokenAdvantages,
        TrajectoryAdvantage,
    )
    from rlsys.config import Config
    from rlsys.errors import RlsysError, ToolError
    from rlsys.launch import Run, TrainResult, evaluate, export, start, train
    from rlsys.stabilizer import GradientDecision, Stabilizer, StabilizerPlugin

__all__ = [
    "Agent",
    "Aggregation",
    "Algorithm",
    "Column",
    "Config",
    "Environment",
    "GradientDecision",
    "LossInputs",
    "LossOutput",
    "RlsysError",
    "Run",
    "Session",
    "Stabilizer",
    "StabilizerPlugin",
    "Step",
    "StepAdvantages",
    "TokenAdvantages",
    "Tool",
    "ToolError",
    "Toolbox",
    "TrainResult",
    "TrajectoryAdvantage",
    "Workflow",
    "evaluate",
    "export",
    "start",
    "tool",
    "train",
]

_HOMES = (
    "rlsys.errors",
    "rlsys.algorithm",
    "rlsys.stabilizer",
    "rlsys.agents.environment",
    "rlsys.agents.tools",
    "rlsys.agents.workflow",
    "rlsys.config",
    "rlsys.launch",
)
"""Modules with the public names; one that imports much comes after those that import little."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in __all__:
        for home in map(import_module, _HOMES):
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
