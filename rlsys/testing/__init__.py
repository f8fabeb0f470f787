"""Public fakes of every contract, and a clock that needs no waiting.

    from rlsys.testing import FakeWorkers, run_virtual

    def test_a_run_of_an_hour_takes_a_moment():
        run_virtual(driver.run(0))

A fake world keeps its weights as a version number and its payloads as plain objects; latencies are functions of the
group, so that hypothesis can choose them. Fakes assert what their contract asks of the caller. Faults are scripted: the
n-th call of a worker can die, hang or answer with wrong weights.
"""

from rlsys.simulate.clock import VirtualLoop, run_virtual
from rlsys.simulate.pools import FakeJointRollouts, FakePinnedRollouts, FakeRewards, FakeRollouts, Fault, now
from rlsys.simulate.training import FakeActor, FakeCritic, FakeReference, FakeRelays
from rlsys.simulate.world import FakeWorld, RewardAsAdvantage, tasks
from rlsys.testing.environment import FakeEnvironment
from rlsys.testing.policy import ScriptedPolicy, played

__all__ = [
    "FakeActor",
    "FakeCritic",
    "FakeEnvironment",
    "FakeJointRollouts",
    "FakePinnedRollouts",
    "FakeReference",
    "FakeRelays",
    "FakeRewards",
    "FakeRollouts",
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
