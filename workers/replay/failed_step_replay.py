"""Recompute a failed step in one process, sample by sample, to find the first number that is not finite.

Every sample is its own micro-batch, in the same plan, with the same weights per token. No update is applied: the update
that failed is computed under the saved weights, from which it started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlsys.algorithm import LossInputs, LossOutput, Signal
from rlsys.batch.packing import MicroBatchPlan, RankPlan, plan_batch
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.loop.checkpoint import ACTOR, CRITIC, GROUPS, FailedStep
from rlsys.replay.replay_results import NonFinite, ReplayedSample, ReplayedStep
from rlsys.replay.rollout_log import GroupRecord, read_groups
from workers.train import train_checkpoint as checkpoint
from workers.train.logprobs import Scorer
from workers.train.model_loading import load_model, load_tokenizer
from workers.train.optimizer import local_gradients, squared_norm
from workers.train.rank_group import RankGroup
from workers.train.step_data import Part, RankStep, mismatched
from workers.train.value_model import load_value_model

if TYPE_CHECKING:
    from rlsys.batch.tensors import StepColumn
    from rlsys.config import Config

Forward: TypeAlias = Callable[[MicroBatch], Tensor]
"""From a micro-batch on the device to a number per trained token."""


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
    torch.set_num_threads(config.train.threads)
    device = torch.device("cuda" if config.train.num_gpus and torch.cuda.is_available() else "cpu")
    algorithm, records = config.algorithm, read_groups(folder / GROUPS)
    plan = plan_batch(
        [record.group for record in records],
        failed.assigned,
        algorithm.aggregation.with_budget(config.rollout.max_new_tokens),
        num_ranks=1,
        max_tokens=1,  # one sample per micro-batch
        num_updates=failed.num_updates,
    ).of_rank(0)
    is_critic = failed.model == "critic"
    critic = _critic(config, folder, device) if Signal.VALUES in failed.signals else None
    trained = critic if is_critic else _policy(config, folder, device)
    assert trained is not None, "a critic that failed is in a run whose algorithm reads values"
    data = StepData([record.episodes for record in records], [{}] * len(records))
    columns = _columns(config, plan, data, failed.signals, device, critic)
    step = RankStep(
        plan=plan, data=data.with_columns(columns), algorithm=algorithm, version=failed.version, device=device
    )
    table = _Table(records, plan, load_tokenizer(config.model.path))
    updates = step.shaped() if is_critic else step.whole(torch.no_grad()(trained.forward), RankGroup())
    index = failed.update or 0
    samples = table.rows(trained, index, next(islice(updates, index, None)))
    weights = next((bad for one in (trained, critic) if one and (bad := _bad_weights(one))), None)
    return ReplayedStep(failed.version + 1, failed.error, weights, tuple(samples), _not_reproduced(failed))


def _not_reproduced(failed: FailedStep) -> str | None:
    """Inputs of the step that came from weights before its first update, if those weights are not saved."""
    if not failed.update:
        return None
    name = (
        f"update {failed.update + 1} of {failed.num_updates} begins from later weights, which are those that were kept"
    )
    if failed.model == "critic":
        return f"the values of the start of the step ({name}); returns and advantages are made of other values here"
    return (
        f"the policy's logprobs of the start of the step ({name}); ratios to them are 1 here, and what is measured of "
        "the whole step is measured under later weights"
    )


def _policy(config: Config, folder: Path, device: torch.device) -> _Trained:
    model = load_model(config.model.path, torch.float32, device)
    _restore(model, folder / ACTOR)
    _cast(model, config)
    scorer, temperature = Scorer(model), config.rollout.temperature
    return _Trained("policy", model, lambda batch: scorer(batch, temperature)[0], config.algorithm.loss)


def _critic(config: Config, folder: Path, device: torch.device) -> _Trained:
    model = load_value_model(config.critic.path or config.model.path, device)
    _restore(model, folder / CRITIC)
    _cast(model.base, config)
    return _Trained("critic", model, model, config.algorithm.value_loss)


def _restore(model: nn.Module, folder: Path) -> None:
    checkpoint.load({"model": dict(model.named_parameters())}, folder, num_ranks=1)


def _cast(model: nn.Module, config: Config) -> None:
    """Cast parameters only, as mixed precision does: values computed from positions stay in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, config.model.dtype))


def _columns(
    config: Config,
    plan: RankPlan,
    data: StepData,
    signals: Iterable[Signal],
    device: torch.device,
    critic: _Trained | None,
) -> Mapping[Signal, StepColumn]:
    """Columns of the step that other workers computed in the run."""

    def column(make: Callable[[MicroBatchPlan], Tensor]) -> StepColumn:
        with torch.no_grad():
            return [make(one).float().cpu().numpy() for update in plan.updates for one in update]

    columns: dict[Signal, StepColumn] = {}
    wanted = set(signals)
    if wanted & {Signal.REFERENCE_LOGPROBS, Signal.REFERENCE_MISMATCHED}:
        model = load_model(config.model.path, getattr(torch, config.model.dtype), device)
        scorer, temperature = Scorer(model), config.rollout.temperature

        def score(batch: MicroBatch) -> Tensor:
            return scorer(batch, temperature)[0]

        if Signal.REFERENCE_LOGPROBS in wanted:
            columns[Signal.REFERENCE_LOGPROBS] = column(lambda one: score(data.micro_batch(one).to(device)))
        if Signal.REFERENCE_MISMATCHED in wanted:
            columns[Signal.REFERENCE_MISMATCHED] = column(
                lambda one: mismatched(data, one, plan.partners, score, device)
            )
    if critic is not None:
        columns[Signal.VALUES] = column(lambda one: critic.forward(data.micro_batch(one).to(device)))
    return columns


def _bad_weights(trained: _Trained) -> NonFinite | None:
    named = ((f"{trained.name}'s {name}", parameter) for name, parameter in trained.module.named_parameters())
    return _first_of_tensors(named)


def _first_of_tensors(named: Iterable[tuple[str, Tensor]]) -> NonFinite | None:
    for name, tensor in named:
        if not (is_finite := tensor.isfinite()).all():
            return NonFinite(name, str(tensor[~is_finite][0].item()))
    return None


def _first_of_figures(figures: Mapping[str, float]) -> NonFinite | None:
    return next((NonFinite(name, str(value)) for name, value in figures.items() if not math.isfinite(value)), None)


@dataclass(frozen=True, slots=True)
class _Table:
    """Builds the rows of the report."""

    records: list[GroupRecord]
    plan: RankPlan
    tokenizer: PreTrainedTokenizerBase

    def rows(self, trained: _Trained, update: int, parts: Iterable[Part]) -> Iterator[ReplayedSample]:
        """Rows of one update, one per sample, each with its own gradient."""
        for plan, part in zip(self.plan.updates[update], parts, strict=True):
            yield self._row(trained, update, plan, part)

    def _row(self, trained: _Trained, update: int, plan: MicroBatchPlan, part: Part) -> ReplayedSample:
        trained.module.zero_grad()
        said_N = trained.forward(part.batch)
        inputs = part.inputs
        if trained.name == "policy" and not part.is_scored:
            inputs = replace(inputs, proximal_logprobs_N=said_N.detach())
        output = trained.loss(said_N, inputs)
        loss = part.loss(output)
        loss.backward()
        gradients = local_gradients(trained.module)
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        squares = squared_norm(gradients).item()  # computed as in training
        is_policy = trained.name == "policy"
        log_ratio_N = (said_N.detach() - inputs.behavior_logprobs_N).abs()
        (ref,) = plan.samples
        group = self.records[ref.group].group
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
            grad_norm=norm,
            log_ratio_max=log_ratio_N.max().item() if is_policy else None,
            non_finite=self._first(part.batch, inputs, "logprob" if is_policy else "value", said_N, output)
            or _first_of_tensors((f"gradient of {name}", gradient) for name, gradient in gradients.items())
            or _first_of_figures({"loss of the sample": loss.item(), "squared norm of its gradient in fp32": squares}),
        )

    def _first(
        self, batch: MicroBatch, inputs: LossInputs, name: str, said_N: Tensor, output: LossOutput
    ) -> NonFinite | None:
        """First non-finite number in the order of computation: sampler, annotators, algorithm, model."""
        numbers: list[tuple[str, Tensor]] = [("sampler's logprob", inputs.behavior_logprobs_N)]
        numbers += [(str(signal), column_N) for signal, column_N in inputs.columns_N.items()]
        numbers += [("advantage", inputs.advantages_N)]
        numbers += [("return", inputs.returns_N)] if inputs.returns_N is not None else []
        numbers += [(fact, torch.full_like(said_N, value)) for fact, value in inputs.facts.items()]
        numbers += [(name, said_N.detach()), ("loss", output.loss_N.detach())]
        for what, values_N in numbers:
            if len(bad := (~values_N.isfinite()).nonzero()):
                token = int(bad[0, 0])
                token_id = int(batch.completions_ST.flatten()[batch.trained_N[token]])
                text = str(self.tokenizer.decode([token_id]))
                return NonFinite(what, str(values_N[token].item()), token, text)
        return None
