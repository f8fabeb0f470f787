"""rlsys: reinforcement-learning post-training of language models, orchestrated on Ray.

    from rlsys import Config, train

    result = train(Config.load("run.yaml", ["train.lr=1e-5"]))

Importing this package loads neither torch nor ray; `train`, `evaluate` and `export` do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsys.algorithm import Aggregation, Algorithm, Assigned, LossInputs, LossOutput, Settled, Shaped, Signal
    from rlsys.config import Config
    from rlsys.environment import Environment, Step
    from rlsys.errors import RlsysError, ToolError
    from rlsys.launch import TrainResult, evaluate, export, train
    from rlsys.stabilizer import Stabilizer, StabilizerPlugin, Steered
    from rlsys.tools import Tool, Toolbox, tool
    from rlsys.workflow import Agent, Session, Workflow

__all__ = [
    "Agent",
    "Aggregation",
    "Algorithm",
    "Assigned",
    "Config",
    "Environment",
    "LossInputs",
    "LossOutput",
    "RlsysError",
    "Session",
    "Settled",
    "Shaped",
    "Signal",
    "Stabilizer",
    "StabilizerPlugin",
    "Steered",
    "Step",
    "Tool",
    "ToolError",
    "Toolbox",
    "TrainResult",
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
        "Assigned",
        "LossInputs",
        "LossOutput",
        "Settled",
        "Shaped",
        "Signal",
    ),
    "rlsys.config": ("Config",),
    "rlsys.environment": ("Environment", "Step"),
    "rlsys.errors": ("RlsysError", "ToolError"),
    "rlsys.launch": ("TrainResult", "evaluate", "export", "train"),
    "rlsys.stabilizer": ("Stabilizer", "StabilizerPlugin", "Steered"),
    "rlsys.tools": ("Tool", "Toolbox", "tool"),
    "rlsys.workflow": ("Agent", "Session", "Workflow"),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
