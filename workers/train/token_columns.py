"""Per-token results of a step: every rank keeps its own, and they are joined with the turns on request.

Shape suffixes: as in `rlsys.batch.tensors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from torch import Tensor

from rlsys.algorithm import LossInputs
from rlsys.batch.packing import SampleRef
from rlsys.batch.samples import place_turns
from rlsys.number_arrays import BoolArray, FloatArray
from rlsys.replay.rollout_json import EpisodeReading, RolloutRecord, TokenStats
from rlsys.types import Trajectory

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
    def of(
        cls, samples: tuple[SampleRef, ...], inputs: LossInputs, entropies_N: Tensor, gradient_N: Tensor
    ) -> TokenColumns:
        """Copy from the device; `gradient_N` is the gradient of the logprobs."""
        return cls(
            samples=samples,
            lengths_S=tuple(inputs.lengths_S.tolist()),
            trainer_logprobs_N=inputs.proximal_logprobs_N.cpu().numpy(),
            entropies_N=entropies_N.cpu().numpy(),
            advantages_N=inputs.advantages_N.cpu().numpy(),
            is_masked_N=((gradient_N == 0) & (inputs.advantages_N != 0)).cpu().numpy(),
        )

    def stats(self, start: int, end: int, shown: float | None) -> TokenStats:
        """Results for the tokens of one turn, without texts; `shown` is the advantage shown elsewhere."""
        is_masked_N = self.is_masked_N[start:end]
        is_special = shown is None or (self.advantages_N[start:end] != np.float32(shown)).any()
        return TokenStats(
            trainer_logprobs=FloatArray.over(self.trainer_logprobs_N[start:end]),
            entropies=FloatArray.over(self.entropies_N[start:end]),
            advantages=FloatArray.over(self.advantages_N[start:end]) if is_special else (),
            is_masked=BoolArray.over(is_masked_N) if is_masked_N.any() else (),
        )


class Speller:
    """Spells token ids, including special tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        def piece(token: int) -> str:
            once = decode((token,))
            return decode((token, token))[len(once) :]

        self.said = lru_cache(maxsize=_CACHED_PROMPTS)(decode)
        self.piece = cache(piece)
        """Text of one token. Decoders drop a leading space, so the token is decoded after itself."""


class Reader:
    """Joins the columns of all ranks with the turns of a step."""

    def __init__(self, columns: Iterable[TokenColumns], speller: Speller) -> None:
        self._speller = speller
        self._samples: dict[Place, tuple[TokenColumns, int, float]] = {}
        """Results of the sample's micro-batch, the index of its first token there, and its advantage."""
        for one in columns:
            for ref, start in zip(one.samples, accumulate(one.lengths_S, initial=0), strict=False):
                self._samples[ref.group, ref.episode, ref.trajectory, ref.sample] = one, start, ref.advantage

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
        for one in place_turns(trajectory):
            turn, found = one.turn, self._samples.get((*place, one.sample))
            made = TokenStats()
            if found and turn.output_ids:
                columns, first, advantage = found
                start = first + num_before[one.sample]
                made = columns.stats(start, start + len(turn.output_ids), advantage if is_shown else None)
                num_before[one.sample] += len(turn.output_ids)
            decoded = self._speller.said(tuple(turn.prompt_ids[one.num_known :]))
            yield replace(made, said=decoded, pieces=tuple(map(self._speller.piece, turn.output_ids)))
