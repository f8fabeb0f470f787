"""Weights that go wrong on their way to a replica are noticed before a token sampled from them is trained."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pytest
from torch import Tensor

from rlsys import Config
from rlsys.agents.workflow import SingleTurn
from rlsys.launch.preflight import look_up
from rlsys.loop.build_driver import build_driver
from rlsys.monitoring.events import Events
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.types import POLICY, Sampling
from rlsys.weight_sync.manifest import Manifest, TensorSpec
from rlsys.weight_sync.relay import Relay, RelayPeer, Store
from tests.jobs import config_of
from workers.engines.engine import EngineSpec
from workers.ray.cluster import Resources
from workers.ray.fault_tolerant_pool import PoolSpec
from workers.ray.worker_process import Remote, start
from workers.relay.relay_pool import RayRelays
from workers.rollout.replica_weights import WeightChange
from workers.rollout.rollout_pool import RolloutPool
from workers.rollout.rollout_worker import ReplicaSpec, RolloutSpec, RolloutWorker
from workers.transport.checksums import checksum_of, spec_of
from workers.worker_set import PolicyWorkers, WorkerSet, start_actor, start_rewards, start_rollouts

Lie = Literal["a damaged bucket", "a bucket damaged on its way", "bytes of the version before", "the version before"]
FAULTY = 2
"""The version that is faulty, once."""


class LyingRelay(Relay):
    """Serves the first replica that asks for version `FAULTY` something else."""

    def __init__(self, name: str, place: str, store: Store, transfer_s: float, lie: Lie) -> None:
        super().__init__(name, place, store, transfer_s)
        self._lie: Lie = lie
        self._before: tuple[Manifest, list[Any]] | None = None
        self._has_lied = False

    async def accept(self, version: int, rank: int, sources: Sequence[RelayPeer]) -> None:
        await super().accept(version, rank, sources)
        if version == FAULTY - 1:
            self._before = await super().newest(version)

    async def newest(self, at_least: int) -> tuple[Manifest, list[Any]]:
        manifest, refs = await super().newest(at_least)
        if manifest.version != FAULTY or self._has_lied:
            return manifest, refs
        self._has_lied = True
        assert self._before is not None
        if self._lie == "the version before":
            return self._before
        if self._lie == "bytes of the version before":
            return manifest, self._before[1]
        first = (await self._store.fetch(refs[0], self.name)).copy()  # type: ignore[attr-defined]
        first[0] ^= 1
        damaged = await self._store.own(first)
        if self._lie == "a damaged bucket":
            self._buckets[manifest.buckets[0].hash] = damaged
        return manifest, [damaged, *refs[1:]]


@pytest.mark.parametrize(
    ("lie", "failures"),
    [
        ("a damaged bucket", [r"relay-\w+ while keeping weights: bucket \w+ of version 2 was damaged in memory"]),
        pytest.param("a bucket damaged on its way", [], marks=pytest.mark.nightly),
        pytest.param("bytes of the version before", [], marks=pytest.mark.nightly),
        pytest.param(
            "the version before", ["rollout.* asked for version 2 or newer, and got 1"], marks=pytest.mark.nightly
        ),
    ],
)
def test_tokens_of_a_replica_with_wrong_weights_are_never_trained(
    lie: Lie, failures: Sequence[str], cluster, model_path, data_path, tmp_path
):
    config = config_of(model_path, data_path, tmp_path, ["rollout.replicas=2", "checkpoint.every=0"])
    relays = RayRelays.start(60.0, LyingRelay, lie)
    assert_trained(config, relays, start_rollouts(config, {POLICY: relays}), failures)


def test_logprobs_reveal_an_engine_that_ignores_its_new_weights(cluster, model_path, data_path, tmp_path):
    config = config_of(model_path, data_path, tmp_path, ["rollout.replicas=2", "checkpoint.every=0", "train.lr=1e-2"])
    relays = RayRelays.start(60.0)
    engine = EngineSpec(
        engine="local", model_path=str(model_path), dtype="float32", slots=16, max_context=16, kv_cache="keep",
        tensor_parallel=1, step_s=60.0, load_s=60.0,
    )  # fmt: skip
    replica = ReplicaSpec(engine=engine, change=WeightChange("between", tolerance=1e-3), pulls="newest")
    spec = RolloutSpec(
        policies={POLICY: replica}, sampling=Sampling(max_new_tokens=8), max_prompt_tokens=8,
        workflow=SingleTurn(), resources=Resources(), group_s=60.0, max_losses=3,
    )  # fmt: skip

    def one(name: str) -> Remote[RolloutWorker]:
        return start(RolloutWorker, name, partial(lazy, name, spec, relays), spec.resources, 30.0)

    rollouts = RolloutPool(PoolSpec(2, one, 60.0, silence_s=6.0, max_attempts=3))
    assert_trained(config, relays, rollouts, ["rollout.* is tolerated; before the change it held version 1"])


async def lazy(name: str, spec: RolloutSpec, relays: RayRelays) -> RolloutWorker:
    """A replica whose engine has the checksums of version `FAULTY`, and computes with the one before; its successor
    works."""
    worker = await RolloutWorker.of(name, spec, {POLICY: relays.route}, plays=True)
    engine = worker.replica.replicas[POLICY]._engine
    honest = engine.load
    given: list[Mapping[str, Tensor]] = []

    async def load(version: int, weights: Mapping[str, Tensor]) -> None:
        given.append(weights)
        is_faulty = version == FAULTY and "." not in name
        await honest(version, given[-2] if is_faulty else weights)

    async def checksums() -> Mapping[TensorSpec, int]:
        return {spec_of(name, tensor): checksum_of(tensor) for name, tensor in given[-1].items()}

    engine.load, engine.checksums = load, checksums
    return worker


def assert_trained(config: Config, relays: RayRelays, rollouts: RolloutPool, failures: Sequence[str]) -> None:
    """Train to the end: there are these failures and no others, and every token trained is of the weights it claims."""
    config.run_dir.mkdir()
    actor, rewards = start_actor(config, relays), start_rewards(config)
    crew = WorkerSet({POLICY: PolicyWorkers(relays, actor)}, rollouts, rewards)
    events = Events([JsonlSink(config.run_dir)])

    async def main() -> int:
        await crew.ready()
        try:
            return await build_driver(config, crew.workers(), look_up(config).train, events).run(0)
        finally:
            await crew.close()

    assert asyncio.run(asyncio.wait_for(main(), 200)) == 4
    events.close()
    details = [e["detail"] for e in rows(config.run_dir / "events.jsonl") if e["kind"] == "worker_failed"]
    assert all(any(re.search(text, detail) for detail in details) for text in failures), details
    assert all(any(re.search(text, detail) for text in failures) for detail in details), details
    metrics = rows(config.run_dir / "metrics.jsonl")
    assert max(row["sampler/logp_diff_max"] for row in metrics) < 1e-4
    assert max(row["sampler/probe_diff"] for row in metrics) < 1e-3
    assert metrics[-1]["async/dropped"] == 0


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
