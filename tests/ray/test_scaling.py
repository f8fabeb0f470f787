"""Replicas join a running job and leave it: no token is lost, and no group."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlsys.agents.workflow import SingleTurn
from tests.ray.commands import ENDLESS, Job, job_in, rlsys
from tests.ray.crew import NUM_TOKENS, SIZE, Crew, assignment, busy, payload_of, sampled
from workers.rollout.rollout_pool import RolloutPool

GROUPS = 4


async def lengths(groups: list[asyncio.Task]) -> list[int]:
    """Tokens of each reply, once all groups have ended."""
    ends = await asyncio.gather(*groups)
    return [len(t.output_ids) for end in ends for e in payload_of(end) for t in e.trajectories[0].turns]


def test_a_leaving_replica_hands_its_requests_over_with_their_tokens(cluster):
    crew = Crew(2, SingleTurn())
    gone: list[str] = []

    async def scenario(pool: RolloutPool) -> None:
        for each in pool.pools:
            each.on_departure = lambda name, seconds: gone.append(name)
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(GROUPS)]
        before = await busy(pool, SIZE * 20)
        pool.resize(1)
        assert await lengths(groups) == [NUM_TOKENS] * SIZE * GROUPS
        after = await sampled(pool)
        assert after.keys() == {"rollout-0"} and not crew.failures
        num_left = GROUPS * SIZE * NUM_TOKENS - before["rollout-1"]
        assert after["rollout-0"] <= num_left, "what the other had sampled is not sampled again"
        assert before["rollout-0"] < after["rollout-0"]
        while len(gone) < 2:  # noqa: ASYNC110  (the end of a pool's background work announces itself by this alone)
            await asyncio.sleep(0.02)
        assert sorted(gone) == ["rollout-1", "session-1"]
        assert len(pool.processes) == 1

    crew.played(scenario)


def test_a_joining_replica_samples_and_one_that_comes_after_another_left_has_a_name_of_its_own(cluster):
    crew = Crew(1, SingleTurn())
    came: asyncio.Queue[str] = asyncio.Queue()

    async def scenario(pool: RolloutPool) -> None:
        pool.on_arrival = lambda name, seconds: came.put_nowait(name)
        pool.resize(2)
        assert await came.get() == "rollout-1"
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(GROUPS)]
        assert min((await busy(pool, SIZE)).values()) > 0, "both sample"
        pool.resize(1)
        pool.resize(2)
        assert await came.get() == "rollout-1.1"
        assert await lengths(groups) == [NUM_TOKENS] * SIZE * GROUPS
        assert not crew.failures

    crew.played(scenario)


@pytest.mark.nightly
def test_a_replica_that_is_wanted_no_more_before_it_is_ready_never_joins(cluster):
    crew = Crew(1, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        pool.resize(3)
        pool.resize(1)
        assert [member.name for member in pool.members] == ["rollout-0"]
        assert await lengths([asyncio.create_task(pool.run(assignment(0)))]) == [NUM_TOKENS] * SIZE
        assert not crew.failures

    crew.played(scenario)


@pytest.mark.nightly
def test_a_replica_that_dies_while_it_leaves_takes_no_group_with_it(cluster):
    crew = Crew(2, SingleTurn())

    async def scenario(pool: RolloutPool) -> None:
        groups = [asyncio.create_task(pool.run(assignment(n))) for n in range(GROUPS)]
        await busy(pool, SIZE * 20)
        leaving = pool.members[1].worker
        pool.resize(1)
        leaving.kill()
        assert await lengths(groups) == [NUM_TOKENS] * SIZE * GROUPS
        assert [member.name for member in pool.members] == ["rollout-0"]

    crew.played(scenario)


def kinds(job: Job, kind: str) -> list[dict]:
    lines = (job.run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    return [row for row in map(json.loads, (line for line in lines if line.endswith("\n"))) if row["kind"] == kind]


@pytest.mark.nightly
def test_a_run_whose_replicas_go_from_one_to_three_and_back_trains_what_an_undisturbed_one_does(
    model_path: Path, data_path: Path, tmp_path: Path
):
    job = job_in(tmp_path, model_path, data_path)
    job.keys += ["ray=6", "checkpoint.every=0", "record.rollouts_every=0"]
    with job.train(ENDLESS) as run:
        run.wait_until(lambda: len(job.steps) > 1)
        assert rlsys("scale", job.run_dir, "rollouts=3").code == 0
        run.wait_until(lambda: len(kinds(job, "worker_joined")) >= 2)
        at = len(job.steps)
        run.wait_until(lambda: len(job.steps) > at + 2)
        assert rlsys("scale", job.run_dir, "rollouts=1").code == 0
        run.wait_until(lambda: len(kinds(job, "worker_left")) >= 2)
        at = len(job.steps)
        run.wait_until(lambda: len(job.steps) > at + 1)
        run.interrupt()
        run.end()
    assert {row["worker"] for row in kinds(job, "worker_joined")} >= {"rollout-1", "rollout-2"}
    assert not kinds(job, "worker_failed") and not kinds(job, "group_dropped")
    weights = {row["version"]: row["hash"] for row in kinds(job, "weights_published")}
    groups = [row["group_ids"] for row in kinds(job, "step_done")]
    refused = rlsys("scale", job.run_dir, "rollouts=2")
    assert refused.code == 2 and "no run is running in" in refused.stderr

    (tmp_path / "calm").mkdir()
    calm = job_in(tmp_path / "calm", model_path, data_path)
    with calm.train(len(groups), "ray=6", "checkpoint.every=0", "record.rollouts_every=0") as run:
        assert run.end().code == 0
    assert [row["group_ids"] for row in kinds(calm, "step_done")] == groups
    calm_weights = {row["version"]: row["hash"] for row in kinds(calm, "weights_published")}
    assert all(weights[version] == one for version, one in calm_weights.items() if version in weights)
    assert len(weights.keys() & calm_weights.keys()) >= len(groups)
