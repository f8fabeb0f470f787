"""Tensors of one micro-batch: every distinct prompt once, the following completions, and the inputs of the loss.

Shape suffixes: `P` distinct prompts, `L` tokens of the longest prompt, `S` samples, `T` tokens of the longest
completion, `N` trained tokens, in sample order. Both matrices are padded on the right with token 0, which nothing
attends to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from rlsys.algorithm import LossInputs, Signal
from rlsys.batch.packing import Load, MicroBatchPlan
from rlsys.batch.samples import Sample, samples_in
from rlsys.types import Episode, PolicyVersion

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    StepColumn: TypeAlias = Sequence[NDArray[np.float32]]
    """Column of one rank's part of a step: for each micro-batch, updates in order, one float per trained token."""
    _Columns: TypeAlias = Mapping[Signal, Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that go through the model together."""

    prompts_PL: Tensor
    prompt_lengths_P: Tensor
    completions_ST: Tensor
    completion_lengths_S: Tensor
    prompt_of_S: Tensor
    """Row of `prompts_PL` that each sample continues."""
    trained_N: Tensor
    """Trained tokens as indices into the flattened `completions_ST`, ascending."""
    num_trained_S: Tensor
    versions_N: Tensor
    """Policy version each trained token was sampled from."""
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """Weight of each trained token in the loss of its update."""
    columns_N: Mapping[Signal, Tensor]

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        advantages: Sequence[float] = (),
        columns: _Columns | None = None,
        token_weights: Sequence[float] = (),
    ) -> MicroBatch:
        """Pack samples into one micro-batch.

        Each sample has an advantage, a token weight (0 if left out, for scoring only) and, per column, one float per
        completion token. Raises `ValueError` if a column, or the versions of a sample, do not match its tokens.
        """
        rows: dict[tuple[int, ...], int] = {}
        prompt_of = [rows.setdefault(s.prompt_ids, len(rows)) for s in samples]
        width = max(len(s.completion_ids) for s in samples)
        num_trained_S = torch.tensor([sum(s.is_trained) for s in samples])

        def trained(values: Iterator[Sequence[float]]) -> Tensor:
            picked = (v for s, row in zip(samples, values, strict=True) for v in _trained(row, s.is_trained))
            return torch.tensor(list(picked), dtype=torch.float32)

        def spread(values: Sequence[float]) -> Tensor:
            values_S = torch.tensor(values or [0.0] * len(samples), dtype=torch.float32)
            return values_S.repeat_interleave(num_trained_S)

        return cls(
            prompts_PL=_padded(list(rows), max(map(len, rows))),
            prompt_lengths_P=torch.tensor([len(p) for p in rows]),
            completions_ST=_padded([s.completion_ids for s in samples], width),
            completion_lengths_S=torch.tensor([len(s.completion_ids) for s in samples]),
            prompt_of_S=torch.tensor(prompt_of),
            trained_N=torch.tensor(
                [i * width + t for i, s in enumerate(samples) for t, is_on in enumerate(s.is_trained) if is_on]
            ),
            num_trained_S=num_trained_S,
            versions_N=torch.tensor([version for s in samples for version in _versions(s)]),
            behavior_logprobs_N=trained(s.logprobs for s in samples),
            advantages_N=spread(advantages),
            weights_N=spread(token_weights),
            columns_N={signal: trained(iter(column)) for signal, column in (columns or {}).items()},
        )

    def loss_inputs(self, version: PolicyVersion, proximal_logprobs_N: Tensor) -> LossInputs:
        """Return the inputs of an algorithm for the step that starts from `version`, given the trainer's logprobs."""
        return LossInputs(
            behavior_logprobs_N=self.behavior_logprobs_N,
            proximal_logprobs_N=proximal_logprobs_N,
            advantages_N=self.advantages_N,
            staleness_N=version - self.versions_N,
            lengths_S=self.num_trained_S,
            columns_N=self.columns_N,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return this micro-batch on another device."""
        columns_N = {signal: column_N.to(device) for signal, column_N in self.columns_N.items()}
        others = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "columns_N"}
        return MicroBatch(**others, columns_N=columns_N)


class StepData:
    """Payloads of one step, from which a rank builds its planned micro-batches.

    `payloads[g]` are the episodes of group g, `columns[g][signal]` its extra column: one tuple of floats (one per
    completion token) per sample, in the order of `samples_in`. Groups that a rank does not need may be missing.
    """

    def __init__(
        self,
        payloads: Sequence[tuple[Episode, ...]] | Mapping[int, tuple[Episode, ...]],
        columns: Sequence[_Columns] | Mapping[int, _Columns],
        step_columns: Mapping[Signal, StepColumn] | None = None,
    ) -> None:
        """`step_columns` are the columns of this rank's part of the step."""
        self._payloads, self._columns, self._step_columns = payloads, columns, step_columns or {}
        self._samples: dict[int, dict[tuple[int, int, int], tuple[int, Sample]]] = {}
        self._batches: dict[MicroBatchPlan, MicroBatch] = {}
        """Cache, without the columns of the step: a critic computes values on the same batches before training."""

    def with_columns(self, step_columns: Mapping[Signal, StepColumn]) -> StepData:
        """Return the same payloads with the columns of the step."""
        data = StepData(self._payloads, self._columns, step_columns)
        data._samples, data._batches = self._samples, self._batches
        return data

    def micro_batch(self, plan: MicroBatchPlan, place: int = 0) -> MicroBatch:
        """Return the tensors of one planned micro-batch, on the host; `place` is its number in the rank's plan.

        Raises `ValueError` if a column does not match its tokens.
        """
        if plan not in self._batches:
            self._batches[plan] = self._built(plan)
        batch = self._batches[plan]
        if not self._step_columns:
            return batch
        columns_N = {s: torch.tensor(column[place], dtype=torch.float32) for s, column in self._step_columns.items()}
        for signal, column_N in columns_N.items():
            if len(column_N) != len(batch.trained_N):
                raise ValueError(f"{signal} has {len(column_N)} entries for {len(batch.trained_N)} trained tokens")
        return replace(batch, columns_N={**batch.columns_N, **columns_N})

    def _built(self, plan: MicroBatchPlan) -> MicroBatch:
        found = [(r.group, *self._group(r.group)[r.episode, r.trajectory, r.sample]) for r in plan.samples]
        return MicroBatch.of(
            samples=[sample for _, _, sample in found],
            advantages=[r.advantage for r in plan.samples],
            columns={
                signal: [self._columns[group][signal][position] for group, position, _ in found]
                for signal in self._columns[found[0][0]]
            },
            token_weights=[r.token_weight for r in plan.samples],
        )

    def num_trained(self, plan: MicroBatchPlan) -> int:
        """Return the number of trained tokens of a planned micro-batch."""
        samples = (self._group(r.group)[r.episode, r.trajectory, r.sample][1] for r in plan.samples)
        return sum(sum(sample.is_trained) for sample in samples)

    def mismatched(self, plan: MicroBatchPlan, partners: Sequence[int | None]) -> MicroBatch | None:
        """Return the same completions, each after the first prompt of its group's partner; for scoring only.

        None if a group has no partner: then all groups of the step have one prompt, and none has a partner.
        """
        samples = []
        for ref in plan.samples:
            if (partner := partners[ref.group]) is None:
                return None
            _, own = self._group(ref.group)[ref.episode, ref.trajectory, ref.sample]
            _, first = next(iter(self._group(partner).values()))
            samples.append(replace(own, prompt_ids=first.prompt_ids))
        return MicroBatch.of(samples)

    def _group(self, group: int) -> dict[tuple[int, int, int], tuple[int, Sample]]:
        """Return every sample of a group, in order, with its position in the group's columns."""
        if group not in self._samples:
            samples = enumerate(samples_in(self._payloads[group]))
            self._samples[group] = {index: (position, sample) for position, (index, sample) in samples}
        return self._samples[group]


def packed(samples: Sequence[Sample], max_tokens: int) -> Iterator[MicroBatch]:
    """Yield micro-batches of at most `max_tokens` (or one sample) for scoring only, with samples in order.

    Neighbours with the same prompt compute it once, so pass the samples of a group together.
    """
    batch: list[Sample] = []
    prompts: set[tuple[int, ...]] = set()
    load = Load()
    for sample in samples:
        is_new = sample.prompt_ids not in prompts
        more = Load(1, len(sample.completion_ids), int(is_new), len(sample.prompt_ids))
        if batch and (load + more).num_tokens > max_tokens:
            yield MicroBatch.of(batch)
            batch, prompts, load = [], set(), Load()
            more = Load(1, len(sample.completion_ids), 1, len(sample.prompt_ids))
        batch.append(sample)
        prompts.add(sample.prompt_ids)
        load += more
    if batch:
        yield MicroBatch.of(batch)


def _versions(sample: Sample) -> list[int]:
    """Return the version of each trained token."""
    versions = [span.version for span in sample.versions for _ in range(span.num_tokens)]
    num_trained = sum(sample.is_trained)
    if len(versions) != num_trained:
        raise ValueError(f"{len(versions)} tokens have a version in a sample with {num_trained} trained ones")
    return versions


def _padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def _trained(row: Sequence[float], is_trained: Sequence[bool]) -> Iterator[float]:
    if len(row) != len(is_trained):
        raise ValueError(f"a column has {len(row)} entries for a completion of {len(is_trained)} tokens")
    return (value for value, is_on in zip(row, is_trained, strict=True) if is_on)
