"""A node vanishes with the payloads of finished groups: they are named before any rank trains, and the others kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from rlsys.algorithm import Aggregation, Column, TrajectoryAdvantage
from rlsys.batch.packing import BatchPlan, RankPlan, plan_batch
from rlsys.contracts import Replacement, TrainedGroup, TrainStats
from rlsys.errors import PayloadLost
from rlsys.loop.checkpoint import copy_and_write
from rlsys.replay.rollout_json import read_groups
from rlsys.types import Episode, Group, Score, Task, Trajectory, Turn, VersionSpan
from tests.groups import group
from workers.ray.call_stream import CallStream, answer_in_chunks
from workers.ray.cluster import NO_MATHS, node_ids
from workers.ray.fault_tolerant_pool import PoolSpec
from workers.ray.worker_process import Remote, start
from workers.reward.reward_worker import RewardPool, RewardWorker
from workers.train.ranks import ActorRank
from workers.train.recorder import Recorder
from workers.train.reference_worker import ReferenceWorker
from workers.train.token_columns import TokenColumns
from workers.train.train_handles import ActorHandle, RecorderHandle, ReferenceHandle

Payload = tuple[Episode, ...]
BIG = "x" * 200_000
"""More than Ray keeps outside its object store."""


class Writer:
    """Makes payloads on its own node."""

    def run(self, group_ids: list[int]) -> AsyncIterator[object]:
        return answer_in_chunks(group_ids, self._made)

    async def _made(self, group_id: int) -> tuple[int, Payload]:
        return group_id, payload_of(group_id)


class Rank(ActorRank):
    """Has no model."""

    def __init__(self, address: str) -> None: ...

    def train_step(self, plan: RankPlan, kinds: Any, *columns: Any) -> TrainStats:
        data = self.take_data(kinds, columns)
        return TrainStats({"num_tokens": sum(data.num_trained(m) for m in plan.micro_batches)}, 0.0)

    def pair_cost(self) -> float:
        return 0.0

    def columns(self) -> tuple[int, list[TokenColumns]]:
        return 0, []


class Judge(RewardWorker):
    """Likes everything."""

    async def score(self, task: Task, episodes: Payload) -> tuple[Score, ...]:
        return tuple(Score(1.0) for _ in episodes)


class Reader(ReferenceWorker):
    def __init__(self) -> None: ...

    def logprobs(self, payload: Payload) -> Any:
        return (-1.0,)

    def column_of_rank(self, plan: RankPlan, data: Any, kind: Column) -> Any:
        return [data.num_trained(m) for m in plan.micro_batches]


def payload_of(group_id: int) -> Payload:
    turn = Turn((1,), (2,), (-0.5,), (VersionSpan(0, 1),), "stop", BIG)
    return (Episode((Trajectory(str(group_id), (turn,)),)),) * 2


async def made(writer: Remote[Writer], group_ids: list[int]) -> list[Group]:
    calls = CallStream[int, int]("writer", "writing", lambda group_ids: writer.stream(Writer.run, group_ids))
    refs = [ref for _, ref in await asyncio.gather(*(calls.call(group_id) for group_id in group_ids))]
    return [replace(group(group_id), payload=ref) for group_id, ref in zip(group_ids, refs, strict=True)]


def test_groups_lost_with_a_node_are_named_and_others_survive(three_nodes: Cluster, model_path: Path, tmp_path: Path):
    here = node_ids()[0]
    doomed = three_nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    (there,) = [node for node in node_ids() if node == doomed.node_id]
    writers = [start(Writer, "writer", Writer, NO_MATHS, 60.0, place=node) for node in (here, there)]
    actor = ActorHandle(lambda _: [start(Rank, f"actor-{r}", Rank, NO_MATHS, 60.0, place=here) for r in range(2)], 60.0)
    build = partial(Judge, (), 1, 60.0)
    rewards = RewardPool(PoolSpec(1, lambda name: start(Judge, name, build, NO_MATHS, 60.0, place=here), 60.0, 6.0, 1))
    write = partial(Recorder, str(model_path))
    actor.recorder = RecorderHandle(lambda _: start(Recorder, "recorder", write, NO_MATHS, 60.0, place=here), 60.0)
    reference = ReferenceHandle(lambda _: start(Reader, "reference", Reader, NO_MATHS, 60.0, place=here), 60.0)

    task = Task(id="t", prompt="1")

    def planned(groups: list[Group]) -> BatchPlan:
        assigned = [tuple(TrajectoryAdvantage(episode, 0, 1.0) for episode in range(2)) for _ in groups]
        return plan_batch(groups, assigned, Aggregation(), num_ranks=2, max_tokens=1000)

    async def trained(groups: list[Group]) -> TrainStats:
        await actor.fetch(groups, planned(groups))
        return await actor.train_step(planned(groups), {})

    async def recorded(groups: list[Group]) -> None:
        path = tmp_path / "rollouts" / "step_000001.parquet"
        await copy_and_write(actor.record(path, 1, [TrainedGroup(i, task, g, ()) for i, g in enumerate(groups)]))

    async def scenario() -> None:
        await asyncio.gather(rewards.ready(), reference.ready(), actor.ready())
        kept, gone = await made(writers[0], [1, 2]), await made(writers[1], [3, 4])
        groups = [*kept, *gone]
        three_nodes.remove_node(doomed, allow_graceful=False)
        for attempt in (
            lambda: trained(groups),
            lambda: reference.annotate(groups, Column.REFERENCE_LOGPROBS),
            lambda: reference.annotate_step(groups, planned(groups), Column.REFERENCE_MISMATCHED),
            lambda: actor.save_groups(tmp_path / "groups.jsonl", groups),
            lambda: recorded(groups),
        ):
            with pytest.raises(PayloadLost) as raised:
                await attempt()
            assert set(raised.value.group_ids) == {3, 4}
        outcomes = await asyncio.gather(*(rewards.score(task, g) for g in groups), return_exceptions=True)
        assert [isinstance(outcome, PayloadLost) for outcome in outcomes] == [False, False, True, True]
        pairs = ((kept[0], {3}), (gone[1], {3, 4}))
        for replacement, lost in ((Replacement(host, 0, gone[0], 1), lost) for host, lost in pairs):
            with pytest.raises(PayloadLost) as raised:
                await rewards.replace_episode(replacement)
            assert set(raised.value.group_ids) == lost
        assert (await rewards.replace_episode(Replacement(kept[0], 0, kept[1], 1))).group_id == 1
        assert (await trained(kept)).metrics == {"num_tokens": 2}
        assert len(await reference.annotate(kept, Column.REFERENCE_LOGPROBS)) == 2
        assert len(await reference.annotate_step(kept, planned(kept), Column.REFERENCE_MISMATCHED)) == 2
        await actor.save_groups(tmp_path / "groups.jsonl", kept)
        assert [record.group.group_id for record in read_groups(tmp_path / "groups.jsonl")] == [1, 2]
        await actor.close()
        await rewards.close()
        await reference.close()

    asyncio.run(asyncio.wait_for(scenario(), 200))
