"""One training run whose samples have an exact age in versions, in one process and without Ray.

All parts are those of a real run: the FSDP back-end, the algorithm, the local engine, gradient alignment control. Only
the asynchrony is simulated, so that it is exact and repeatable: before each step the engine loads the weights of
`staleness` versions ago. At the end it loads the final weights and answers held-out tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pydantic
import torch
from transformers.utils.logging import disable_progress_bar

from algorithms.aipo import AIPO
from algorithms.cispo import CISPO
from algorithms.corrections import Geometric, SequenceTis, Tis
from algorithms.fields import RULES
from algorithms.gac import GAC
from algorithms.grpo import GRPO
from algorithms.gspo import GSPO
from algorithms.m2po import M2PO
from algorithms.policy_gradient import PolicyGradient
from benchmarks.measure import group_of
from examples.sort.prepare import prepare_seed
from examples.sort.reward import exact_sort
from rlsys.algorithm import LossInputs, LossOutput
from rlsys.batch.packing import plan_batch
from rlsys.batch.tensors import StepData
from rlsys.config.train_section import LrStaleness
from rlsys.data.task_file import load_tasks
from rlsys.routing.requests import Request
from rlsys.types import Distribution, Episode, Group, PolicyVersion, Sampling, Task, Trajectory, Turn
from rlsys.util.seeds import group_seed, request_seed
from workers.engines.engine import EngineSpec
from workers.engines.local.local_engine import LocalEngine
from workers.model.model_loading import load_model
from workers.text.tokenizer import TextTokenizer
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

SAMPLED = Distribution(1.0)

if TYPE_CHECKING:
    from torch import Tensor

SAMPLING = Sampling(temperature=1.0, max_new_tokens=7)
MAX_CONTEXT = 16
MAX_TOKENS = 16384
"""Tokens of a micro-batch; every batch here fits in one."""
EDITION = 4
"""Edition of the lab. Raise it with any change to this folder, an algorithm or the trainer that changes outcomes, so
that old runs do not count as current ones."""
EXAM_GROUPS, EXAM_SIZE, EXAM_SEED = 32, 8, 1_000_003
"""Number of held-out tasks for the final weights, samples of each, and their seed in every run."""
DEFAULT = "none"
"""GRPO with its defaults: no correction, because its clipped ratio is against the sampler."""
BLIND = "age ignored"
UNCAPPED = "aipo without a cap"
"""Every token weighs its whole ratio to the sampler, whatever that is."""


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=RULES)
class Blind(GRPO):
    """GRPO that treats every sample as fresh: its gradient is the advantage times that of the logprob, at any age."""

    def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
        return super().loss(logprobs_N, replace(batch, behavior_logprobs_N=batch.proximal_logprobs_N))


ALGORITHMS: Mapping[str, PolicyGradient] = {
    DEFAULT: GRPO(),
    "tis": GRPO(correction=(Tis(),)),
    "sequence_tis": GRPO(correction=(SequenceTis(),)),
    "geometric .8 to 1.25, tis": GRPO(correction=(Geometric(low=0.8, high=1.25), Tis())),
    "cispo": CISPO(),
    "m2po": M2PO(),
    "gspo": GSPO(),
    UNCAPPED: AIPO(rho=1e9),
    BLIND: Blind(),
}
"""GRPO with the correction of that name, or another algorithm with its defaults."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run. The recipe is that of `examples/sort` at half its batch."""

    seed: int = 0
    staleness: int = 0
    algorithm: str = DEFAULT
    """One of `ALGORITHMS`, with its correction for the age of a token."""
    gac: GAC = field(default_factory=GAC)
    groups: int = 16
    group_size: int = 8
    lr: float = 3e-4
    lr_staleness: LrStaleness = "none"
    """As `train.lr_staleness`."""
    updates: int = 1
    """Optimizer updates of a step."""
    steps: int = 160
    edition: int = EDITION

    def sampled_from(self, version: PolicyVersion) -> PolicyVersion:
        """Version that samples the data of `version`: the same version in calibration steps, then `staleness` versions
        earlier, but none from before."""
        first = self.gac.synchronous_steps
        return version if version < first else max(first, version - self.staleness)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of a run."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of the samples of each step, from the version `Run.sampled_from`."""
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    """Metrics of `KEPT`, by step; None where a step has none."""
    final_reward: float = 0.0
    """Mean reward of the final weights on held-out tasks."""
    cpu_s: float = 0.0


KEPT = (
    "gac/cosine",
    "gac/regime",
    "gac/update_cosine",
    "gac/c_low",
    "gac/c_high",
    "policy/entropy",
    "sampler/ess",
    "optim/grad_norm",
)


def train(run: Run) -> Outcome:
    """Train the tiny policy with the settings of `run`; the same run gives the same outcome, bit for bit."""
    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.process_time()
    folder, _ = prepare_seed(run.seed)
    outcome = asyncio.run(_trained(run, folder))
    return replace(outcome, cpu_s=round(time.process_time() - began, 2))


async def _trained(run: Run, folder: Path) -> Outcome:
    outcome = Outcome(metrics={name: [] for name in KEPT})
    algorithm = replace(ALGORITHMS[run.algorithm], group_size=run.group_size)
    settings = OptimizerSettings(
        lr=run.lr, warmup_steps=5, total_steps=run.steps, final_lr_fraction=0.1, lr_staleness=run.lr_staleness
    )
    model = str(folder / "model")
    backend = FsdpBackend(model, settings, RankGroup())
    stabilizer = run.gac.start(backend.shards())
    snapshots = {0: backend.full_weights(torch.float32)}
    sampler = Sampler(model, run.groups * run.group_size)
    tasks, held_out = load_tasks(folder / "train.jsonl"), load_tasks(folder / "eval.jsonl")[:EXAM_GROUPS]
    metrics: Mapping[str, float] = {}
    try:
        for version in range(run.steps):
            source = run.sampled_from(version)
            await sampler.take(source, snapshots[source])
            group_ids = range(version * run.groups, (version + 1) * run.groups)
            issued = {group_id: tasks[group_id % len(tasks)] for group_id in group_ids}
            groups = await sampler.groups(issued, run.group_size, run.seed)
            settled = algorithm.finalize_advantages(groups, metrics)
            plan = plan_batch(
                groups,
                settled.groups,
                algorithm.aggregation,
                num_ranks=1,
                max_tokens=MAX_TOKENS,
                num_updates=run.updates,
                version=version,
            )
            data = StepData([group.payload for group in groups], [{} for _ in groups])  # type: ignore[misc]
            metrics = backend.train_step(plan[0], data, algorithm, distribution=SAMPLED, stabilizer=stabilizer)
            snapshots[version + 1] = backend.full_weights(torch.float32)
            for old in [old for old in snapshots if old < run.sampled_from(version + 1)]:
                del snapshots[old]
            outcome.rewards.append(_reward_of(groups))
            for name in KEPT:
                outcome.metrics[name].append(round(metrics[name], 5) if name in metrics else None)
        await sampler.take(run.steps, snapshots[run.steps])
        exam = await sampler.groups(dict(enumerate(held_out)), EXAM_SIZE, EXAM_SEED)
        return replace(outcome, final_reward=_reward_of(exam))
    finally:
        await sampler.engine.close()


class Sampler:
    """Local engine and the tokenizer of its model."""

    def __init__(self, model: str, num_slots: int) -> None:
        self._text = TextTokenizer.load(model)
        self.engine = LocalEngine(
            load_model(model, torch.float32),
            EngineSpec(model_path=model, slots=num_slots, max_context=MAX_CONTEXT),
            stop_token_ids=self._text.stop_ids,
            name="sampler",
        )

    async def take(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Sample from these weights from here on."""
        if version != self.engine.version:
            await self.engine.pause()
            await self.engine.load(version, weights)
            await self.engine.resume()

    async def groups(self, tasks: Mapping[int, Task], group_size: int, seed: int) -> list[Group]:
        """Return scored groups, with their payloads, of these tasks by group id."""

        async def group(group_id: int, task: Task) -> Group:
            seeds = [request_seed(group_seed(seed, group_id), member, 0) for member in range(group_size)]
            sampled = (self._episode(task, f"{group_id}/{member}", seed) for member, seed in enumerate(seeds))
            return group_of(group_id, tuple(await asyncio.gather(*sampled)))

        return await asyncio.gather(*(group(group_id, task) for group_id, task in tasks.items()))

    async def _episode(self, task: Task, name: str, seed: int) -> Episode:
        prompt_ids = self._text.encode(task.prompt)
        done = await self.engine.generate(Request(name, prompt_ids, SAMPLING, seed))
        assert done.finish is not None
        text = self._text.decode(done.output_ids)
        turn = Turn(prompt_ids, done.output_ids, done.logprobs, done.versions, done.finish, text, SAMPLING)
        return Episode((Trajectory("policy", (turn,), reward=exact_sort(text, str(task.answer))),))


def _reward_of(groups: Sequence[Group]) -> float:
    return round(fmean(t.reward for group in groups for _, t in group.trajectories() if t.reward is not None), 5)
