"""Per-token results of a step: every rank keeps its own, and they are joined with the turns on request.

Shape suffixes: as in `rlsys.batch.tensors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from torch import Tensor

from rlsys.batch.packing import SampleRef
from rlsys.batch.samples import placed
from rlsys.replay.rollout_log import DIGITS, EpisodeReading, RolloutRecord, TokenStats
from rlsys.types import Trajectory
from workers.train.step_data import Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]

Place: TypeAlias = tuple[int, int, int, int]
"""Place of a sample: group (index in the step), episode, trajectory, sample."""
_CACHED_PROMPTS = 64
"""The episodes of a group share their prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Trained tokens of one micro-batch, on the host."""

    samples: tuple[SampleRef, ...]
    lengths_S: tuple[int, ...]
    """Trained tokens of each sample."""
    trainer_logprobs_N: Floats
    entropies_N: Floats
    advantages_N: Floats
    is_masked_N: NDArray[np.bool_]

    @classmethod
    def of(cls, samples: Sequence[SampleRef], lengths_S: Tensor, *columns_N: Tensor) -> TokenColumns:
        """Columns of tensors on a device; `columns_N` are the four others, in the order above."""
        trainer_logprobs_N, entropies_N, advantages_N, is_masked_N = (tensor.cpu().numpy() for tensor in columns_N)
        return cls(
            samples=tuple(samples),
            lengths_S=tuple(lengths_S.tolist()),
            trainer_logprobs_N=trainer_logprobs_N,
            entropies_N=entropies_N,
            advantages_N=advantages_N,
            is_masked_N=is_masked_N,
        )


class Kept:
    """The columns of one rank's part of a step. Tensors stay on the device until `columns`."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence[SampleRef], tuple[Tensor, ...]]] = []

    def add(self, part: Part, trainer_logprobs_N: Tensor, entropies_N: Tensor, logprobs_N: Tensor) -> None:
        """Add one micro-batch after its backward pass; `logprobs_N` has retained its gradient."""
        gradient_N, inputs = logprobs_N.grad, part.inputs
        assert gradient_N is not None, "retain_grad comes before the backward pass"
        if part.weight:
            is_masked_N = (gradient_N == 0) & (inputs.advantages_N != 0)
            tensors = (inputs.lengths_S, trainer_logprobs_N, entropies_N, inputs.advantages_N, is_masked_N)
            self._parts.append((part.samples, tensors))

    def columns(self) -> list[TokenColumns]:
        """Columns of all trained samples."""
        return [TokenColumns.of(samples, *tensors) for samples, tensors in self._parts]


class Speller:
    """Spells token ids, including special tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._pieces: dict[int, str] = {}
        self._decode = decode
        self.said = lru_cache(maxsize=_CACHED_PROMPTS)(decode)

    def piece(self, token: int) -> str:
        """Text of one token. Decoders drop a leading space, so the token is decoded after itself."""
        if token not in self._pieces:
            once = self._decode((token,))
            self._pieces[token] = self._decode((token, token))[len(once) :]
        return self._pieces[token]


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Rounded results of one micro-batch. All are rounded at once, because most turns are short."""

    trainer_logprobs: list[float]
    entropies: list[float]
    advantages: list[float]
    is_shaped: list[bool]
    """True where the advantage differs from that of the sample."""
    is_masked: list[bool]

    @classmethod
    def of(cls, columns: TokenColumns) -> _Rounded:
        assigned_S = np.array([ref.advantage for ref in columns.samples], dtype=np.float32)
        is_shaped_N = columns.advantages_N != assigned_S.repeat(columns.lengths_S)
        return cls(
            _rounded(columns.trainer_logprobs_N),
            _rounded(columns.entropies_N),
            _rounded(columns.advantages_N),
            is_shaped_N.tolist(),
            columns.is_masked_N.tolist(),
        )

    def part(self, start: int, end: int, *, is_shown: bool) -> TokenStats:
        """Results for the tokens of one turn, without texts. `is_shown`: the sample's advantage is shown elsewhere."""
        is_special = not is_shown or any(self.is_shaped[start:end])
        return TokenStats(
            trainer_logprobs=tuple(self.trainer_logprobs[start:end]),
            entropies=tuple(self.entropies[start:end]),
            advantages=tuple(self.advantages[start:end]) if is_special else (),
            is_masked=tuple(self.is_masked[start:end]) if any(self.is_masked[start:end]) else (),
        )


class Reader:
    """Joins the columns of all ranks with the turns of a step."""

    def __init__(self, columns: Iterable[TokenColumns], speller: Speller) -> None:
        self._speller = speller
        self._samples: dict[Place, tuple[_Rounded, int]] = {}
        """Results of the sample's micro-batch, and the index of its first token there."""
        for one in columns:
            rounded = _Rounded.of(one)
            for ref, start in zip(one.samples, accumulate(one.lengths_S, initial=0), strict=False):
                self._samples[ref.group, ref.episode, ref.trajectory, ref.sample] = rounded, start

    def read(self, group: int, record: RolloutRecord) -> tuple[EpisodeReading, ...]:
        """Readings of `record`, which is the step's group number `group`."""
        advantages = record.advantages
        return tuple(
            tuple(
                tuple(self._turns((group, e, t), trajectory, is_shown=advantages[e][t] is not None))
                for t, trajectory in enumerate(episode.trajectories)
            )
            for e, episode in enumerate(record.episodes)
        )

    def _turns(self, place: tuple[int, int, int], trajectory: Trajectory, *, is_shown: bool) -> Iterator[TokenStats]:
        num_before: Counter[int] = Counter()
        """Trained tokens of each sample in earlier turns."""
        for one in placed(trajectory):
            turn, found = one.turn, self._samples.get((*place, one.sample))
            made = TokenStats()
            if found and turn.output_ids:
                rounded, first = found
                start = first + num_before[one.sample]
                made = rounded.part(start, start + len(turn.output_ids), is_shown=is_shown)
                num_before[one.sample] += len(turn.output_ids)
            said = self._speller.said(turn.prompt_ids[one.num_known :])
            yield replace(made, said=said, pieces=tuple(map(self._speller.piece, turn.output_ids)))


def _rounded(values_N: Floats) -> list[float]:
    return values_N.astype(np.float64).round(DIGITS).tolist()
