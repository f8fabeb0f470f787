"""Persistent buffers travel with the weights: loaded, published, saved, and exported under an adapter."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.config.lora_section import LoraSection
from rlsys.config.mesh_section import MeshSection
from rlsys.types import Distribution
from rlsys.weight_sync.manifest import Manifest, VersionPart, content_hash
from tests.contract.engines import CONTEXT, VLLM, ask, change, logprobs_by_hand, run
from tests.contract.test_families import local_of, vllm_of
from tests.families import WIDE, tiny
from tests.models import save_model
from tests.training import PLAIN, SETTINGS, JoinedRanks, data_of, differing, planned
from workers.engines.engine import Engine, EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.model.lora import published_tensors
from workers.model.model_loading import load_model
from workers.model.model_tensors import persistent_buffers
from workers.train.fsdp import FsdpBackend
from workers.train.rank_group import RankGroup
from workers.train.sharded import BUFFERS
from workers.train.state_files import saved_shapes
from workers.transport.buckets import PartLayout, ReceivedWeights
from workers.transport.checksums import hash_of

BIASES = [f"model.layers.{layer}.mlp.e_score_correction_bias" for layer in range(2)]
"""Buffers of MiniMax M2, which Transformers narrows in a model of bfloat16."""
EXACT = persistent_buffers(tiny("minimax_m2"))


@pytest.fixture
def minimax(tmp_path: Path) -> str:
    return save_model(tmp_path / "minimax", tiny("minimax_m2"))


def backend_of(path: str, ranks: RankGroup | None = None, *, moved: float = 0.0, **choices) -> FsdpBackend:
    """A trainer whose buffers are so far from those of the model's files."""
    backend = FsdpBackend(path, SETTINGS, ranks or RankGroup(), **choices)
    for buffer in persistent_buffers(backend._model).values():
        buffer += moved
    return backend


def test_rotary_frequencies_are_no_persistent_buffers() -> None:
    model = tiny("minimax_m2")
    assert [*persistent_buffers(model)] == BIASES
    assert {name for name, _ in model.named_buffers()} > {*BIASES, "model.rotary_emb.inv_freq"}


def test_a_bfloat16_model_has_the_buffers_of_its_files_exactly(minimax: str) -> None:
    model = load_model(minimax, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert differing(persistent_buffers(model), EXACT) == []
    assert all(not torch.equal(buffer, buffer.bfloat16().float()) for buffer in EXACT.values())


@dataclass(frozen=True)
class Job:
    path: str
    mesh: MeshSection


def part_of(job: Job, ranks: RankGroup) -> tuple[VersionPart, np.ndarray, dict[str, Tensor]]:
    """A rank's part of a model with a counter, its bytes, and on rank 0 the tensors gathered."""
    arranged = ranks.with_mesh(job.mesh)
    backend = backend_of(job.path, arranged, moved=0.1, dtype="bfloat16")
    backend._model.register_buffer("num_tokens", torch.tensor(1 << 40))
    backend._model.register_buffer("scratch", torch.ones(3), persistent=False)
    layout = PartLayout(backend.published_rectangles())
    memory = np.zeros(layout.num_bytes, np.uint8)
    layout.write(memory, backend.owned_tensors())
    part = layout.part(memory, VersionPart(0, arranged.rank, job.mesh.num_ranks, ()))
    return part, memory, backend.full_weights(torch.bfloat16)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [MeshSection(shard=4), MeshSection(shard=2, tensor=2, expert=2)], ids=str)
def test_ranks_publish_each_buffer_once_in_its_own_dtype(
    mesh: MeshSection, four_ranks: JoinedRanks, tmp_path: Path
) -> None:
    told = four_ranks(part_of, Job(save_model(tmp_path, tiny("glm4_moe")), mesh))
    manifest, gathered = Manifest(tuple(part for part, _, _ in told)), told[0][2]
    received = ReceivedWeights(manifest, [memory for _, memory, _ in told], "relay-0")
    assert differing(dict(received), gathered) == []
    assert manifest.hash == hash_of(gathered)
    dtypes = {spec.name: spec.dtype for spec in received.specs.values()}
    assert dtypes["num_tokens"] == "int64" and received["num_tokens"].item() == 1 << 40
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == "float32"
    assert dtypes["model.layers.1.mlp.gate.weight"] == "bfloat16"
    assert not [name for name in dtypes if "scratch" in name or "inv_freq" in name]


def test_an_engine_in_bfloat16_computes_with_the_published_buffers(minimax: str) -> None:
    trainer = backend_of(minimax, moved=0.1, dtype="bfloat16", probe_length=16)
    weights, probe = trainer.full_weights(torch.bfloat16), trainer.probe()
    assert probe is not None
    spec = EngineSpec(model_path=minimax, slots=1, max_context=CONTEXT, dtype="bfloat16")
    model = load_model(minimax, torch.bfloat16)

    async def scenario(engine: Engine) -> float:
        await change(engine, 4, weights)
        assert content_hash(await engine.checksums()) == hash_of(weights)
        return probe.difference(await engine.score(probe.token_ids))

    make = partial(LocalEngine, model, spec, stop_token_ids=frozenset(), name="r", version=3)
    assert run(make, scenario) < 0.01
    assert differing(persistent_buffers(model), persistent_buffers(trainer._model)) == []


def saved(path: str, folder: Path, ranks: RankGroup) -> dict[str, Tensor]:
    backend = backend_of(path, ranks, moved=0.1)
    backend.save(folder).wait()
    return backend.full_weights(torch.float32)


def test_a_checkpoint_restores_buffers_on_another_number_of_ranks(
    minimax: str, two_ranks: JoinedRanks, tmp_path: Path
) -> None:
    weights, _ = two_ranks(saved, minimax, tmp_path / "state")
    assert saved_shapes(tmp_path / "state", BUFFERS) == dict.fromkeys(BIASES, (4,))
    for load in (FsdpBackend.load, FsdpBackend.load_weights):
        backend = backend_of(minimax)
        assert differing(backend.full_weights(torch.float32), weights) == BIASES
        load(backend, tmp_path / "state")
        assert differing(backend.full_weights(torch.float32), weights) == []


def test_a_checkpoint_without_buffers_leaves_those_of_the_model(minimax: str, tmp_path: Path) -> None:
    backend = backend_of(minimax)
    state = {part: tensors for part, tensors in backend._state().items() if part != BUFFERS}
    backend._state_writer.save(state, tmp_path / "state").wait()
    expected = backend.full_weights(torch.float32)
    for load in (FsdpBackend.load, FsdpBackend.load_weights):
        other = backend_of(minimax)
        next(iter(other.parameters().values())).data.zero_()
        load(other, tmp_path / "state")
        assert differing(other.full_weights(torch.float32), expected) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_exported_with_the_buffers_of_its_base(dtype, minimax: str, tmp_path: Path) -> None:
    lora = LoraSection(rank=4, alpha=8.0, targets=["q_proj", "v_proj"])
    backend = backend_of(minimax, lora=lora, dtype=dtype)
    plan, payloads = planned(0, 1, PLAIN)
    backend.train_step(plan[0], data_of(payloads), PLAIN, distribution=Distribution(1.0))
    assert differing(persistent_buffers(backend._model), EXACT) == []
    assert not {*BIASES} & backend.full_weights(torch.float32).keys()
    backend.save(tmp_path / "state").wait()
    assert saved_shapes(tmp_path / "state", BUFFERS) == {}
    backend.export(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert differing(persistent_buffers(merged), EXACT) == []
    if dtype == "float32":
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            torch.testing.assert_close(merged(ids).logits, backend._model(ids).logits, rtol=0, atol=1e-5)


@VLLM
def test_vllm_takes_the_buffers_of_a_version(tmp_path: Path) -> None:
    """In a process of its own: the end of an engine of vLLM takes the groups of others in its process with it."""
    script = "import sys, pathlib; from tests.contract.test_buffers import compare; compare(pathlib.Path(sys.argv[1]))"
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def compare(tmp_path: Path) -> None:
    """Compare logprobs after a change of buffers. Not to the last digit: vLLM has the numbers of this activation in
    bfloat16, whatever the model computes in."""
    model = tiny("apertus", **WIDE)
    path = save_model(tmp_path, model)
    before = {name: tensor.detach().clone() for name, tensor in published_tensors(model).items()}
    for name, buffer in persistent_buffers(model).items():
        buffer.fill_(0.75 if name.endswith("beta") else -0.125)
    ids = tuple(range(3, 33))
    expected = logprobs_by_hand(model, ask(prompt=ids[:1]), ids[1:])

    async def scenario(engine: Engine) -> tuple[tuple[float, ...], tuple[float, ...]]:
        await change(engine, 4, before)
        stale = await engine.score(ids)
        await change(engine, 5, {name: tensor.detach() for name, tensor in published_tensors(model).items()})
        return stale, await engine.score(ids)

    for make in (local_of, vllm_of):
        stale, logprobs = run(partial(make, path), scenario)
        assert logprobs == pytest.approx(expected, abs=0.01)
        assert max(abs(a - b) for a, b in zip(stale, expected, strict=True)) > 0.1
