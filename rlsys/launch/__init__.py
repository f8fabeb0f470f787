"""Composition root: builds running objects from a configuration. The only importer of `workers`.

    result = rlsys.train(Config.load("run.yaml"))

works from the command line, from a Python script (also after a call of `ray.init`) and inside a Ray job.
"""

from rlsys.launch.device_defaults import with_device_defaults
from rlsys.launch.earlier_runs import with_models_of_runs
from rlsys.launch.fitting import FittedPlan, memory_plan
from rlsys.launch.live_run import Run, start, train
from rlsys.launch.offline_commands import evaluate, export, inspect_data, push, replay, replay_step
from rlsys.launch.policy_serving import serve
from rlsys.launch.preflight import look_up, with_steps
from rlsys.launch.reward_trial import try_rewards
from rlsys.launch.train_run import TrainResult, check_can_begin
from rlsys.launch.try_workflow import Tried, config_to_try, try_workflow

__all__ = [
    "FittedPlan",
    "Run",
    "TrainResult",
    "Tried",
    "check_can_begin",
    "config_to_try",
    "evaluate",
    "export",
    "inspect_data",
    "look_up",
    "memory_plan",
    "push",
    "replay",
    "replay_step",
    "serve",
    "start",
    "train",
    "try_rewards",
    "try_workflow",
    "with_device_defaults",
    "with_models_of_runs",
    "with_steps",
]
