"""Public names: the promised surface, and the cost of its import."""

import subprocess
import sys

import pytest

import rlsys
import rlsys.testing

pytestmark = pytest.mark.slow

NAMES = [
    "Agent", "Aggregation", "Algorithm", "Column", "Config", "Environment", "GradientDecision", "LossInputs",
    "LossOutput", "RlsysError", "Run", "Session", "Stabilizer", "StabilizerPlugin", "Step",
    "StepAdvantages", "TokenAdvantages", "Tool", "ToolError", "Toolbox", "TrainResult", "TrajectoryAdvantage",
    "Workflow", "evaluate", "export", "start", "tool", "train",
]  # fmt: skip
FAKES = [
    "FakeActor", "FakeCritic", "FakePinnedRollouts", "FakeReference", "FakeRelays", "FakeRewards", "FakeRollouts",
    "FakeRun", "FakeWorld", "Fault", "EventRecorder", "RewardAsAdvantage", "ScriptedPolicy", "VirtualLoop",
    "play_scripted", "run_virtual", "tasks",
]  # fmt: skip


def test_the_public_names_are_these():
    assert rlsys.__all__ == NAMES
    assert [name for name in NAMES if getattr(rlsys, name).__name__ != name] == []


def test_the_fakes_are_public_and_documented():
    assert [name for name in FAKES if not getattr(rlsys.testing, name).__doc__] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rlsys' has no attribute 'trian'"):
        _ = rlsys.trian  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import rlsys", "torch ray pydantic numpy transformers datasets typer rich workers algorithms"),
        (
            "from rlsys import Algorithm, StabilizerPlugin, RlsysError",
            "torch ray pydantic numpy transformers datasets",
        ),
        (
            "from rlsys import Workflow, Session, Environment, tool",
            "torch ray numpy transformers datasets workers algorithms",
        ),
        ("from rlsys import Config", "torch ray numpy transformers datasets workers"),
        ("from rlsys import train, evaluate, export", "torch ray transformers datasets workers"),
    ],
)
def test_importing_loads_nothing_that_is_not_needed(statement, absent):
    script = f"{statement}; import sys; print([m for m in {absent.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
