"""Tensors of one micro-batch: a row of tokens in which shared prefixes occur once, and the inputs of the loss.

Shape suffixes: `R` positions of the row, `S` samples, `N` trained tokens, in sample order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlsys.algorithm import Column, LossInputs
from rlsys.batch.packing import MicroBatchPlan
from rlsys.batch.prefix_tree import PrefixRow, num_reused, token_order
from rlsys.batch.samples import NOT_RECORDED, Sample, samples_in
from rlsys.types import Episode, PolicyVersion

if TYPE_CHECKING:
    from numpy.typing import NDArray

    StepColumn: TypeAlias = Sequence[NDArray[np.float32]]
    """Column of one rank's part of a step: for each micro-batch, updates in order, one float per trained token."""
    _Columns: TypeAlias = Mapping[Column, Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that go through the model together, as one row without padding: see `PrefixRow`."""

    tokens_R: Tensor
    positions_R: Tensor
    until_R: Tensor
    before_N: Tensor
    """Position in the row before each trained token: the state there predicts the token."""
    targets_N: Tensor
    """Trained tokens."""
    num_trained_S: Tensor
    groups_S: Tensor
    """Position in the step of each sample's group; 0 for scoring only."""
    versions_N: Tensor
    """Policy version each trained token was sampled from."""
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """Weight of each trained token in the loss of its update."""
    columns_N: Mapping[Column, Tensor]
    routing_RW: Tensor | None = None
    """Experts that engines chose for each position, as bytes, see `Sample.routing`; None if nothing is recorded."""

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        advantages: Sequence[float] = (),
        columns: _Columns | None = None,
        token_weights: Sequence[float] = (),
        turns: Sequence[Sequence[float]] = (),
        groups: Sequence[int] = (),
    ) -> MicroBatch:
        """Pack samples into one micro-batch; neighbours share prefixes.

        Each sample has an advantage, a token weight (0 if left out, for scoring only) and, per column, one float per
        completion token. `turns` are advantages of single turns, see `TrajectoryAdvantage.turns`. Raises `ValueError`
        if a column, or the versions of a sample, do not match its tokens.
        """
        row = PrefixRow.of([s.run_ids for s in samples], [len(s.prompt_ids) for s in samples])
        is_trained = np.concatenate([s.is_trained for s in samples])
        lengths = [len(s.completion_ids) for s in samples]
        num_trained_S = torch.tensor([np.count_nonzero(s.is_trained) for s in samples])
        before = [places[len(s.prompt_ids) - 1 :] for s, places in zip(samples, row.places, strict=True)]

        def select_trained(rows: Sequence[Sequence[float]], dtype: type = np.float32) -> Tensor:
            _check(rows, lengths)
            return torch.from_numpy(np.concatenate(rows, dtype=dtype)[is_trained])

        def spread(values: Sequence[float]) -> Tensor:
            values_S = torch.tensor(values or [0.0] * len(samples), dtype=torch.float32)
            return values_S.repeat_interleave(num_trained_S)

        return cls(
            tokens_R=torch.from_numpy(row.tokens_R),
            positions_R=torch.from_numpy(row.positions_R),
            until_R=torch.from_numpy(row.until_R),
            before_N=torch.from_numpy(np.concatenate(before)[is_trained]),
            targets_N=select_trained([s.completion_ids for s in samples], np.int64),
            num_trained_S=num_trained_S,
            groups_S=torch.tensor(groups or [0] * len(samples)),
            versions_N=torch.from_numpy(_versions(samples, num_trained_S.tolist())),
            behavior_logprobs_N=select_trained([s.logprobs for s in samples]),
            advantages_N=_by_turn(samples, advantages, turns) if any(turns) else spread(advantages),
            weights_N=spread(token_weights),
            columns_N={kind: select_trained(column) for kind, column in (columns or {}).items()},
            routing_RW=_routing(samples, row),
        )

    def loss_inputs(self, version: PolicyVersion, proximal_logprobs_N: Tensor) -> LossInputs:
        """Return the inputs of an algorithm for the step that starts from `version`, given the trainer's logprobs."""
        return LossInputs(
            behavior_logprobs_N=self.behavior_logprobs_N,
            proximal_logprobs_N=proximal_logprobs_N,
            advantages_N=self.advantages_N,
            staleness_N=version - self.versions_N,
            lengths_S=self.num_trained_S,
            groups_S=self.groups_S,
            columns_N=self.columns_N,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return this micro-batch on another device, without waiting for what that computes."""
        columns_N = {kind: column_N.to(device, non_blocking=True) for kind, column_N in self.columns_N.items()}
        others = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "columns_N"}
        moved: dict[str, Any] = {
            n: None if tensor is None else tensor.to(device, non_blocking=True) for n, tensor in others.items()
        }
        return MicroBatch(**moved, columns_N=columns_N)


class StepData:
    """Payloads of one step, from which a rank builds its planned micro-batches.

    `payloads[g]` are the episodes of group g, `columns[g][kind]` its extra column: an array of floats (one per
    completion token) per sample, in the order of `samples_in`. Groups that a rank does not need may be missing.
    """

    def __init__(
        self,
        payloads: Sequence[tuple[Episode, ...]] | Mapping[int, tuple[Episode, ...]],
        columns: Sequence[_Columns] | Mapping[int, _Columns],
        step_columns: Mapping[Column, StepColumn] | None = None,
    ) -> None:
        """`step_columns` are the columns of this rank's part of the step."""
        self._payloads, self._columns, self._step_columns = payloads, columns, step_columns or {}
        self._samples: dict[int, dict[tuple[int, int, int], tuple[int, Sample]]] = {}
        self._batches: dict[MicroBatchPlan, MicroBatch] = {}
        """Cache, without the columns of the step: a critic computes values on the same batches before training."""

    def with_columns(self, step_columns: Mapping[Column, StepColumn]) -> StepData:
        """Return the same payloads with the columns of the step."""
        data = StepData(self._payloads, self._columns, step_columns)
        data._samples, data._batches = self._samples, self._batches
        return data

    def micro_batch(self, plan: MicroBatchPlan, place: int = 0) -> MicroBatch:
        """Return the tensors of one planned micro-batch, on the host; `place` is its number in the rank's plan.

        Raises `ValueError` if a column does not match its tokens.
        """
        if plan not in self._batches:
            self._batches[plan] = self._build_micro_batch(plan)
        batch = self._batches[plan]
        if not self._step_columns:
            return batch
        columns_N = {s: torch.tensor(column[place], dtype=torch.float32) for s, column in self._step_columns.items()}
        for kind, column_N in columns_N.items():
            if len(column_N) != len(batch.targets_N):
                raise ValueError(f"{kind} has {len(column_N)} entries for {len(batch.targets_N)} trained tokens")
        return replace(batch, columns_N={**batch.columns_N, **columns_N})

    def _build_micro_batch(self, plan: MicroBatchPlan) -> MicroBatch:
        found = [(r.group, *self._group(r.group)[r.episode, r.trajectory, r.sample]) for r in plan.samples]
        return MicroBatch.of(
            samples=[sample for _, _, sample in found],
            advantages=[r.advantage for r in plan.samples],
            columns={
                kind: [self._columns[group][kind][position] for group, position, _ in found]
                for kind in self._columns[found[0][0]]
            },
            token_weights=[r.token_weight for r in plan.samples],
            turns=[r.turns for r in plan.samples],
            groups=[r.group for r in plan.samples],
        )

    def num_trained(self, plan: MicroBatchPlan) -> int:
        """Return the number of trained tokens of a planned micro-batch."""
        return sum(self._group(r.group)[r.episode, r.trajectory, r.sample][1].num_trained for r in plan.samples)

    def mismatched_batch(self, plan: MicroBatchPlan, partners: Sequence[int | None]) -> MicroBatch | None:
        """Return the same completions, each after the first prompt of its group's partner; for scoring only.

        None if a group has no partner: then all groups of the step have one prompt, and none has a partner.
        """
        samples = []
        for ref in plan.samples:
            if (partner := partners[ref.group]) is None:
                return None
            _, own = self._group(ref.group)[ref.episode, ref.trajectory, ref.sample]
            _, first = next(iter(self._group(partner).values()))
            samples.append(replace(own, prompt_ids=first.prompt_ids, routing=()))
        return MicroBatch.of(samples)

    def _group(self, group: int) -> dict[tuple[int, int, int], tuple[int, Sample]]:
        """Return every sample of a group, in order, with its position in the group's columns."""
        if group not in self._samples:
            samples = enumerate(samples_in(self._payloads[group]))
            self._samples[group] = {index: (position, sample) for position, (index, sample) in samples}
        return self._samples[group]


def pack_for_scoring(samples: Sequence[Sample], max_tokens: int) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yield micro-batches of at most `max_tokens` (or one sample) for scoring only, and the indices of their samples.

    Samples are taken in the order of their tokens, so that they share all prefixes.
    """
    places = token_order([sample.run_ids for sample in samples])
    batch: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(samples)), key=lambda i: places[i][0]):
        run, num_prompt = samples[index].run_ids, len(samples[index].prompt_ids)
        reused = num_reused(places[index][1], num_prompt, len(samples[batch[-1]].prompt_ids)) if batch else 0
        if batch and num_tokens + len(run) - reused > max_tokens:
            yield batch, MicroBatch.of([samples[i] for i in batch])
            batch, num_tokens, reused = [], 0, 0
        batch.append(index)
        num_tokens += len(run) - reused
    if batch:
        yield batch, MicroBatch.of([samples[i] for i in batch])


def _versions(samples: Sequence[Sample], num_trained: Sequence[int]) -> NDArray[np.int64]:
    """Return the version of each trained token."""
    for sample, size in zip(samples, num_trained, strict=True):
        if (count := sum(span.num_tokens for span in sample.versions)) != size:
            raise ValueError(f"{count} tokens have a version in a sample with {size} trained ones")
    spans = [span for sample in samples for span in sample.versions]
    versions = np.array([span.version for span in spans], dtype=np.int64)
    return np.repeat(versions, [span.num_tokens for span in spans])


def _by_turn(samples: Sequence[Sample], advantages: Sequence[float], turns: Sequence[Sequence[float]]) -> Tensor:
    """Return the advantage of each trained token: that of its turn, if there is one, or of its sample."""
    spans = [
        (own[turn] if turn < len(own) else advantage, num)
        for sample, advantage, own in zip(samples, advantages, turns, strict=True)
        for turn, num in sample.turns
    ]
    values = torch.tensor([value for value, _ in spans], dtype=torch.float32)
    return values.repeat_interleave(torch.tensor([num for _, num in spans]))


def _routing(samples: Sequence[Sample], row: PrefixRow) -> Tensor | None:
    """Return what is recorded for each position; of samples that share one, the last counts."""
    joined = [(b"".join(sample.routing), places) for sample, places in zip(samples, row.places, strict=True)]
    recorded = [(np.frombuffer(own, np.uint8).reshape(len(places), -1), places) for own, places in joined if own]
    if not recorded:
        return None
    routing_RW = np.full((len(row.tokens_R), recorded[0][0].shape[1]), NOT_RECORDED, np.uint8)
    for own, places in recorded:
        is_known = (own != NOT_RECORDED).any(1)
        routing_RW[places[is_known]] = own[is_known]
    return torch.from_numpy(routing_RW)


def _check(rows: Sequence[Sequence[float]], lengths: Sequence[int]) -> None:
    for row, length in zip(rows, lengths, strict=True):
        if len(row) != length:
            raise ValueError(f"a column has {len(row)} entries for a completion of {length} tokens")
