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
        LossInputs,
        LossOutput,
        Signal,
        StepAdvantages,
        TokenAdvantages,
        TrajectoryAdvantage,
    )
    from rlsys.config import Config
    from rlsys.errors import RlsysError, ToolError
    from rlsys.launch import TrainResult, evaluate, export, train
    from rlsys.stabilizer import GradientDecision, Stabilizer, StabilizerPlugin

__all__ = [
    "Agent",
    "Aggregation",
    "Algorithm",
    "Config",
    "Environment",
    "GradientDecision",
    "LossInputs",
    "LossOutput",
    "RlsysError",
    "Session",
    "Signal",
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
    "tool",
    "train",
]

_HOMES = {
    "rlsys.algorithm": (
        "Aggregation",
        "Algorithm",
        "TrajectoryAdvantage",
        "LossInputs",
        "LossOutput",
        "StepAdvantages",
        "TokenAdvantages",
        "Signal",
    ),
    "rlsys.config": ("Config",),
    "rlsys.agents.environment": ("Environment", "Step"),
    "rlsys.errors": ("RlsysError", "ToolError"),
    "rlsys.launch": ("TrainResult", "evaluate", "export", "train"),
    "rlsys.stabilizer": ("Stabilizer", "StabilizerPlugin", "GradientDecision"),
    "rlsys.agents.tools": ("Tool", "Toolbox", "tool"),
    "rlsys.agents.workflow": ("Agent", "Session", "Workflow"),
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
