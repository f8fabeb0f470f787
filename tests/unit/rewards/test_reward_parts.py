"""Parts of a reward, from scoring into metrics, rollout records and checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.contracts import TrainStats
from rlsys.loop.learner import StepResult
from rlsys.loop.step_metrics import StepClock, step_metrics
from rlsys.monitoring.events import CautionRaised, Events
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.replay.rollout_json import (
    GroupRecord,
    RolloutRecord,
    read_groups,
    write_groups,
)
from rlsys.replay.rollout_parquet import read_records, write_records
from rlsys.types import Episode, GroupKey, Score, Task, Trajectory
from tests.groups import episode, group, queue_of
from tests.simulate.world import EventRecorder

JUDGED = (
    Score(1.1, parts={"exact": 1.0, "format": 0.5}),
    Score(0.0, parts={"exact": 0.0}),
    Score(None, "exact: returned nan", {"format": 9.0}),
)
GROUP = group(0, episodes=[episode(None)] * 3).with_scores(JUDGED)
PAYLOAD = (Episode((Trajectory("policy", ()),)),) * 3


def test_each_function_has_a_mean_over_where_it_applied() -> None:
    async def measured() -> dict[str, float]:
        learned = StepResult([GROUP], [()], TrainStats({}, 1.0))
        return step_metrics(learned, 0, queue_of(2, 1), StepClock())

    metrics = asyncio.run(measured())
    by_function = {name: value for name, value in metrics.items() if name.startswith("reward/by/")}
    assert by_function == {"reward/by/exact": 0.5, "reward/by/format": 0.5}
    assert metrics["reward/mean"] == pytest.approx(0.55)
    assert undocumented_names(by_function) == []


def test_names_of_parts_are_bounded_and_that_is_said_once() -> None:
    recorder = EventRecorder()

    async def measured() -> list[dict[str, float]]:
        clock, queue = StepClock(Events([recorder])), queue_of(2, 1)
        found: list[dict[str, float]] = []
        for step in range(3):
            score = Score(1.0, parts={"exact": 1.0, **{f"k{60 * step + i}": 1.0 for i in range(60)}})
            scored = group(0, episodes=[episode(None)]).with_scores((score,))
            found.append(step_metrics(StepResult([scored], [()], TrainStats({}, 1.0)), step, queue, clock))
        return found

    names = [[name for name in metrics if name.startswith("reward/by/")] for metrics in asyncio.run(measured())]
    assert [len(each) for each in names] == [61, 40, 1]
    assert all("reward/by/exact" in each for each in names)
    (caution,) = recorder.of(CautionRaised)
    assert caution.sentence.startswith(
        "reward functions return more than 100 names: metrics have the first, and not 'k"
    )


def test_a_rollout_record_shows_the_parts(tmp_path: Path) -> None:
    record = RolloutRecord.of(1, Task(id="t", prompt="p"), GROUP, PAYLOAD, [])
    assert record.parts == ({"exact": 1.0, "format": 0.5}, {"exact": 0.0}, {})
    write_records(tmp_path / "step.parquet", [record])
    assert read_records(tmp_path / "step.parquet") == [record]


def test_a_checkpointed_group_keeps_its_parts(tmp_path: Path) -> None:
    record = GroupRecord(replace(GROUP, key=GroupKey(0, 0), payload=None), PAYLOAD)
    write_groups(tmp_path / "groups.jsonl", [record])
    assert read_groups(tmp_path / "groups.jsonl") == [record]
