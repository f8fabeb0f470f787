"""What ranks publish: in every layout, all parts together are the weights of the trainer, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from torch import Tensor

from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.config.train_section import NO_SAVINGS, MemorySavings
from rlsys.errors import WeightsMismatch
from rlsys.types import Distribution
from rlsys.weight_sync.manifest import Manifest, VersionPart
from tests.by_day import first_by_day
from tests.families import SPLIT_FAMILIES, tiny
from tests.models import save_model
from tests.training import SETTINGS, JoinedRanks, Surrogate, data_of, differing, planned
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup
from workers.transport.buckets import PartLayout, ReceivedWeights, bucket_hash
from workers.transport.checksums import hash_of

ONE = MeshSection()
TWO = [MeshSection(shard=2), MeshSection(replicate=2), MeshSection(tensor=2), MeshSection(context=2)]
FOUR = [
    MeshSection(shard=4),
    MeshSection(shard=2, tensor=2),
    MeshSection(replicate=2, shard=2),
    MeshSection(replicate=2, tensor=2),
    MeshSection(shard=2, context=2),
]


@dataclass(frozen=True, kw_only=True)
class Job:
    model_path: str
    mesh: MeshSection = ONE
    dtype: Literal["float32", "bfloat16"] = "float32"
    savings: MemorySavings = NO_SAVINGS
    lora: LoraSection | None = None


Published = tuple[VersionPart, list[np.ndarray], dict[str, Tensor]]


def published(job: Job, ranks: RankGroup) -> Published:
    """A rank's part after a step, its buckets, and, on rank 0, the weights gathered."""
    arranged = ranks.with_mesh(job.mesh)
    backend = FsdpBackend(job.model_path, SETTINGS, arranged, dtype=job.dtype, savings=job.savings, lora=job.lora)
    algorithm = Surrogate()
    plan, payloads = planned(0, job.mesh.num_batches, algorithm, max_tokens=1000)
    backend.train_step(plan[arranged.batch], data_of(payloads), algorithm, distribution=Distribution(1.0))
    layout = PartLayout(backend.published_rectangles(), bucket_bytes=4096)
    memory = np.zeros(layout.num_bytes, np.uint8)
    layout.write(memory, backend.owned_tensors())
    part = layout.part(memory, VersionPart(1, arranged.rank, job.mesh.num_ranks, ()))
    buckets = [memory[start:end] for start, end in zip(layout.bounds[:-1], layout.bounds[1:], strict=True)]
    return part, buckets, backend.full_weights(backend.dtype)


def assert_whole(told: list[Published]) -> None:
    manifest = Manifest(tuple(part for part, _, _ in told))
    buckets = [bucket for _, own, _ in told for bucket in own]
    received, gathered = ReceivedWeights(manifest, buckets, "relay-0"), told[0][2]
    assert differing(dict(received), gathered) == []
    assert manifest.hash == hash_of(gathered)
    assert [bucket_hash(data) for data in buckets] == [bucket.hash for bucket in manifest.buckets]
    assert manifest.num_bytes < 1.5 * sum(tensor.nbytes for tensor in gathered.values()) + 4096 * len(told)


@pytest.mark.parametrize("dtype", first_by_day(["bfloat16", "float32"]))
@pytest.mark.parametrize("mesh", [ONE, *TWO, *FOUR], ids=str)
def test_the_parts_of_all_ranks_are_the_weights(
    mesh: MeshSection, dtype, model_path: str, two_ranks: JoinedRanks, four_ranks: JoinedRanks
) -> None:
    job = Job(model_path=model_path, mesh=mesh, dtype=dtype)
    match mesh.num_ranks:
        case 1:
            told = [published(job, RankGroup())]
        case 2:
            told = two_ranks(published, job)
        case _:
            told = four_ranks(published, job)
    assert_whole(told)
    sizes = [part.num_bytes for part, _, _ in told]
    assert max(sizes) < 1.6 * sum(sizes) / len(sizes), "every rank publishes its share"


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedRanks]:
    ranks = JoinedRanks(tmp_path_factory.mktemp("rendezvous_of_eight"), 8)
    yield ranks
    ranks.close()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_ranks_publish_the_weights(dtype, model_path: str, eight_ranks: JoinedRanks) -> None:
    assert_whole(eight_ranks(published, Job(model_path=model_path, mesh=MeshSection(shard=4, tensor=2), dtype=dtype)))


@pytest.mark.parametrize("family", first_by_day(SPLIT_FAMILIES, 3))
def test_every_family_is_published_from_split_layers(family: str, four_ranks: JoinedRanks, tmp_path: Path) -> None:
    expert = 2 if family in ("gpt_oss", "qwen3_moe", "mixtral") else 1
    tensor, context = (1, 2) if family == "gpt_oss" else (2, 1)  # gpt-oss has no plan for tensor
    mesh = MeshSection(shard=2, tensor=tensor, context=context, expert=expert)
    assert_whole(four_ranks(published, Job(model_path=save_model(tmp_path, tiny(family)), mesh=mesh)))


def test_offloaded_shards_are_published(model_path: str, four_ranks: JoinedRanks) -> None:
    savings = MemorySavings("full", "update", offload=True)
    job = Job(model_path=model_path, mesh=MeshSection(shard=2, tensor=2), savings=savings, dtype="bfloat16")
    assert_whole(four_ranks(published, job))


@pytest.mark.parametrize("mesh", [MeshSection(shard=2), MeshSection(replicate=2)], ids=str)
def test_an_adapter_is_published_by_its_ranks(mesh: MeshSection, model_path: str, two_ranks: JoinedRanks) -> None:
    told = two_ranks(published, Job(model_path=model_path, mesh=mesh, lora=LoraSection(rank=4), dtype="bfloat16"))
    assert_whole(told)
    assert all("lora" in name for name in told[0][2])


def test_the_hash_of_a_version_is_that_of_any_layout(
    model_path: str, two_ranks: JoinedRanks, four_ranks: JoinedRanks
) -> None:
    def hash_from(told: list[Published]) -> str:
        return Manifest(tuple(part for part, _, _ in told)).hash

    job = Job(model_path=model_path)
    two = hash_from(two_ranks(untrained, Job(model_path=model_path, mesh=MeshSection(tensor=2))))
    four = hash_from(four_ranks(untrained, Job(model_path=model_path, mesh=MeshSection(shard=4))))
    assert hash_from([untrained(job, RankGroup())]) == two == four


def untrained(job: Job, ranks: RankGroup) -> Published:
    """A rank's part of the initial weights."""
    backend = FsdpBackend(job.model_path, SETTINGS, ranks.with_mesh(job.mesh))
    layout = PartLayout(backend.published_rectangles())
    memory = np.zeros(layout.num_bytes, np.uint8)
    layout.write(memory, backend.owned_tensors())
    return layout.part(memory, VersionPart(0, ranks.rank, job.mesh.num_ranks, ())), [memory], {}


def test_a_version_of_which_a_piece_lacks_is_refused(model_path: str, two_ranks: JoinedRanks) -> None:
    told = two_ranks(published, Job(model_path=model_path, mesh=MeshSection(shard=2)))
    part, buckets, _ = told[0]
    with pytest.raises(
        WeightsMismatch, match=r"relay-3 while serving version 1: \d+ tensors are not whole, as model\."
    ):
        ReceivedWeights(Manifest((part,)), buckets, "relay-3")
