"""Replicas die, drain and are blocked under requests of session workers that are other processes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rlsys.agents.workflow import SingleTurn
from rlsys.errors import WorkerDied, WorkerError
from rlsys.types import POLICY, Assignment, GroupKey, Task
from tests.jobs import config_of
from tests.ray.crew import NUM_TOKENS, SIZE, Crew, assignment, busy, payload_of, sampled
from tests.ray.tools import Blocks
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.rollout_pool import RolloutPool
from workers.worker_set import WorkerSet


def test_requests_of_a_dead_replica_go_on_elsewhere_from_their_last_tokens(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(4)]
        before = await busy(pool, 2 * SIZE * 150)  # older than a second: their tokens are sent as they come
        pool.members[0].worker.kill()
        ends = await asyncio.gather(*groups)
        tokens = [t for end in ends for e in payload_of(end) for t in e.trajectories[0].turns]
        assert all(len(turn.output_ids) == NUM_TOKENS for turn in tokens)
        after = await sampled(pool)
        total = before["rollout-0"] + sum(num for name, num in after.items() if name != "rollout-0")
        num_again = total - 4 * SIZE * NUM_TOKENS  # below 0 by what it sampled between the count and its death
        assert num_again <= before["rollout-0"] / 2, "some were on their way, more on a busy machine; not all"
        assert not any("session" in failure.worker for failure in crew.failures)

    crew.played(scenario)


@pytest.mark.nightly
def test_requests_of_an_only_replica_wait_for_its_successor(cluster):
    crew = Crew(1, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        group = asyncio.create_task(pool.run(assignment(7)))
        await busy(pool, SIZE * 100)
        pool.members[0].worker.kill()
        end = await group
        after = await sampled(pool)
        assert end[0].replica in ("rollout-0", "rollout-0.1")
        assert after["rollout-0.1"] < SIZE * NUM_TOKENS, "it goes on, and does not begin again"
        turns = [turn for episode in payload_of(end) for turn in episode.trajectories[0].turns]
        assert [len(turn.output_ids) for turn in turns] == [NUM_TOKENS] * SIZE
        assert crew.recovered == ["rollout-0"]

    crew.played(scenario)


def test_the_groups_of_a_dead_session_worker_are_issued_again(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(2)]
        await busy(pool, 10)
        players = pool.pools[1]
        players.members[0].worker.kill()
        ends = await asyncio.gather(*groups, return_exceptions=True)
        (failure,) = [end for end in ends if isinstance(end, WorkerDied)]
        assert failure.worker == "session-0"
        await pool.restart("session-0", lambda worker, seconds: crew.recovered.append(worker))
        assert len(await pool.run(assignment(0))) == 1
        for load in await pool.loads():
            assert (load.stats.num_running, load.num_groups) == (0, 0), "the replicas forgot what it asked"

    crew.played(scenario)


@pytest.mark.nightly
def test_a_drained_replica_gives_its_requests_to_another(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(2)]
        await busy(pool, SIZE * 20)
        await pool._live()[0].worker.at(ReplicaWorker, "replica").call(ReplicaWorker.drain, POLICY)
        ends = await asyncio.gather(*groups)
        total = sum((await sampled(pool)).values())
        assert total == 2 * SIZE * NUM_TOKENS, "no token is sampled twice"
        assert len(ends) == 2

    crew.played(scenario)


@pytest.mark.nightly
def test_a_blocked_session_worker_is_named_with_its_line_and_blocks_no_other(cluster, tmp_path):
    crew = Crew(1, Blocks(), group_s=9.0)
    line = f"{Path(Blocks.run.__code__.co_filename).name}:{Blocks.run.__code__.co_firstlineno + 3} in Blocks.run"

    async def scenario(pool: RolloutPool) -> None:
        blocked = asyncio.create_task(pool.run(assignment(0, {"block": "yes"})))
        await asyncio.sleep(0)
        other = await pool.run(assignment(1, {"block": "no"}))
        assert other[0].group_id == 1
        with pytest.raises(WorkerError, match=re.escape(line)) as raised:
            await blocked
        assert raised.value.worker == "session-0"
        assert any(line in str(failure) for failure in crew.failures), "it is named before it is replaced"

    crew.played(scenario)


def test_a_slow_tool_keeps_no_weights_back_and_ends_nothing(cluster, model_path, data_path, tmp_path):
    """A group that waits for its tool holds its version at one replica; the other takes new weights meanwhile."""
    keys = [
        "rollout.replicas=2", "rollout.workflow=tests.ray.tools:Asks", "data.max_prompt_tokens=24",
        "rollout.max_new_tokens=16", "limits.group_s=4",
    ]  # fmt: skip
    crew, answer, done = WorkerSet.of(config_of(model_path, data_path, tmp_path, keys)), tmp_path / "a", tmp_path / "b"
    done.touch()

    def ask(group_id: int, file: Path, version: int) -> Assignment:
        task = Task(id="t", prompt="312>", info={"answer": str(file)})
        return Assignment(GroupKey(group_id, 1), task, 2, version, seed=group_id)

    async def main() -> None:
        await crew.ready()
        await crew.lines[POLICY].actor.publish(0)
        rollouts = crew.rollouts
        try:
            slow = asyncio.create_task(rollouts.run(ask(5, answer, 0)))
            while not (held := [load.replica for load in await rollouts.loads() if load.num_groups]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await crew.lines[POLICY].actor.publish(1)
            newer = [await rollouts.run(ask(group_id, done, 1)) for group_id in (6, 7, 8)]
            assert {view.oldest_version for (view,) in newer} == {1}
            assert held[0] not in {view.replica for (view,) in newer}
            await asyncio.sleep(5.0)  # longer than a group may wait for tokens: the tool's time does not count
            answer.touch()
            assert {span.version for span in (await slow)[0].versions} == {0}
        finally:
            await crew.close()

    asyncio.run(asyncio.wait_for(main(), 200))
