"""Pool of reward workers: implements `rlsys.contracts.Rewards`."""

from __future__ import annotations

from rlsys.contracts import Graft, GroupScores
from rlsys.types import Group, Task
from workers.ray.batched_calls import Parcel, PayloadRef
from workers.ray.pool import Pool, PoolMember, PoolSpec
from workers.ray.remote_proxy import Chunks, Remote
from workers.reward.reward_worker import RewardWorker


class RewardPool(Pool[RewardWorker]):
    """Implements `Rewards`."""

    def __init__(self, supply: PoolSpec[RewardWorker]) -> None:
        super().__init__("reward", "scoring", supply)

    async def score(self, task: Task, group: Group) -> GroupScores:
        request = (task, group.group_id, group.payload)
        scored, _ = await self._do(await self._least_busy(), request, f"scoring group {group.group_id}")
        assert isinstance(scored, GroupScores)
        return scored

    async def graft(self, graft: Graft) -> Group:
        group, member = graft.group, await self._least_busy()
        parcel = Parcel.of((g.group_id, g.payload) for g in (group, graft.donor))
        with self._at_work(member):
            worker, arguments = member.worker, (parcel, graft.episode, graft.donor_episode, group.policy)
            versions, (chunk,) = await worker.split(RewardWorker.graft, 1, *arguments)
        return graft.applied(PayloadRef(chunk, 0), versions)

    async def _least_busy(self) -> PoolMember[RewardWorker]:
        await self._serving()
        return min(self._live(), key=lambda m: (m.num_running, m.index))

    def _send(self, worker: Remote[RewardWorker], requests: list[tuple[Task, int, object]]) -> Chunks:
        parcel = Parcel.of((group_id, payload) for _, group_id, payload in requests)
        return worker.stream(RewardWorker.score_each, [task for task, _, _ in requests], parcel)
