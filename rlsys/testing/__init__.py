"""Public fakes of every contract, and fake runs of the real driver, to test your plug-ins.

    from rlsys.testing import FakeRun
    from rlsys.types import Task

    def test_my_plug_ins_train(tmp_path):
        run = FakeRun(
            tmp_path,
            tasks=[Task(id="sum", prompt="2+2?", answer="4")],
            reply=lambda said: "4",
            algorithm={"type": "grpo", "group_size": 4},
            rollout={"workflow": "single_turn"},
            reward={"fn": "exact"},
        )
        assert run.train() == 3
        assert run.metrics[-1]["reward/mean"] == 1.0

`FakeRun` accepts the sections of a configuration, plug-ins as objects too. On its virtual clock an hour takes a moment.
In a `FakeWorld`, weights are a version number and payloads are plain objects. Latencies are functions of the group, so
that hypothesis can choose them. Faults are scripted: the n-th call of a worker can die, hang or answer with wrong
weights. Fakes assert what their contract requires of the caller.
"""

from rlsys.testing.fake_environment import FakeEnvironment
from rlsys.testing.fake_pools import FakePinnedRollouts, FakeRewards, FakeRollouts, now
from rlsys.testing.fake_run import EventRecorder, FakeRun
from rlsys.testing.fake_training import FakeActor, FakeCritic, FakeReference, FakeRelays
from rlsys.testing.fake_world import FakeWorld, RewardAsAdvantage, tasks
from rlsys.testing.scripted_policy import ScriptedPolicy, play_scripted
from rlsys.testing.virtual_clock import VirtualLoop, run_virtual
from rlsys.testing.world_state import Fault

__all__ = [
    "EventRecorder",
    "FakeActor",
    "FakeCritic",
    "FakeEnvironment",
    "FakePinnedRollouts",
    "FakeReference",
    "FakeRelays",
    "FakeRewards",
    "FakeRollouts",
    "FakeRun",
    "FakeWorld",
    "Fault",
    "RewardAsAdvantage",
    "ScriptedPolicy",
    "VirtualLoop",
    "now",
    "play_scripted",
    "run_virtual",
    "tasks",
]
