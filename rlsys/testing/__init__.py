"""Public fakes of every contract, and runs of the real driver on them, for tests of your plug-ins.

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

`FakeRun` takes the sections of a configuration, plug-ins as objects too. An hour of it takes a moment: its clock is
virtual. A `FakeWorld` keeps its weights as a version number and its payloads as plain objects. Its latencies are
functions of the group, so that hypothesis can choose them, and its faults are scripted: the n-th call of a worker can
die, hang or answer with wrong weights. Fakes assert what their contract asks of the caller.
"""

from rlsys.simulate.fake_pools import FakeJointRollouts, FakePinnedRollouts, FakeRewards, FakeRollouts, Fault, now
from rlsys.simulate.fake_training import FakeActor, FakeCritic, FakeReference, FakeRelays
from rlsys.simulate.fake_world import FakeWorld, RewardAsAdvantage, tasks
from rlsys.simulate.virtual_clock import VirtualLoop, run_virtual
from rlsys.testing.fake_environment import FakeEnvironment
from rlsys.testing.fake_run import EventRecorder, FakeRun
from rlsys.testing.scripted_policy import ScriptedPolicy, played

__all__ = [
    "EventRecorder",
    "FakeActor",
    "FakeCritic",
    "FakeEnvironment",
    "FakeJointRollouts",
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
    "played",
    "run_virtual",
    "tasks",
]
