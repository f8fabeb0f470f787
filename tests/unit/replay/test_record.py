"""Records: a round trip preserves everything, to the last bit of a logprob."""

from __future__ import annotations

import math
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.batch.samples import meta_of, versions_of
from rlsys.errors import DataError
from rlsys.replay.rollout_json import (
    GroupRecord,
    RolloutRecord,
    TokenStats,
    as_plain,
    decoder_of,
    read_groups,
    write_groups,
)
from rlsys.replay.rollout_parquet import (
    RolloutFile,
    read_records,
    write_records,
)
from rlsys.types import (
    Acknowledged,
    Episode,
    Group,
    GroupKey,
    Outcome,
    OutcomeKind,
    Score,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    failed,
)
from tests.groups import rolled_out
from tests.rollouts import damage, rollouts

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
columns = st.dictionaries(
    st.sampled_from(["reference_logprobs", "values"]), st.lists(st.lists(floats32).map(tuple)).map(tuple)
)
numbers = st.lists(floats32, max_size=3).map(tuple)
turn_readings = st.builds(
    TokenStats,
    said=st.text(max_size=5),
    pieces=st.lists(st.text(max_size=3), max_size=3).map(tuple),
    trainer_logprobs=numbers,
    entropies=numbers,
    advantages=numbers,
    is_masked=st.lists(st.booleans(), max_size=3).map(tuple),
)
reading = st.lists(st.lists(turn_readings, max_size=2).map(tuple), max_size=2).map(tuple)
assigned = st.lists(
    st.builds(TrajectoryAdvantage, st.just(0), st.just(0), floats32, st.none() | st.integers(0, 2)), max_size=2
)


def group_of(payload: tuple[Episode, ...], group_id: int = 5) -> Group:
    spans = versions_of(payload)
    return Group(
        key=GroupKey(group_id, 0),
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


@given(st.lists(payloads, max_size=2))
def test_groups_come_back_as_they_were(written: list[tuple[Episode, ...]]) -> None:
    records = [GroupRecord(group_of(payload, group_id), payload) for group_id, payload in enumerate(written)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "groups.jsonl")
        write_groups(path, records)
        assert read_groups(path) == records


@given(st.data(), tasks, payloads, assigned, columns)
def test_rollouts_come_back_as_they_were(data, task, payload, assigned, columns) -> None:
    size = len(payload)
    readings = tuple(data.draw(st.just([]) | st.lists(reading, min_size=size, max_size=size)))
    group = replace(group_of(payload), policy="asker")
    record = replace(RolloutRecord.of(3, task, group, payload, assigned), columns=columns, readings=readings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_000003.parquet")
        write_records(path, [record, record])
        assert read_records(path) == [record, record]
        assert RolloutFile(path).group_ids == [5, 5]


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
    assigned = [TrajectoryAdvantage(0, 0, 0.7), TrajectoryAdvantage(2, 0, -0.7)]
    record = RolloutRecord.of(12, Task(id="t", prompt="p"), group, payload, assigned)
    roots = [episode.trajectories[0] for episode in record.episodes]
    assert [root.reward for root in roots] == [1.0, None, 0.0]
    assert roots[1].outcome == failed("took longer than 10 s")
    assert [root.turns[0].text for root in roots] == ["right", "broke", "wrong"]
    assert record.advantages == ((0.7,), (None,), (-0.7,))


def test_a_failure_that_utf8_lacks_is_recorded(tmp_path: Path) -> None:
    payload = (said("right"), said("broke"))
    group = group_of(payload).with_scores((Score(1.0), Score(None, "raised ValueError: \ud800")))
    write_groups(groups := tmp_path / "groups.jsonl", [GroupRecord(group, payload)])
    record = RolloutRecord.of(7, Task(id="t", prompt="p"), group, payload, [TrajectoryAdvantage(0, 0, 0.5)])
    write_records(path := tmp_path / "s.parquet", [record])
    ((read,), (found,)) = read_records(path), read_groups(groups)
    outcomes = [read.episodes[1].trajectories[0].outcome, found.group.episodes[1].trajectories[0].outcome]
    assert outcomes == [failed("raised ValueError: \ufffd")] * 2


def test_any_reader_of_parquet_finds_episodes_by_what_they_got(tmp_path: Path) -> None:
    payload = (said("right"), said("wrong"))
    group = group_of(payload).with_scores((Score(1.0), Score(0.0)))
    task, assigned = Task(id="t", prompt=({"role": "user", "content": "2?"},)), [TrajectoryAdvantage(1, 0, -0.5)]
    write_records(path := tmp_path / "s.parquet", [RolloutRecord.of(7, task, group, payload, assigned)])
    (row,) = pq.read_table(path, filters=[("reward", "<", 0.5)]).to_pylist()
    names = ("step", "group_id", "episode", "prompt", "text", "advantage", "output_ids", "logprobs")
    assert [row[name] for name in names] == [7, 5, 1, "user: 2?", "wrong", -0.5, [3], [-0.5]]


def test_one_damaged_group_costs_no_other(tmp_path: Path) -> None:
    path = rollouts(tmp_path / "step_000010.parquet", [1.0] * 6)
    damage(path, 1)
    file = RolloutFile(path)
    assert [file.record(place).key.group_id for place in (0, 2)] == [0, 2]
    with pytest.raises(DataError, match="damaged"):
        file.record(1)


def test_a_damaged_end_of_a_file_is_no_error_of_the_disk(tmp_path: Path) -> None:
    path = rollouts(tmp_path / "step_000010.parquet", [1.0] * 6)
    whole = path.read_bytes()
    for place in range(len(whole) - 400, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(DataError):
            read_records(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b'{"step":1}\n'])
def test_what_is_no_file_of_rollouts_is_refused(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "step_000001.parquet").write_bytes(content)
    with pytest.raises(DataError, match="not a rollout file"):
        RolloutFile(path)


def test_a_record_has_the_metadata_its_step_was_planned_from() -> None:
    payload = (said("right"), said("broke"))
    group = group_of(payload).with_scores((Score(1.0), Score(None, "took longer than 10 s")))
    again = RolloutRecord.of(12, Task(id="t", prompt="p"), group, payload, []).group
    assert replace(again, weights=group.weights) == group


def test_sample_advantages_are_kept_and_not_shown_for_the_trajectory() -> None:
    payload = (said("a"), said("b"))
    assigned = [TrajectoryAdvantage(0, 0, 0.5, sample=0), TrajectoryAdvantage(1, 0, -0.5)]
    record = RolloutRecord.of(1, Task(id="t", prompt="p"), group_of(payload), payload, assigned)
    assert (record.assigned, record.advantages) == (tuple(assigned), ((None,), (-0.5,)))


def test_an_advantage_that_is_not_finite_comes_back_as_no_number(tmp_path: Path) -> None:
    payload = (said("a"),)
    record = RolloutRecord.of(
        1, Task(id="t", prompt="p"), group_of(payload), payload, [TrajectoryAdvantage(0, 0, float("inf"))]
    )
    path = tmp_path / "s.parquet"
    write_records(path, [replace(record, columns={"reference_logprobs": ((float("-inf"),),)})])
    (back,) = read_records(path)
    assert math.isnan(back.assigned[0].advantage) and back.columns["reference_logprobs"][0][0] == float("-inf")


@pytest.mark.parametrize("kind", [np.float32, torch.tensor])
def test_numbers_of_numpy_and_torch_are_stored_as_numbers(kind: Callable[[float], Any], tmp_path: Path) -> None:
    tenth, number = cast("float", np.float32(0.1)), kind(0.1)
    payload = (replace(said("a"), trajectories=(replace(said("a").trajectories[0], reward=np.float64(0.25)),)),)
    group = group_of(payload).with_scores((Score(tenth, parts={"exact": tenth}),))
    record = RolloutRecord.of(1, Task(id="t", prompt="p"), group, payload, [TrajectoryAdvantage(0, 0, number)])
    write_records(tmp_path / "s", [replace(record, columns={"values": ((tenth,),)})])
    write_groups(tmp_path / "g", [GroupRecord(group, payload)])
    (back,), (waiting,) = read_records(tmp_path / "s"), read_groups(tmp_path / "g")
    rewards = [episode.trajectories[0].reward for episode in (*back.episodes, *waiting.episodes)]
    numbers = [*rewards, back.assigned[0].advantage, back.parts[0]["exact"], back.columns["values"][0][0]]
    assert numbers == [tenth, 0.25, tenth, tenth, tenth]
    assert {type(number) for number in numbers} == {float}


def test_values_json_lacks_become_text_in_rows_and_raise_elsewhere(tmp_path: Path) -> None:
    info = {"price": Decimal("1.10"), "raw": b"x", "when": date(2024, 1, 2), "n": 3}
    task, payload = Task(id="t", prompt="p", info=info), (said("a"),)  # type: ignore[arg-type]
    record = RolloutRecord.of(1, task, group_of(payload), payload, [])
    assert record.task.info == {"price": "1.10", "raw": "b'x'", "when": "2024-01-02", "n": 3}
    write_records(tmp_path / "s", [record])
    assert read_records(tmp_path / "s") == [record]
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_records(tmp_path / "s", [replace(record, parts=({"exact": object()},))])  # type: ignore[dict-item]


def test_only_facts_that_outlive_the_process_are_saved(tmp_path: Path) -> None:
    group = replace(group_of(()), key=GroupKey(5, 3), payload=object(), columns={"reference_logprobs": object()})
    write_groups(path := tmp_path / "groups.jsonl", [GroupRecord(rolled_out(group), ())])
    (back,) = read_groups(path)
    assert (back.group.key, back.group.payload, back.group.columns, back.group.report) == ((5, 0), None, {}, None)
    fields = orjson.loads(path.read_bytes())["group"]
    assert fields["group_id"] == 5 and not {"key", "columns", "report"} & fields.keys()


def test_a_file_appears_whole_and_its_folder_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "step_000001.parquet"
    write_records(path, [])
    assert read_records(path) == []
    assert list(path.parent.iterdir()) == [path]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    payload = (said("x"),)
    write_groups(path, [GroupRecord(group_of(payload), payload)])
    with path.open("a") as lines:
        lines.write('{"group": {}, "episodes": []}\n')
    with pytest.raises(DataError, match=rf"{path}:2: not a record of this version"):
        read_groups(path)


@pytest.mark.parametrize(("name", "value"), [("step", "1"), ("replica", 3), ("step", True)])
def test_a_field_of_another_kind_is_refused(name: str, value: object) -> None:
    record = RolloutRecord.of(1, Task(id="t", prompt="p"), group_of((said("a"),)), (said("a"),), [])
    row = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "key"}
    plain = orjson.loads(orjson.dumps(row, default=as_plain, option=orjson.OPT_SERIALIZE_NUMPY))
    with pytest.raises(TypeError, match="should be"):
        decoder_of(RolloutRecord)({**plain, name: value})
