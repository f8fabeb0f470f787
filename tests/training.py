"""Steps to train, on one rank and on two; and small algorithms whose losses show what reached them.

Two ranks are two processes over gloo.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rlsys.algorithm import Aggregation, Algorithm, LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.algorithm import Ranks as Collectives
from rlsys.batch.packing import BatchPlan, plan_batch
from rlsys.batch.samples import Sample, meta_of
from rlsys.batch.tensors import StepData
from rlsys.types import Episode, Group, GroupKey, Trajectory
from tests.models import episode_of, random_prompt, random_sample
from tests.processes import forks_with_imports
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

T = TypeVar("T")
SETTINGS = OptimizerSettings(lr=1e-2, eps=1e-4, weight_decay=0.1, warmup_steps=2, total_steps=10, final_lr_fraction=0.1)
"""AdamW divides a gradient by its size: with a small `eps`, rounding of one near 0 is a share of the learning rate."""


@dataclass(frozen=True, kw_only=True)
class Surrogate(Algorithm):
    """Reward less the group's mean; an importance-weighted loss, against both policies it is given."""

    group_size: int = 4
    over: Literal["tokens", "sequences", "budget", "agents"] = "tokens"

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.over, 7 if self.over == "budget" else 0)

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        rewards = [episode.trajectories[0].reward or 0.0 for episode in group.episodes]
        mean = sum(rewards) / len(rewards)
        for (e, t), _ in group.trajectories():
            yield TrajectoryAdvantage(e, t, rewards[e] - mean)

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        ratio_N = (logprobs_N - batch.proximal_logprobs_N).exp()
        weights_N = (batch.proximal_logprobs_N - batch.behavior_logprobs_N).exp().clamp(max=2)
        return LossOutput(-weights_N * ratio_N * batch.advantages_N, {"policy/ratio_mean": ratio_N.detach()})


@dataclass(frozen=True, kw_only=True)
class Measuring(Surrogate):
    """Whitened, and leaves out the half of the step's tokens that drifted most."""

    over: Literal["tokens", "sequences", "budget", "agents"] = "sequences"

    @property
    def whitens(self) -> bool:
        return True

    @property
    def has_step_statistics(self) -> bool:
        return True

    def step_statistics(self, step: LossInputs, ranks: Collectives) -> Mapping[str, float]:
        own_N = (step.proximal_logprobs_N - step.behavior_logprobs_N).abs()
        sorted_N = ranks.gather(own_N).sort().values
        middle = len(sorted_N) // 2
        num_samples = ranks.sum(torch.tensor([float(len(step.lengths_S))]))
        return {"bound": float(sorted_N[middle - 1 : middle + 1].mean()), "num_samples": num_samples.item()}

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        output = super().loss(logprobs_N, batch)
        drift_N = (batch.proximal_logprobs_N - batch.behavior_logprobs_N).abs()
        is_kept_N = (drift_N < batch.facts["bound"]).float()
        num_samples_N = torch.full_like(drift_N, batch.facts["num_samples"])
        return LossOutput(output.loss_N * is_kept_N, {"kept": is_kept_N, "num_samples": num_samples_N})


PLAIN = Surrogate()


def random_team(rng: random.Random, size: int) -> tuple[Episode, ...]:
    """Episodes of a lead, some with a subagent beside, some of whose context was rewritten: two samples."""
    prompt, other = random_prompt(rng), random_prompt(rng)
    return tuple(_team(rng, prompt, other, i) for i in range(size))


def _team(rng: random.Random, prompt: tuple[int, ...], other: tuple[int, ...], i: int) -> Episode:
    (lead,) = episode_of(random_sample(rng, prompt, 1 + (i % 3 == 2)), rng.random()).trajectories
    if i % 2:
        return Episode((lead,))
    runs = [episode_of(_fresh(rng, start)).trajectories[0].turns for start in (other, (7, *other))]
    return Episode((lead, Trajectory("subagent", tuple(turn for run in runs for turn in run), parent=0)))


def _fresh(rng: random.Random, prompt: tuple[int, ...]) -> Sample:
    return random_sample(rng, prompt)


def group_of(group_id: int, payload: tuple[Episode, ...]) -> Group:
    return Group(
        key=GroupKey(group_id, 1),
        task_id=str(group_id),
        permit_version=0,
        replica="r0",
        episodes=meta_of(payload),
        versions=(),
        weights=(),
        payload=payload,
    )


def planned(
    step: int, num_ranks: int, algorithm: Algorithm, num_updates: int = 1, max_tokens: int = 40
) -> tuple[BatchPlan, list[tuple[Episode, ...]]]:
    """Five groups of random samples a version old, in micro-batches so small that ranks differ in number and one runs
    fillers."""
    rng = random.Random(step)
    payloads = [random_team(rng, 4) for _ in range(5)]
    groups = [group_of(group_id, payload) for group_id, payload in enumerate(payloads)]
    assigned = [list(algorithm.advantages(g)) for g in groups]
    aggregation = algorithm.aggregation
    plan = plan_batch(
        groups, assigned, aggregation, num_ranks=num_ranks, max_tokens=max_tokens, num_updates=num_updates
    )
    return tuple(replace(of_rank, staleness=1.0) for of_rank in plan), payloads


def data_of(payloads: list[tuple[Episode, ...]]) -> StepData:
    return StepData(payloads, [{} for _ in payloads])


class JoinedRanks:
    """Processes that have joined each other, and stay: starting one costs seconds."""

    def __init__(self, folder: Path, num_ranks: int = 2) -> None:
        address = f"file://{folder}/ranks"
        self._pools = [
            ProcessPoolExecutor(1, forks_with_imports(), initializer=_join, initargs=(rank, num_ranks, address))
            for rank in range(num_ranks)
        ]

    def __call__(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """What `function(..., its ranks)` returned on each rank."""
        return [f.result(timeout=100) for f in [pool.submit(_run, function, *arguments) for pool in self._pools]]

    def close(self) -> None:
        for pool in self._pools:
            pool.submit(_leave)
        for pool in self._pools:
            pool.shutdown()


_joined: list[RankGroup] = []


def _join(rank: int, num_ranks: int, address: str) -> None:
    torch.set_num_threads(1)
    _joined.append(RankGroup(rank, num_ranks, address=address, timeout_s=90))


def _run(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments, _joined[0])


def _leave() -> None:
    _joined.pop().close()


def everything_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their path in it."""
    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name, each in saved.items():
        assert isinstance(each, TensorStorageMetadata)
        tensors[name] = torch.empty(each.size, dtype=each.properties.dtype)
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit, or not in both."""
    return sorted((a.keys() ^ b.keys()) | {name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])})


Outcome: TypeAlias = tuple[dict[str, Tensor], list[dict[str, float]]]
"""Weights after some steps, and the metrics of each."""


def assert_alike(actual: Outcome, expected: Outcome, within: float = 5e-3) -> None:
    """To rounding; weights within a part of the learning rate."""
    assert actual[0].keys() == expected[0].keys()
    for name, weight in expected[0].items():
        torch.testing.assert_close(
            actual[0][name], weight, rtol=1e-4, atol=within * SETTINGS.lr, msg=lambda m, n=name: f"{n}: {m}"
        )
    for a, b in zip(actual[1], expected[1], strict=True):
        exact = [{name: value for name, value in of.items() if "ratio_p" not in name} for of in (a, b)]
        assert exact[0] == pytest.approx(exact[1], rel=2e-4, abs=1e-5)
