"""Plan one optimizer step from metadata: which rank trains which samples in which micro-batch, and the denominators.

Law: how the plan splits the batch, over micro-batches or ranks, changes no gradient beyond rounding, because every
micro-batch divides by the same step-global denominators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.algorithm import Assigned
from rlsys.batch.balance import balanced
from rlsys.types import Group


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where one sample of the batch is found, and its trajectory's advantage."""

    group: int
    """Index into the step's list of groups."""
    episode: int
    trajectory: int
    sample: int
    advantage: float


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Samples that go through the model together. `weight` 0 marks a filler that keeps ranks in step."""

    samples: tuple[SampleRef, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Denominators:
    """What losses are divided by: totals of the whole step, over all ranks."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step. `ranks[r]` are rank r's micro-batches; all have equally many (collectives must match)."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    denominators: Denominators


def plan_batch(
    groups: Sequence[Group],
    assigned: Sequence[Sequence[Assigned]],
    *,
    num_ranks: int,
    max_tokens: int,
) -> BatchPlan:
    """Plan a step.

    `assigned[i]` are the advantages of `groups[i]`. Samples with an equal prompt stay in one bundle, so that the prompt
    is run once; a bundle that alone exceeds `max_tokens` (prompt once plus completions) is split. Ranks get bundles of
    about equally many tokens (`rlsys.batch.balance`); each then fills micro-batches of at most `max_tokens`, or one
    sample. Raises `ValueError` if nothing was assigned.
    """
    bundles = [b for i, g in enumerate(groups) for b in _bundles(i, g, assigned[i], max_tokens)]
    if not bundles:
        raise ValueError("nothing to train: no trajectory of these groups was assigned an advantage")
    shares = balanced([bundle.load.num_tokens for bundle in bundles], num_ranks)
    ranks = [_fill([bundles[i] for i in share], max_tokens) for share in shares]
    depth = max(len(r) for r in ranks)
    filler = MicroBatchPlan((bundles[0].samples[0],), weight=0.0)
    return BatchPlan(
        ranks=tuple(tuple(r + [filler] * (depth - len(r))) for r in ranks),
        denominators=Denominators(
            tokens=sum(b.num_trained for b in bundles),
            sequences=sum(len(b.samples) for b in bundles),
        ),
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What samples cost that go through the model together: both matrices are padded to their longest row."""

    num_samples: int = 0
    longest_completion: int = 0
    num_prompts: int = 0
    longest_prompt: int = 0

    @property
    def num_tokens(self) -> int:
        """Token positions the model computes, padding included."""
        return self.num_samples * self.longest_completion + self.num_prompts * self.longest_prompt

    def __add__(self, other: Load) -> Load:
        """The load of both together."""
        return Load(
            self.num_samples + other.num_samples,
            max(self.longest_completion, other.longest_completion),
            self.num_prompts + other.num_prompts,
            max(self.longest_prompt, other.longest_prompt),
        )


@dataclass(slots=True)
class _Bundle:
    """Samples of one group that share a prompt."""

    order: tuple[int, ...]
    load: Load
    samples: list[SampleRef]
    num_trained: int = 0


def _bundles(index: int, group: Group, assigned: Sequence[Assigned], max_tokens: int) -> list[_Bundle]:
    """Neighbours in length share a bundle, so that one long completion does not pad all others."""
    advantage = {(a.episode, a.trajectory): a.advantage for a in assigned}
    samples = [
        (meta, SampleRef(index, e, t, s, advantage[e, t]))
        for (e, t), trajectory in group.trajectories()
        if (e, t) in advantage
        for s, meta in enumerate(trajectory.samples)
    ]
    open_by_prompt: dict[int, _Bundle] = {}
    done: list[_Bundle] = []
    for meta, ref in sorted(samples, key=lambda sample: sample[0].num_completion):
        bundle = open_by_prompt.get(meta.prompt_key)
        more = Load(1, meta.num_completion)
        if bundle is None or (bundle.load + more).num_tokens > max_tokens:
            place = (ref.group, ref.episode, ref.trajectory, ref.sample)
            bundle = open_by_prompt[meta.prompt_key] = _Bundle(place, Load(0, 0, 1, meta.num_prompt), [])
            done.append(bundle)
        bundle.load += more
        bundle.samples.append(ref)
        bundle.num_trained += meta.num_trained
    return done


def _fill(bundles: list[_Bundle], max_tokens: int) -> list[MicroBatchPlan]:
    """Micro-batches of neighbours in length: a bundle that does not fit opens the next one."""
    micro_batches: list[list[SampleRef]] = []
    load = Load()
    for bundle in sorted(bundles, key=lambda b: (b.load.longest_completion, b.order)):
        if not micro_batches or (load + bundle.load).num_tokens > max_tokens:
            micro_batches.append([])
            load = Load()
        micro_batches[-1] += bundle.samples
        load += bundle.load
    return [MicroBatchPlan(tuple(m)) for m in micro_batches]
