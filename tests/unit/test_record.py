"""Records: what is written is what comes back, to the last bit of a logprob."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithm import Assigned
from rlsys.batch.samples import meta_of, versions_of
from rlsys.errors import DataError
from rlsys.record import GroupRecord, RolloutRecord, read_groups, read_rollouts, write_groups, write_rollouts
from rlsys.types import (
    Acknowledged,
    Episode,
    Group,
    Outcome,
    OutcomeKind,
    Score,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    failed,
)

ids = st.lists(st.integers(0, 2**17), max_size=4).map(tuple)
floats32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
rewards = st.none() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=2),
)
prompts = st.text(max_size=10) | st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=10)}), min_size=1, max_size=2
).map(tuple)
tasks = st.builds(
    Task,
    id=st.text(max_size=8),
    prompt=prompts,
    answer=st.none() | st.text(max_size=8),
    info=st.dictionaries(st.text(max_size=4), json_values, max_size=2),
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    output = draw(ids)
    logprobs = tuple(draw(st.lists(floats32, min_size=len(output), max_size=len(output))))
    spans = (VersionSpan(draw(st.integers(0, 9)), len(output)),) if output else ()
    return Turn(draw(ids), output, logprobs, spans, draw(st.sampled_from(["stop", "length", "abort"])), draw(st.text()))


outcomes = st.builds(Outcome, st.sampled_from(OutcomeKind), st.text(max_size=8))
trajectories = st.builds(
    Trajectory, st.text(max_size=5), st.lists(turns(), max_size=2).map(tuple), outcomes, rewards, st.none() | st.just(0)
)
episodes = st.lists(trajectories, min_size=1, max_size=2).map(lambda t: Episode(tuple(t), 3, 5))
payloads = st.lists(episodes, min_size=1, max_size=3).map(tuple)


def group_of(payload: tuple[Episode, ...], serial: int = 5) -> Group:
    spans = versions_of(payload)
    return Group(
        serial=serial,
        task_id="t",
        permit_version=2,
        replica="rollout-0",
        episodes=meta_of(payload),
        versions=spans,
        weights=tuple(Acknowledged("rollout-0", s.version, "ab12") for s in spans),
        payload=None,
    )


def said(text: str, logprob: float = -0.5) -> Episode:
    turn = Turn((1, 2), (3,), (logprob,), (VersionSpan(2, 1),), "stop", text)
    return Episode((Trajectory("policy", (turn,)),))


@settings(deadline=None, max_examples=80)
@given(st.lists(payloads, max_size=2))
def test_groups_come_back_as_they_were(written: list[tuple[Episode, ...]]) -> None:
    records = [GroupRecord(group_of(payload, serial), payload) for serial, payload in enumerate(written)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "groups.jsonl")
        write_groups(path, records)
        assert read_groups(path) == records


@settings(deadline=None, max_examples=80)
@given(tasks, payloads)
def test_rollouts_come_back_as_they_were(task: Task, payload: tuple[Episode, ...]) -> None:
    record = RolloutRecord.of(3, task, group_of(payload), payload, [Assigned(0, 0, 1.5)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_000003.jsonl")
        write_rollouts(path, [record, record])
        assert read_rollouts(path) == [record, record]


@given(floats32)
def test_a_float32_logprob_keeps_every_bit(logprob: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "groups.jsonl")
        payload = (said("x", logprob),)
        write_groups(path, [GroupRecord(group_of(payload), payload)])
        (back,) = read_groups(path)
    assert struct.pack("f", back.episodes[0].trajectories[0].turns[0].logprobs[0]) == struct.pack("f", logprob)


def test_a_rollout_record_joins_payload_judgement_and_advantages() -> None:
    payload = (said("right"), said("broke"), said("wrong"))
    group = group_of(payload).with_scores((Score(1.0), Score(None, "took longer than 10 s"), Score(0.0)))
    assigned = [Assigned(0, 0, 0.7), Assigned(2, 0, -0.7)]
    record = RolloutRecord.of(12, Task(id="t", prompt="p"), group, payload, assigned)
    roots = [episode.trajectories[0] for episode in record.episodes]
    assert [root.reward for root in roots] == [1.0, None, 0.0]
    assert roots[1].outcome == failed("took longer than 10 s")
    assert [root.turns[0].text for root in roots] == ["right", "broke", "wrong"]
    assert record.advantages == ((0.7,), (None,), (-0.7,))


def test_references_are_left_behind(tmp_path: Path) -> None:
    group = replace(group_of(()), payload=object(), columns={"reference_logprobs": object()})
    write_groups(tmp_path / "groups.jsonl", [GroupRecord(group, ())])
    (back,) = read_groups(tmp_path / "groups.jsonl")
    assert (back.group.payload, back.group.columns) == (None, {})


def test_a_file_appears_whole_and_its_folder_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    write_rollouts(path, [])
    assert read_rollouts(path) == []
    assert list(path.parent.iterdir()) == [path]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    payload = (said("x"),)
    write_groups(path, [GroupRecord(group_of(payload), payload)])
    with path.open("a") as lines:
        lines.write('{"group": {}, "episodes": []}\n')
    with pytest.raises(DataError, match=rf"{path}:2: not a record of this version"):
        read_groups(path)
