"""Plan of one step from metadata: the samples of each rank and micro-batch, and the loss weight of each token.

Law: the split of an update over micro-batches or ranks changes no gradient beyond rounding, because the weight of a
token depends on the update alone.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from rlsys.algorithm import Aggregation, SampleSize, TrajectoryAdvantage
from rlsys.batch.prefix_tree import num_reused_of, num_run
from rlsys.types import Group, PolicyVersion, SampleMeta


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Index of one sample of the step, its trajectory's advantage, and its weight in the loss."""

    group: int
    """Index into the step's list of groups."""
    episode: int
    trajectory: int
    sample: int
    advantage: float
    token_weight: float
    """Weight of each of its trained tokens: the loss of an update is the weighted sum of its tokens' losses."""
    turns: tuple[float, ...] = ()
    """See `TrajectoryAdvantage.turns`."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Samples that go through the model together. `weight` 0 marks a filler that gives all ranks equally many
    batches."""

    samples: tuple[SampleRef, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Plan of one rank for a step."""

    updates: tuple[tuple[MicroBatchPlan, ...], ...]
    """Its micro-batches of each optimizer update, in order. Every update trains other groups, and gives all ranks
    equally many micro-batches, because collectives must match."""
    num_tokens: int
    """Tokens of the step whose losses are computed, over all ranks, without fillers."""
    partners: tuple[int | None, ...]
    """Per group: the group whose first prompt precedes its samples in mismatched pairs. None if all other groups have
    the same first prompt."""
    staleness: float = 0.0
    """Mean number of weight versions since the tokens of the step were sampled."""
    num_skipped: int = 0
    """Trained tokens of the step that go through no model: see `Algorithm.skips_zero_advantages`."""

    @property
    def micro_batches(self) -> list[MicroBatchPlan]:
        """Micro-batches of all updates, in order."""
        return [micro_batch for update in self.updates for micro_batch in update]


BatchPlan: TypeAlias = tuple[RankPlan, ...]
"""Plan of one step, by rank."""


def plan_batch(
    groups: Sequence[Group],
    assigned: Sequence[Sequence[TrajectoryAdvantage]],
    aggregation: Aggregation,
    *,
    num_ranks: int,
    max_tokens: int,
    num_updates: int = 1,
    has_pairs: bool = False,
    pair_cost: float = 0.0,
    version: PolicyVersion = 0,
    skips_zeros: bool = False,
) -> BatchPlan:
    """Plan a step that starts from the weights of `version`.

    `assigned[i]` are the advantages of `groups[i]`. The groups with something to train are cut, in order, into
    `num_updates` runs of nearly equally many groups, or into single groups if there are fewer. Within an update,
    samples of a group stay in one bundle, in the order of their tokens, so that shared prefixes are computed once. A
    bundle that alone exceeds `max_tokens` is split. Ranks get bundles of about equal cost (`balance`), where attention
    of one token to one other costs `pair_cost` times as much as the rest of the model for a token. Each rank then fills
    micro-batches of at most `max_tokens`, or one sample. With `has_pairs` this limit also holds when every sample
    follows its partner's prompt. Samples without a trained token are left out. With `skips_zeros`, those whose
    advantages are 0 are left out too, and count in the weights of the others; if an update has no others, one stays.
    Raises `ValueError` if nothing is left, or for more updates than groups.
    """
    if num_updates > len(groups):
        raise ValueError(f"a step of {len(groups)} groups cannot be cut into {num_updates} updates")
    found = [_samples(i, group, assigned[i], skips_zeros=skips_zeros) for i, group in enumerate(groups)]
    trained = [samples for samples in found if samples]
    if not trained:
        raise ValueError("nothing to train: no trajectory of these groups was assigned an advantage")
    partners = _partners(groups)
    others = [None if partner is None or not has_pairs else _first_sample(groups[partner]) for partner in partners]
    prompts = [other.num_prompt if other else 0 for other in others]
    runs = _runs(trained, num_updates)
    updates = [_update(run, aggregation, num_ranks, max_tokens, prompts, pair_cost) for run in runs]
    num_tokens = sum(num for _, num in updates)
    staleness = mean_staleness(groups, version)
    num_skipped = sum(sample.meta.num_trained for samples in trained for sample in samples) - num_tokens
    by_rank = zip(*(ranks for ranks, _ in updates), strict=True)
    return tuple(RankPlan(of_rank, num_tokens, partners, staleness, num_skipped) for of_rank in by_rank)


def mean_staleness(groups: Sequence[Group], version: PolicyVersion) -> float:
    """Return the mean number of weight versions between the sampling of a token and `version`; at least 0."""
    spans = [span for group in groups for span in group.versions]
    num_tokens = sum(span.num_tokens for span in spans)
    return max(0.0, sum((version - span.version) * span.num_tokens for span in spans) / num_tokens) if spans else 0.0


def num_trained(group: Group, assigned: Sequence[TrajectoryAdvantage]) -> int:
    """Return the tokens of the group that are trained with these advantages."""
    given: defaultdict[tuple[int, int], set[int | None]] = defaultdict(set)
    for each in assigned:
        given[each.episode, each.trajectory].add(each.sample)
    return sum(
        trajectory.num_trained
        if None in samples
        else sum(meta.num_trained for s, meta in enumerate(trajectory.samples) if s in samples)
        for place, trajectory in group.trajectories()
        if (samples := given.get(place))
    )


class _Sample(NamedTuple):
    """A sample to train, and its place, as in `SampleRef`."""

    place: tuple[int, int, int, int]
    given: TrajectoryAdvantage
    meta: SampleMeta
    num_shared: int
    """Leading tokens that it has in common with the sample before it that is not skipped."""
    weight: float = 1.0
    """That of its episode."""
    is_skipped: bool = False
    """True if it only counts in the weights of others."""


def _samples(index: int, group: Group, assigned: Sequence[TrajectoryAdvantage], *, skips_zeros: bool) -> list[_Sample]:
    """Return the samples with a trained token, in the order of their tokens."""
    advantages = {(a.episode, a.trajectory, a.sample): a for a in assigned}
    own = {place for place, _ in group.trajectories()}
    every = (
        (meta, e, t, s)
        for e, episode in enumerate(group.episodes)
        for t, trajectory in enumerate(episode.trajectories)
        for s, meta in enumerate(trajectory.samples)
    )
    samples: list[_Sample] = []
    num_shared = 0
    for meta, e, t, s in sorted(every, key=lambda one: (one[0].order, one[0].prompt_key)):
        num_shared = min(num_shared, meta.num_shared)
        given = advantages.get((e, t, s), advantages.get((e, t, None))) if (e, t) in own else None
        if given is not None and meta.num_trained:
            is_skipped = skips_zeros and not given.advantage and not any(given.turns)
            samples.append(_Sample((index, e, t, s), given, meta, num_shared, group.episodes[e].weight, is_skipped))
            num_shared = num_shared if is_skipped else num_run(meta)
    return samples


def _runs(trained: Sequence[list[_Sample]], num_runs: int) -> Iterator[Sequence[list[_Sample]]]:
    """Cut into runs of neighbours; runs that are longer by one are spread evenly."""
    num_runs = min(num_runs, len(trained))
    cuts = [i * len(trained) // num_runs for i in range(num_runs + 1)]
    for start, end in pairwise(cuts):
        yield trained[start:end]


def _update(
    groups: Sequence[list[_Sample]],
    aggregation: Aggregation,
    num_ranks: int,
    max_tokens: int,
    partner_prompts: Sequence[int],
    pair_cost: float,
) -> tuple[list[tuple[MicroBatchPlan, ...]], int]:
    """Return the micro-batches of each rank for one update, and the number of their trained tokens."""
    sizes = [SampleSize(*one.place[:3], one.meta.num_trained, one.weight) for of_group in groups for one in of_group]
    weights = iter(aggregation.token_weights(sizes))
    weighted = [[(sample, next(weights)) for sample in of_group] for of_group in groups]
    run = [[each for each in of_group if not each[0].is_skipped] for of_group in weighted]
    if not any(run):
        run = [weighted[0][:1]]
    bundles = _bundles(run, max_tokens, partner_prompts)
    shares = balance([bundle.num_tokens + pair_cost * bundle.num_attended for bundle in bundles], num_ranks)
    ranks = [_fill([bundles[i] for i in share], max_tokens) for share in shares]
    depth = max(len(r) for r in ranks)
    filler = MicroBatchPlan((bundles[0].samples[0],), weight=0.0)
    num_tokens = sum(sample.meta.num_trained for of_group in run for sample, _ in of_group)
    return [tuple(r + [filler] * (depth - len(r))) for r in ranks], num_tokens


def _partners(groups: Sequence[Group]) -> tuple[int | None, ...]:
    """Return, for each group, the next group in cyclic order whose first sample has another prompt."""
    firsts = [_first_sample(group) for group in groups]
    prompts = [first and first.prompt_key for first in firsts]
    size = len(groups)
    if len({*prompts} - {None}) < 2:
        return (None,) * size

    def partner(i: int) -> int | None:
        others = ((i + k) % size for k in range(1, size))
        return next((j for j in others if prompts[j] is not None and prompts[j] != prompts[i]), None)

    return tuple(partner(i) for i in range(size))


def _first_sample(group: Group) -> SampleMeta | None:
    """Return the sample whose prompt pairs use, even of a failed episode; None without any sample."""
    return next((s for episode in group.episodes for t in episode.trajectories for s in t.samples), None)


@dataclass(slots=True)
class _Bundle:
    """Neighbours of one group, in the order of their tokens, which share prefixes."""

    samples: list[SampleRef] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of its part of a row."""
    num_attended: int = 0
    """Pairs of tokens of which one attends to the other."""
    num_pair_tokens: int = 0
    """Its tokens if every sample follows its partner's prompt."""

    def can_take(self, num_tokens: int, num_pair_tokens: int, max_tokens: int) -> bool:
        """Return True if so many more tokens fit."""
        return max(self.num_tokens + num_tokens, self.num_pair_tokens + num_pair_tokens) <= max_tokens

    def add(self, samples: Iterable[SampleRef], num_tokens: int, num_pair_tokens: int) -> None:
        self.samples += samples
        self.num_tokens += num_tokens
        self.num_pair_tokens += num_pair_tokens


def _bundles(
    groups: Sequence[list[tuple[_Sample, float]]],
    max_tokens: int,
    partner_prompts: Sequence[int],
) -> list[_Bundle]:
    """Bundle neighbours in each group until no more fit. A sample is with the weight of its tokens; `partner_prompts`
    are by group, 0 without pairs."""
    bundles: list[_Bundle] = []
    for samples in groups:
        before: SampleMeta | None = None
        for sample, weight in samples:
            meta, partner_prompt = sample.meta, partner_prompts[sample.place[0]]
            length, num_reused = num_run(meta), num_reused_of(meta, sample.num_shared, before) if before else 0
            num_own = meta.num_completion if partner_prompt else 0
            if before is None or not bundles[-1].can_take(length - num_reused, num_own, max_tokens):
                bundles.append(_Bundle(num_pair_tokens=partner_prompt))
                num_reused = 0
            ref = SampleRef(*sample.place, sample.given.advantage, weight, sample.given.turns)
            bundles[-1].add([ref], length - num_reused, num_own)
            bundles[-1].num_attended += (length * (length + 1) - num_reused * (num_reused + 1)) // 2
            before = meta
    return bundles


def _fill(bundles: Sequence[_Bundle], max_tokens: int) -> list[MicroBatchPlan]:
    """Fill micro-batches, the largest bundle first, each into the fullest one that has room (best-fit decreasing)."""
    rows: list[_Bundle] = []
    for bundle in sorted(bundles, key=lambda bundle: -bundle.num_tokens):
        need = bundle.num_tokens, bundle.num_pair_tokens
        fitting = [row for row in rows if row.can_take(*need, max_tokens)]
        if not fitting:
            rows.append(_Bundle())
        row = max(fitting, key=lambda row: row.num_tokens) if fitting else rows[-1]
        row.add(bundle.samples, *need)
    return [MicroBatchPlan(tuple(row.samples)) for row in rows]


def balance(sizes: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split the indices of `sizes` into `num_parts` parts with nearly equal sums.

    Returns the better of two heuristics by the largest sum, which determines the waiting time; greedy in a draw.

    >>> balance([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    ways = (greedy(sizes, num_parts), largest_differencing(sizes, num_parts))
    return min(ways, key=lambda parts: max(sum(sizes[i] for i in part) for part in parts))


def greedy(sizes: Sequence[float], num_parts: int) -> list[list[int]]:
    """Assign each size, largest first, to the part with the least sum."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [(0.0, part) for part in range(num_parts)]
    for i in _largest_first(sizes):
        total, part = heapq.heappop(sums)
        parts[part].append(i)
        heapq.heappush(sums, (total + sizes[i], part))
    return parts


def largest_differencing(sizes: Sequence[float], num_parts: int) -> list[list[int]]:
    """Apply the largest differencing method (Karmarkar and Karp, 1982). Every size begins as a separate partition.
    Repeatedly, the two least even partitions are merged, the largest part of one with the smallest of the other, until
    one is left."""
    rest: list[tuple[float, list[int]]] = [(0, [])] * (num_parts - 1)
    partitions = [(-sizes[i], order, [*rest, (sizes[i], [i])]) for order, i in enumerate(_largest_first(sizes))]
    heapq.heapify(partitions)
    if not partitions:
        return [[] for _ in range(num_parts)]
    while len(partitions) > 1:
        (_, order, one), (_, _, other) = heapq.heappop(partitions), heapq.heappop(partitions)
        pairs = zip(one, reversed(other), strict=True)
        merged = sorted(((a + b, i + j) for (a, i), (b, j) in pairs), key=lambda part: part[0])
        heapq.heappush(partitions, (merged[0][0] - merged[-1][0], order, merged))
    return [sorted(part) for _, part in reversed(partitions[0][2])]


def _largest_first(sizes: Sequence[float]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])
