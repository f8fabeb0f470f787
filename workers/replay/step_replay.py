"""Recorded steps, computed again without Ray: `retrain` for steps of a run, `replay` for a step that failed.

`retrain` trains all ranks, the critic and the stabilizer again, bit for bit. Each rank reads the same files, plans the
same steps, and trains its part; ranks communicate only in collectives. Columns that other workers computed per group
are in the record. Columns per step are computed again, by the same code.

`replay` recomputes a failed step in one process, sample by sample, to find the first number that is not finite. Every
sample is its own micro-batch, in the same plan, with the same weights per token. No update is applied: the update that
failed is computed under the saved weights, from which it started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlsys.algorithm import Column, LossInputs, LossOutput
from rlsys.batch.packing import BatchPlan, MicroBatchPlan, RankPlan, plan_batch
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.loop.checkpoint import FailedStep
from rlsys.loop.checkpoint_files import ACTOR, CRITIC, GROUPS
from rlsys.replay.replay_results import (
    Comparison,
    NonFinite,
    ReplayedSample,
    ReplayedStep,
    RetrainedSteps,
    compare_metrics,
)
from rlsys.replay.rollout_json import GroupRecord, RolloutRecord, read_groups
from rlsys.replay.run_history import RecordedSteps
from rlsys.stabilizer import alone
from rlsys.types import POLICY
from workers.model.logprobs import trained_logprobs
from workers.model.lora import add_adapter
from workers.model.model_loading import CPU, load_model, load_tokenizer
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import (
    critic_optimizer_settings,
    local_gradients,
    optimizer_settings,
    squared_norms,
    trained_parameters,
)
from workers.train.rank_group import RankGroup, in_processes
from workers.train.reference_worker import ReferenceWorker
from workers.train.sharded import REFERENCE as PART_OF_REFERENCE
from workers.train.state_files import load_state
from workers.train.step_data import Part, RankStep, Score, mismatched_column
from workers.train.value_model import CriticBackend, load_value_model
from workers.transport.checksums import hash_of

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from rlsys.config import Config
    from rlsys.loop.learner import BatchShape

REFERENCE = "reference"

Stop: TypeAlias = "Callable[[int, BatchPlan, Sequence[RolloutRecord], FsdpBackend], None]"
"""Callback right before the last step is trained, with its number, its plan, its groups and the policy."""


@dataclass(frozen=True, slots=True)
class RetrainJob:
    """Everything that a rank needs to train the steps again."""

    config: Config
    shape: BatchShape
    recording: RecordedSteps
    on_gpu: frozenset[str]
    """Those of `POLICY`, `CRITIC` and `REFERENCE` that run on a GPU, one per rank."""

    def device(self, model: str, rank: int) -> torch.device:
        """Device of one rank's copy of a model."""
        return torch.device("cuda", rank) if model in self.on_gpu else CPU


def retrain(config: Config, shape: BatchShape, recording: RecordedSteps, stop: Stop | None = None) -> RetrainedSteps:
    """Train the steps of a recording again: in this process if the run had one rank, else in one process per rank.

    `stop` is for runs of one rank. Raises `ModelError`, `CheckpointError` or `DataError` for unreadable inputs,
    `TrainingError` if a step produces numbers that are not finite.
    """
    wanted = models_on_gpu(config)
    num_ranks = config.train.mesh.num_ranks
    on_gpu = wanted if torch.cuda.device_count() >= num_ranks else frozenset[str]()
    job = RetrainJob(config, shape, recording, on_gpu)
    if num_ranks == 1:
        hashes, metrics = _train(job, RankGroup(), stop)
    else:
        hashes, metrics = in_processes(num_ranks, partial(_train_rank, job), "training again")
    history, moved = recording.history, wanted - on_gpu
    versions = range(recording.start, recording.step + 1)
    return RetrainedSteps(
        run=str(recording.run),
        step=recording.step,
        beginning=recording.beginning,
        weights=tuple(
            Comparison(f"weights of version {version}", history.hashes.get(version), found)
            for version, found in zip(versions, hashes, strict=True)
        ),
        metrics=compare_metrics(history.ends[recording.step].metrics, metrics),
        device=f"computed on a CPU, where the run had a GPU: {', '.join(sorted(moved))}" if moved else "",
    )


def models_on_gpu(config: Config) -> frozenset[str]:
    """Models of a step that the run has on GPUs, by its sections `train`, `critic` and `reference`."""
    columns = config.algorithm.columns
    is_on_gpu = {
        POLICY: config.resources["actor"].num_gpus > 0,
        CRITIC: Column.VALUES in columns and config.resources["critic"].num_gpus > 0,
        REFERENCE: config.has_reference
        and bool(config.columns_of_steps)
        and config.resources["reference"].num_gpus > 0,
    }
    return frozenset(model for model, is_there in is_on_gpu.items() if is_there)


def _train_rank(job: RetrainJob, rank: int, address: str) -> tuple[list[str], dict[str, float]]:
    mesh = job.config.train.mesh
    ranks = RankGroup(rank, mesh.num_ranks, address=address).with_mesh(mesh)
    try:
        return _train(job, ranks)
    finally:
        ranks.close()


def _train(job: RetrainJob, ranks: RankGroup, stop: Stop | None = None) -> tuple[list[str], dict[str, float]]:
    """Hashes of the weights before the first step and after each; metrics of the last step."""
    recording, models = job.recording, Models(job, ranks)
    if recording.checkpoint is not None:
        models.load(recording.checkpoint)
    hashes, metrics = [models.hash()], {}
    for step in recording.steps:
        groups = recording.rollouts(step)
        cost = models.policy.pair_cost if ranks.num_ranks > 1 else 0.0
        plan = job.shape.plan(
            [g.group for g in groups], [g.assigned for g in groups], job.config.algorithm, step - 1, cost
        )
        if stop is not None and step == recording.step:
            stop(step, plan, groups, models.policy)
        columns = [{Column(name): rows for name, rows in group.columns.items()} for group in groups]
        data = StepData([group.episodes for group in groups], columns)
        metrics = models.train(plan[ranks.batch], data)
        hashes.append(models.hash())
    return hashes, metrics


class Models:
    """One rank of the policy and of the critic, if the run has one, and a separate reference model."""

    def __init__(self, job: RetrainJob, ranks: RankGroup) -> None:
        """Create all models as at version 0. Raises `ModelError`."""
        self._config, self._ranks = job.config, ranks
        config, device = job.config, partial(job.device, rank=ranks.rank)
        path, dtype, columns = config.model.path, config.dtype, config.algorithm.columns
        savings = config.train.savings
        self.policy = FsdpBackend(
            path, optimizer_settings(config), ranks, dtype=dtype, device=device(POLICY),
            savings=savings, lora=config.train.lora, replays_routing=config.train.routing_replay,
            sync=config.reference.sync,
        )  # fmt: skip
        self._stabilizer = config.stabilizer.start(self.policy.shards()) if config.stabilizer else None
        self._critic = self._reference = None
        if Column.VALUES in columns:
            own, settings = config.critic.path or path, critic_optimizer_settings(config)
            self._critic = CriticBackend(
                own, settings, ranks, dtype=dtype, device=device(CRITIC),
                savings=savings, lora=config.critic_lora,
            )  # fmt: skip
        if config.columns_of_steps and config.has_reference:
            distribution, max_tokens = config.rollout.distribution, config.micro_batch_tokens
            self._reference = ReferenceWorker(config.reference_path, dtype, distribution, max_tokens, device(REFERENCE))

    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the run. Raises `CheckpointError`."""
        self.policy.load(checkpoint / ACTOR, self._stabilizer)
        if self._critic is not None:
            self._critic.load(checkpoint / CRITIC)

    def train(self, plan: RankPlan, data: StepData) -> dict[str, float]:
        """Train one step of actor and critic. Returns their metrics."""
        config, algorithm = self._config, self._config.algorithm
        data = data.with_columns(self._columns(plan, data))
        with _threads(config.resources["actor"].threads):
            distribution, stabilizer = config.rollout.distribution, self._stabilizer
            metrics = self.policy.train_step(plan, data, algorithm, distribution=distribution, stabilizer=stabilizer)
        if self._critic is not None:
            with _threads(config.resources["critic"].threads):
                metrics |= self._critic.train_step(plan, data, algorithm)
        return metrics

    def hash(self) -> str:
        """Hash of the weights as they would be published; on other ranks than 0, hash of no weights."""
        return hash_of(self.policy.full_weights(getattr(torch, self._config.dtype)))

    def _columns(self, plan: RankPlan, data: StepData) -> dict[Column, StepColumn]:
        """Columns that are computed per step."""
        columns: dict[Column, StepColumn] = {}
        for kind in sorted(self._config.columns_of_steps):
            if self._reference is None:
                distribution = self._config.rollout.distribution
                with _threads(self._config.resources["actor"].threads):
                    columns[kind] = self.policy.reference(plan, data, kind, distribution)
            else:
                with _threads(self._config.resources["reference"].threads):
                    columns[kind] = self._reference.column_of_rank(plan, data, kind)
        if self._critic is not None:
            with _threads(self._config.resources["critic"].threads):
                columns[Column.VALUES] = self._critic.values(plan, data)
        return columns


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set torch's thread count, because the last bits of large sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Forward: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Tensor | None]]
"""From a micro-batch on the device to a number per trained token, and for a policy the entropy of its distribution."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """A model that the step trains."""

    name: Literal["policy", "critic"]
    module: nn.Module
    forward: Forward
    loss: Callable[[Tensor, LossInputs], LossOutput]


def replay(config: Config, folder: Path, failed: FailedStep) -> ReplayedStep:
    """Recompute the step in `folder`, on a GPU if the run trained on one and this machine has any.

    Raises `ModelError`, `CheckpointError` or `DataError`.
    """
    torch.set_num_threads(config.resources["actor"].threads)
    device = torch.device("cuda" if config.resources["actor"].num_gpus and torch.cuda.is_available() else "cpu")
    algorithm, records = config.algorithm, read_groups(folder / GROUPS)
    plan = plan_batch(
        [record.group for record in records],
        failed.assigned,
        algorithm.aggregation.with_budget(config.rollout.max_new_tokens),
        num_ranks=1,
        max_tokens=1,  # one sample per micro-batch
        num_updates=failed.num_updates,
        version=failed.version,
        skips_zeros=algorithm.skips_zero_advantages,
    )[0]
    is_critic = failed.model == "critic"
    critic = _critic(config, folder, device) if Column.VALUES in failed.columns else None
    trained = critic if is_critic else _policy(config, folder, device)
    assert trained is not None, "a critic that failed is in a run whose algorithm reads values"
    data = StepData([record.episodes for record in records], [{}] * len(records))
    columns = _columns(config, folder, plan, data, failed.columns, device, critic)
    step = RankStep(
        plan=plan, data=data.with_columns(columns), algorithm=algorithm, version=failed.version, device=device
    )
    tokenizer = load_tokenizer(config.model.path)
    score = torch.no_grad()(_scores(trained.module, config))
    updates = step.update_parts() if is_critic else step.whole(score, RankGroup())
    index = failed.update or 0
    parts = next(islice(updates, index, None))
    samples = tuple(_replay_sample(trained, index, part, records, tokenizer) for part in parts)
    models = [one for one in (trained, critic) if one]
    weights = _first_of((f"{one.name}'s {name}", p) for one in models for name, p in one.module.named_parameters())
    return ReplayedStep(failed.version + 1, failed.error, weights, samples, _not_reproduced(failed))


def _not_reproduced(failed: FailedStep) -> str | None:
    """Inputs of the step that came from weights before its first update, if those weights are not saved."""
    if not failed.update:
        return None
    name = f"update {failed.update + 1} begins from later weights, which are those that were kept"
    if failed.model == "critic":
        return f"the values of the start of the step ({name}); returns and advantages are made of other values here"
    return (
        f"the policy's logprobs of the start of the step ({name}); ratios to them are 1 here, and what is measured of "
        "the whole step is measured under later weights"
    )


def _policy(config: Config, folder: Path, device: torch.device) -> _Trained:
    lora, path = config.train.lora, config.model.path
    model = load_model(path, getattr(torch, config.dtype) if lora else torch.float32, device)
    if lora:
        add_adapter(model, lora, path, torch.float32)
    _restore(model, folder / ACTOR, model, config)
    forward = _scores(model, config, entropy_has_gradient=config.algorithm.differentiates_entropy)
    return _Trained("policy", model, forward, config.algorithm.loss)


def _critic(config: Config, folder: Path, device: torch.device) -> _Trained:
    lora, path = config.critic_lora, config.critic.path or config.model.path
    model = load_value_model(path, device, getattr(torch, config.dtype) if lora else torch.float32)
    if lora:
        add_adapter(model.base, lora, path, torch.float32)
    _restore(model, folder / CRITIC, model.base, config)
    return _Trained("critic", model, lambda batch: (model(batch), None), config.algorithm.value_loss)


def _reference(config: Config, folder: Path, device: torch.device) -> PreTrainedModel:
    if config.reference.sync is None:
        return load_model(config.reference_path, getattr(torch, config.dtype), device)
    model = load_model(config.reference_path, torch.float32, device)
    _restore(model, folder / ACTOR, model, config, PART_OF_REFERENCE)
    return model


def _restore(model: nn.Module, folder: Path, computing: nn.Module, config: Config, part: str = "model") -> None:
    """Load the weights in a part of a checkpoint, then cast those of `computing` as mixed precision does: values
    computed from positions stay in fp32."""
    load_state({part: trained_parameters(model)}, folder, num_ranks=1)
    for parameter in computing.parameters():
        parameter.data = parameter.data.to(getattr(torch, config.dtype))


def _scores(model: nn.Module, config: Config, *, entropy_has_gradient: bool = False) -> Score:
    """Logprobs and entropies of the trained tokens under the sampling distribution."""
    return lambda batch: trained_logprobs(
        cast("PreTrainedModel", model),
        batch,
        config.rollout.distribution,
        entropy_has_gradient=entropy_has_gradient,
    )


def _columns(
    config: Config,
    folder: Path,
    plan: RankPlan,
    data: StepData,
    kinds: Iterable[Column],
    device: torch.device,
    critic: _Trained | None,
) -> Mapping[Column, StepColumn]:
    """Columns of the step that other workers computed in the run."""
    wanted = set(kinds)
    made: dict[Column, Callable[[MicroBatchPlan], Tensor]] = {}
    if wanted & {Column.REFERENCE_LOGPROBS, Column.REFERENCE_MISMATCHED}:
        score = _scores(_reference(config, folder, device), config)
        made[Column.REFERENCE_LOGPROBS] = lambda one: score(data.micro_batch(one).to(device))[0]
        made[Column.REFERENCE_MISMATCHED] = lambda one: mismatched_column(data, one, plan.partners, score, device)
    if critic is not None:
        made[Column.VALUES] = lambda one: critic.forward(data.micro_batch(one).to(device))[0]
    with torch.no_grad():
        return {
            kind: [make(one).float().cpu().numpy() for one in plan.micro_batches]
            for kind, make in made.items()
            if kind in wanted
        }


def _first_of(named: Iterable[tuple[str, Tensor]], spell: Callable[[int], str] | None = None) -> NonFinite | None:
    """The first number that is not finite. With `spell`, numbers belong to tokens, and it is the text of a token."""
    for name, tensor in named:
        values, is_bad = tensor.detach().flatten(), ~tensor.isfinite().flatten()
        if is_bad.any():
            index = int(is_bad.byte().argmax())
            value = str(values[index].item())
            return NonFinite(name, value, index, spell(index)) if spell else NonFinite(name, value)
    return None


def _replay_sample(
    trained: _Trained, update: int, part: Part, records: Sequence[GroupRecord], tokenizer: PreTrainedTokenizerBase
) -> ReplayedSample:
    """Row of the only sample of a micro-batch, with its own gradient."""
    trained.module.zero_grad()
    (said_N, entropies_N), is_policy = trained.forward(part.batch), trained.name == "policy"
    inputs = replace(part.inputs, entropies_N=entropies_N)
    if is_policy and not part.is_scored:
        inputs = replace(inputs, proximal_logprobs_N=said_N.detach())
    output = trained.loss(said_N, inputs)
    loss = part.loss(output)
    loss.backward()
    gradients = local_gradients(trained.module)
    of_tokens = [  # in the order of computation: sampler, annotators, algorithm, model
        ("sampler's logprob", inputs.behavior_logprobs_N),
        *((str(kind), column_N) for kind, column_N in inputs.columns_N.items()),
        ("advantage", inputs.advantages_N),
        *([("return", inputs.returns_N)] if inputs.returns_N is not None else []),
        *((fact, torch.full_like(said_N, value)) for fact, value in inputs.facts.items()),
        ("logprob" if is_policy else "value", said_N),
        ("loss", output.loss_N),
    ]
    of_sample = [
        *((f"gradient of {name}", gradient) for name, gradient in gradients.items()),
        ("loss of the sample", loss),
        ("squared norm of its gradient in fp32", alone(squared_norms(gradients))),  # computed as in training
    ]

    def spell(token: int) -> str:
        return str(tokenizer.decode([int(part.batch.targets_N[token])]))

    (ref,) = part.samples
    group = records[ref.group].group
    return ReplayedSample(
        model=trained.name,
        update=update,
        group=group.group_id,
        task_id=group.task_id,
        episode=ref.episode,
        trajectory=ref.trajectory,
        sample=ref.sample,
        num_tokens=len(said_N),
        loss=loss.item(),
        grad_norm=math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values())),
        log_ratio_max=(said_N.detach() - inputs.behavior_logprobs_N).abs().max().item() if is_policy else None,
        non_finite=_first_of(of_tokens, spell) or _first_of(of_sample),
    )
