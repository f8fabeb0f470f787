"""Runs of the real driver on fake workers, with every plug-in of the configuration in use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from algorithms.gac import GAC, MIN_STEPS
from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import ConfigError, RunAborted
from rlsys.monitoring.events import GroupDropped, WorkerFailed
from rlsys.testing import FakeRun, FakeWorld, Fault, RewardAsAdvantage
from rlsys.types import Task

ADDS = [Task(id=f"{a}+1", prompt=f"{a}+1?", answer=str(a + 1)) for a in range(4)]
REWARDS = """
async def late(completion, answer):
    return float(completion == answer)

def broken(completion):
    raise ZeroDivisionError("by zero")
"""


def add(said: str) -> str:
    return str(int(said[said.index("?") - 3]) + 1)


def test_a_group_is_played_on_its_starting_version(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path,
        FakeWorld(rollout_s=lambda group_id: 0.1, train_s=lambda version: 5.0),
        tasks=ADDS,
        reply=add,
        run={"steps": 6},
        algorithm=RewardAsAdvantage(),
        reward={"fn": "exact"},
        asynchrony={"max_staleness": 2},
    )
    assert run.train() == 6
    assert [step["reward/mean"] for step in run.metrics] == [1.0] * 6
    assert max(run.world.staleness) == 2


def test_reward_functions_may_be_async_and_failures_drop_groups(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    fn = f"{tmp_path}/rewards.py"
    good = FakeRun(tmp_path / "good", tasks=ADDS, reply=add, reward={"fn": f"{fn}:late"}, algorithm=RewardAsAdvantage())
    assert good.train() == 3
    assert good.metrics[-1]["reward/mean"] == 1.0
    sections = {"reward": {"fn": f"{fn}:broken"}}
    bad = FakeRun(tmp_path / "bad", tasks=ADDS, reply=add, **sections, algorithm=RewardAsAdvantage())
    with pytest.raises(RunAborted, match="by zero"):
        bad.train()
    assert {event.reason for event in bad.recorder.of(GroupDropped)} == {"failed"}


@dataclass(frozen=True, kw_only=True)
class Reads(Workflow):
    """Reads the reply as a number, which the policy may not have said."""

    async def run(self, session: Session) -> None:
        session.reward(int(await session.agent("policy").chat(session.task.prompt)))


def test_errors_in_few_episodes_do_not_end_the_run(tmp_path: Path) -> None:
    count = iter(range(1000))
    run = FakeRun(
        tmp_path,
        tasks=ADDS,
        reply=lambda said: "?" if next(count) % 3 == 0 else "1",
        rollout={"workflow": Reads()},
        algorithm=RewardAsAdvantage(),
    )
    assert run.train() == 3
    assert run.metrics[-1]["reward/failed_frac"] > 0


@dataclass(frozen=True, kw_only=True)
class Unreachable(Reads):
    """Its server refuses every connection for the first task, before the policy says anything."""

    async def run(self, session: Session) -> None:
        if session.task.id == ADDS[0].id:
            raise ConnectionError("refused")
        await super().run(session)


def test_a_task_whose_workflow_raises_every_time_is_dropped(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path,
        tasks=ADDS,
        reply=lambda said: "1",
        rollout={"workflow": Unreachable()},
        algorithm=RewardAsAdvantage(),
    )
    assert run.train() == 3
    dropped = run.recorder.of(GroupDropped)
    assert {(event.task_id, event.reason) for event in dropped} == {(ADDS[0].id, "failed")}
    assert "ConnectionError: refused" in dropped[0].detail
    assert not run.recorder.of(WorkerFailed), "the worker that played it is sound"
    assert run.metrics[-1]["async/dropped"] == len(dropped)


def test_errors_in_every_episode_end_the_run_with_the_transcript(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path,
        tasks=ADDS,
        reply=lambda said: "nothing",
        rollout={"workflow": Reads()},
        algorithm=RewardAsAdvantage(),
    )
    with pytest.raises(RunAborted, match="each of the first 16 groups failed") as raised:
        run.train()
    told = str(raised.value)
    assert "ValueError: invalid literal for int()" in told and "in run\n" in told
    assert "what was said:" in told and "[policy] assistant: nothing" in told
    assert [event.reason for event in run.recorder.of(GroupDropped)] == ["failed"] * 15


def test_a_stabilizer_gets_every_gradient_and_its_synchronous_steps(tmp_path: Path) -> None:
    steps = GAC(calibrate_steps=MIN_STEPS).synchronous_steps
    run = FakeRun(
        tmp_path,
        FakeWorld(rollout_s=lambda group_id: 0.1),
        algorithm=RewardAsAdvantage(),
        stabilizer=GAC(enabled=True, calibrate_steps=MIN_STEPS),
        gradients=lambda version: {"w": torch.ones(2, 3)},
        run={"steps": steps + 8},
        asynchrony={"max_staleness": 2},
    )
    assert run.train() == steps + 8
    assert run.metrics[-1]["gac/cosine"] == pytest.approx(1.0)
    assert [run.world.staleness_by_version[version] for version in (steps - 1, steps + 7)] == [0, 2]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(steps: int) -> FakeRun:
        return FakeRun(tmp_path, algorithm=RewardAsAdvantage(), run={"steps": steps})

    assert [run(2).train(), (longer := run(5)).train()] == [2, 5]
    assert len(longer.metrics) == 3


def test_faults_are_planted_in_a_run_with_plug_ins(tmp_path: Path) -> None:
    world = FakeWorld(rollout_faults={1: Fault.DIES}, reward_faults={2: Fault.FAILS})
    run = FakeRun(tmp_path, world, tasks=ADDS, reply=add, algorithm=RewardAsAdvantage(), reward={"fn": "exact"})
    assert run.train() == 3
    assert [event.worker for event in run.recorder.of(WorkerFailed)] == ["rollout-1"]
    assert [event.reason for event in run.recorder.of(GroupDropped)] == ["failed"]


class Buggy(Workflow):
    async def run(self, session: Session) -> None:
        raise KeyError("missing")


def test_a_workflow_bug_ends_the_run_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RunAborted, match='raise KeyError\\("missing"\\)'):
        FakeRun(tmp_path, reply=add, rollout={"workflow": Buggy()}, algorithm=RewardAsAdvantage()).train()


def test_what_a_run_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        FakeRun(tmp_path, reply=add, reward={"fn": f"{__file__}:nosuch"}, algorithm=RewardAsAdvantage())
