"""One row of tokens for several samples: a prefix that samples share is computed once, with gradient.

Each sample adds those tokens to the row that the sample before it does not begin with. For samples in the order of
their tokens the row is a depth-first walk over the tree of all prefixes: those of the samples of a group, of the turns
of an agent whose context was rewritten, and of the agents of an episode. A token attends to the tokens on its path.

Shape suffix: `R` positions of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlsys.types import SampleMeta

    Ints: TypeAlias = NDArray[np.int64]

MIN_SHARED = 16
"""Fewest tokens beyond an equal prompt for which the tree has a branch: attention costs more for each branch."""


def token_order(runs: Sequence[Ints]) -> list[tuple[int, int]]:
    """Return, for each run, its place in the order of their tokens, and the number of tokens that it begins with like
    the run before it; 0 for the first."""
    keys = [run.astype(">i4").tobytes() for run in runs]  # compared as bytes, these order like token ids
    order = sorted(range(len(runs)), key=keys.__getitem__)
    places = [(0, 0)] * len(runs)
    for place, index in enumerate(order):
        places[index] = (place, _num_equal(runs[order[place - 1]], runs[index]) if place else 0)
    return places


def num_reused(num_shared: int, num_prompt: int, num_prompt_before: int) -> int:
    """Return how many of its first tokens a sample takes from the sample before it, of `num_shared` equal ones.

    Those are the whole prompt, if it is the prompt of both, and all equal tokens if there are `MIN_SHARED` more.
    """
    prompt = num_prompt if num_prompt == num_prompt_before and num_prompt <= num_shared else 0
    return num_shared if num_shared - prompt >= MIN_SHARED else prompt


def num_reused_of(meta: SampleMeta, num_shared: int, before: SampleMeta) -> int:
    """`num_reused` of planned samples; equal prompts count as shared."""
    if meta.prompt_key == before.prompt_key:
        num_shared = max(num_shared, meta.num_prompt)
    return min(num_reused(num_shared, meta.num_prompt, before.num_prompt), num_run(meta))


def num_run(meta: SampleMeta) -> int:
    """Return the tokens of a sample that the model runs: nothing follows the last one."""
    return meta.num_prompt + meta.num_completion - 1


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """Row of all samples of a micro-batch."""

    tokens_R: Ints
    positions_R: Ints
    """Place of each token in its samples, from 0."""
    until_R: Ints
    """End of the part of the row that may attend to each token: position `q` attends to `k` if `k <= q < until[k]`."""
    places: Sequence[Ints]
    """For each sample, the positions of its tokens in the row."""

    @classmethod
    def of(cls, runs: Sequence[Ints], num_prompts: Sequence[int]) -> PrefixRow:
        """Build the row of samples with these tokens, of which the first `num_prompts` are their prompts."""
        import numpy as np

        size = sum(map(len, runs))
        until_R, positions_R = np.zeros(size, np.int64), np.zeros(size, np.int64)
        places: list[Ints] = []
        pieces: list[Ints] = []
        path, end = until_R[:0], 0
        for i, run in enumerate(runs):
            depth = num_reused(_num_equal(runs[i - 1], run), num_prompts[i], num_prompts[i - 1]) if i else 0
            until_R[path[depth:]] = end
            start, end = end, end + len(run) - depth
            positions_R[start:end] = np.arange(depth, len(run))
            pieces.append(run[depth:])
            path = np.concatenate([path[:depth], np.arange(start, end)])
            places.append(path)
        until_R[path] = end
        return cls(np.concatenate(pieces), positions_R[:end], until_R[:end], places)


def _num_equal(one: Ints, other: Ints) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
