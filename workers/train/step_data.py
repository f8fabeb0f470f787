"""Data of one rank for one step, from its plan to the inputs of an algorithm.

Shape suffixes: as in `rlsys.batch.tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput
from rlsys.batch.packing import MicroBatchPlan, RankPlan, SampleRef
from rlsys.batch.tensors import MicroBatch, StepData
from rlsys.errors import ConfigError
from rlsys.types import PolicyVersion
from workers.train.rank_group import RankGroup
from workers.train.whitening import whiten

Score: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""A model's logprobs of the trained tokens of a micro-batch on its device, and the entropies of their distributions,
without gradient."""


@dataclass(slots=True)
class Part:
    """One micro-batch on the device, with the inputs of the algorithm."""

    batch: MicroBatch
    weight: float
    """0 for a filler, which keeps ranks in step and does not count."""
    inputs: LossInputs
    is_scored: bool
    """True if the proximal logprobs are known. Otherwise they are NaN, and the next forward supplies them."""
    samples: tuple[SampleRef, ...] = ()

    def loss(self, output: LossOutput) -> Tensor:
        """Share of the update's loss; shares add up over micro-batches and ranks, for any split."""
        return self.weight * (output.loss_N * self.batch.weights_N).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One rank's part of a step that starts from `version`."""

    plan: RankPlan
    data: StepData
    algorithm: Algorithm
    version: PolicyVersion
    device: torch.device

    def update_parts(self, score: Score | None = None) -> Iterator[Iterator[Part]]:
        """The micro-batches of each update with token advantages, each built when the iterator reaches it, pass by
        pass; with `score`, of the first pass.

        With `score`, that of the policy, also its columns, and proximal logprobs if an earlier update changes the
        weights or `step_statistics` needs them. `token_advantages` never gets proximal logprobs, because the critic has
        none.
        """
        for _ in range(1 if score else self.algorithm.passes):
            place = 0
            for update in self.plan.updates:
                yield map(self._part, update, range(place, place + len(update)), [score] * len(update))
                place += len(update)

    def whole(self, score: Score, ranks: RankGroup) -> Iterable[Iterable[Part]]:
        """As `update_parts`, for the policy, with whitening and step statistics. Stays lazy if neither is needed."""
        shaped, algorithm = self.update_parts(score), self.algorithm
        if not (algorithm.has_step_statistics or self._is_scored_ahead or algorithm.whitens):
            return shaped
        updates = [list(update) for update in shaped]
        parts = [part for update in updates for part in update]
        if algorithm.whitens:
            white = whiten(join_parts(parts).advantages_N, [part.inputs.advantages_N for part in parts], ranks)
            for part, white_N in zip(parts, white, strict=True):
                part.inputs = replace(part.inputs, advantages_N=white_N)
        if algorithm.has_step_statistics:
            facts = algorithm.step_statistics(join_parts(parts), ranks)
            for part in parts:
                part.inputs = replace(part.inputs, facts=facts)
        return updates * algorithm.passes

    def update_name(self, index: int) -> str:
        """Name of an update in errors, e.g. `step 7, update 2 of 4`; step 7 makes version 7."""
        count = self.num_updates
        return f"step {self.version + 1}" + (f", update {index + 1} of {count}" if count > 1 else "")

    @property
    def num_updates(self) -> int:
        """Updates of all passes."""
        return len(self.plan.updates) * self.algorithm.passes

    @property
    def _is_scored_ahead(self) -> bool:
        return self.num_updates > 1 or self.algorithm.scores_ahead

    def _part(self, plan: MicroBatchPlan, place: int, score: Score | None) -> Part:
        batch = self.data.micro_batch(plan, place).to(self.device)
        inputs = batch.loss_inputs(self.version, torch.full_like(batch.behavior_logprobs_N, torch.nan))
        if score and Column.POLICY_MISMATCHED in self.algorithm.columns:
            mismatched_N = mismatched_column(self.data, plan, self.plan.partners, score, self.device)
            inputs = replace(inputs, columns_N={**inputs.columns_N, Column.POLICY_MISMATCHED: mismatched_N})
        shaped = self.algorithm.token_advantages(inputs)
        inputs = replace(inputs, advantages_N=shaped.advantages_N, returns_N=shaped.returns_N)
        is_scored = False
        if score and self._is_scored_ahead:
            logprobs_N, entropies_N = score(batch)
            inputs = replace(inputs, proximal_logprobs_N=logprobs_N, entropies_N=entropies_N)
            is_scored = True
        return Part(batch, plan.weight, inputs, is_scored, plan.samples)


def mismatched_column(
    data: StepData, plan: MicroBatchPlan, partners: Sequence[int | None], score: Score, device: torch.device
) -> Tensor:
    """A `*_MISMATCHED` column of a micro-batch: the `score` of each trained token after another task's prompt.

    Zeros if the step has no other prompt, for reference and policy alike: then no pair differs.
    """
    pairs = data.mismatched_batch(plan, partners)
    return torch.zeros(data.num_trained(plan), device=device) if pairs is None else score(pairs.to(device))[0]


def check_skipped(algorithm: Algorithm) -> None:
    """Raise `ConfigError` if the loss of tokens without an advantage has a gradient, and they are to be skipped."""
    if not algorithm.skips_zero_advantages:
        return
    lengths_S, random = torch.tensor([3, 5]), torch.Generator().manual_seed(0)
    logprobs_N = (-3 * torch.rand(8, generator=random)).requires_grad_()

    def near() -> Tensor:
        return logprobs_N.detach() - torch.rand(8, generator=random)

    batch = LossInputs(
        behavior_logprobs_N=near(),
        proximal_logprobs_N=near(),
        advantages_N=torch.zeros(8),
        staleness_N=torch.arange(8) % 3,
        lengths_S=lengths_S,
        groups_S=torch.zeros_like(lengths_S),
        columns_N={kind: near() for kind in algorithm.columns},
    )
    if torch.autograd.grad(algorithm.loss(logprobs_N, batch).loss_N.sum(), logprobs_N)[0].any():
        raise ConfigError(
            f"{type(algorithm).__name__}: its loss has a gradient where advantages are 0, and such samples would be "
            "skipped: override `skips_zero_advantages` to return False"
        )


def join_parts(parts: Sequence[Part]) -> LossInputs:
    """Concatenate the samples of all micro-batches, in order, without fillers; empty if all are fillers."""
    first = parts[0].inputs

    def cat(tensor_of: Callable[[LossInputs], Tensor]) -> Tensor:
        return torch.cat([tensor_of(p.inputs) if p.weight else tensor_of(p.inputs)[:0] for p in parts])

    names = [f.name for f in fields(LossInputs) if isinstance(getattr(first, f.name), Tensor)]
    tensors: dict[str, Any] = {name: cat(lambda inputs, n=name: getattr(inputs, n)) for name in names}
    columns_N = {kind: cat(lambda inputs, s=kind: inputs.columns_N[s]) for kind in first.columns_N}
    return replace(first, **tensors, columns_N=columns_N)
