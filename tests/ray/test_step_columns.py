"""Actor, critic and reference on Ray: a step whose columns they make for each other, on two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import ray
from torch import Tensor

from rlsys.algorithm import Column, LossInputs, LossOutput, TokenAdvantages
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import MemorySavings
from rlsys.loop.checkpoint import copy_and_write
from rlsys.types import Distribution
from tests.training import SETTINGS, Surrogate, group_of, planned
from workers.ray.call_stream import PayloadRef
from workers.ray.cluster import Resources
from workers.ray.worker_process import start
from workers.train.ranks import ActorRank, ActorSpec, CriticRank, RankSpec
from workers.train.reference_worker import ReferenceWorker
from workers.train.train_handles import ActorHandle, CriticHandle, ReferenceHandle
from workers.transport.route import Route, TransportSpec

SMALL = Resources(num_cpus=0.1)


@dataclass(frozen=True, kw_only=True)
class Everything(Surrogate):
    """Asks for every column, and shows what it is given."""

    @property
    def columns(self) -> frozenset[Column]:
        return frozenset(Column)

    def token_advantages(self, inputs: LossInputs) -> TokenAdvantages:
        returns_N = inputs.advantages_N + 2
        return TokenAdvantages(returns_N - inputs.columns_N[Column.VALUES], returns_N)

    def value_loss(self, values_N: Tensor, batch: LossInputs) -> LossOutput:
        assert batch.returns_N is not None
        return LossOutput((values_N - batch.returns_N).square())

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        columns_N = batch.columns_N
        metrics_N = {
            "matched": logprobs_N.detach() - columns_N[Column.REFERENCE_LOGPROBS],
            "mismatched": columns_N[Column.POLICY_MISMATCHED] - columns_N[Column.REFERENCE_MISMATCHED],
            "pair": columns_N[Column.POLICY_MISMATCHED] - logprobs_N.detach(),
            "value": columns_N[Column.VALUES],
        }
        return LossOutput(super().loss(logprobs_N, batch).loss_N, metrics_N)


ALGORITHM = Everything()


@dataclass
class Trainers:
    actor: ActorHandle
    critic: CriticHandle
    reference: ReferenceHandle

    @classmethod
    def start(cls, model_path: Path, mesh: MeshSection) -> Trainers:
        actor = ActorSpec(
            model_path=str(model_path),
            dtype="float32",
            mesh=mesh,
            optimizer=SETTINGS,
            savings=MemorySavings(),
            lora=None,
            algorithm=ALGORITHM,
            stabilizer=None,
            distribution=Distribution(1.0),
            probe_length=0,
            replays_routing=False,
            sync=None,
            resources=SMALL,
        )
        critic = RankSpec(
            model_path=str(model_path),
            dtype="float32",
            mesh=mesh,
            optimizer=replace(SETTINGS, lr=0.1),
            savings=MemorySavings(),
            lora=None,
            algorithm=ALGORITHM,
            resources=SMALL,
        )
        ranks = range(mesh.num_ranks)
        score = partial(SMALL.build, partial(ReferenceWorker, str(model_path), "float32", Distribution(), 64))
        nowhere = Route((), TransportSpec("object_store"), 60.0)
        trains = [partial(ActorRank, rank, actor, nowhere) for rank in ranks]
        values = [partial(CriticRank, rank, critic, str(model_path)) for rank in ranks]
        return cls(
            ActorHandle(
                lambda _: [start(ActorRank, "actor", build, SMALL, 60.0) for build in trains],
                60.0,
                mesh.num_peers,
                has_pairs=True,
            ),
            CriticHandle(
                lambda _: [start(CriticRank, "critic", build, SMALL, 60.0) for build in values], 60.0, mesh.num_peers
            ),
            ReferenceHandle(lambda _: start(ReferenceWorker, "reference", score, SMALL, 60.0), 60.0),
        )

    async def step(self, num_batches: int) -> Mapping[str, float]:
        plan, payloads = planned(0, num_batches, ALGORITHM, num_updates=2)
        bare = [replace(group_of(i, p), payload=PayloadRef(ray.put((p,)), 0)) for i, p in enumerate(payloads)]
        groups = await self.reference.annotate(bare, Column.REFERENCE_LOGPROBS)
        await asyncio.gather(self.actor.fetch(groups, plan), self.critic.fetch(groups, plan))
        columns = {
            Column.VALUES: await self.critic.annotate_step(groups, plan, Column.VALUES),
            Column.REFERENCE_MISMATCHED: await self.reference.annotate_step(groups, plan, Column.REFERENCE_MISMATCHED),
        }
        both = await asyncio.gather(self.actor.train_step(plan, columns), self.critic.train_step(plan, columns))
        return {name: value for stats in both for name, value in stats.metrics.items()}

    async def close(self) -> None:
        await asyncio.gather(self.actor.close(), self.critic.close(), self.reference.close())


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "mesh", [MeshSection(shard=2), pytest.param(MeshSection(context=2), marks=pytest.mark.nightly)], ids=str
)
def test_every_column_reaches_the_rank_it_is_of(mesh: MeshSection, model_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        trainers = Trainers.start(model_path, mesh)
        await asyncio.gather(*(t.ready() for t in (trainers.actor, trainers.critic, trainers.reference)))
        first = await trainers.step(mesh.num_batches)
        await copy_and_write(trainers.actor.save(tmp_path / "actor"))
        await copy_and_write(trainers.critic.save(tmp_path / "critic"))
        second = await trainers.step(mesh.num_batches)
        await asyncio.gather(trainers.actor.load(tmp_path / "actor"), trainers.critic.load(tmp_path / "critic"))
        again = await trainers.step(mesh.num_batches)
        await trainers.close()
        assert first["mismatched"] == pytest.approx(0, abs=1e-5)
        assert abs(first["pair"]) > 1e-3
        assert first["value"] == first["critic/value_mean"] == 0
        assert abs(second["mismatched"]) > 1e-3 and abs(second["matched"]) > 1e-3
        assert second["value"] == pytest.approx(second["critic/value_mean"], rel=1e-5)
        assert second["value"] > 0.05
        assert again == pytest.approx(second, rel=1e-6, abs=1e-9)

    asyncio.run(asyncio.wait_for(scenario(), 290))
