"""Conversion of trajectories to samples: maximal token runs in which every prompt extends the tokens before it.

A turn continues the sample if its prompt starts with all earlier tokens of the agent. The new prompt tokens, for
instance tool output, are context and not trained. A turn with a rewritten context starts a new sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from rlsys.batch.prefix_tree import token_order
from rlsys.number_arrays import BoolArray, FloatArray, IntArray
from rlsys.types import POLICY, Episode, EpisodeMeta, SampleMeta, Trajectory, TrajectoryMeta, Turn, VersionSpan

if TYPE_CHECKING:
    from rlsys.batch.prefix_tree import Ints


NOT_RECORDED = 0xFF
"""Byte of no expert."""


@dataclass(frozen=True)
class Sample:
    """Unit of training: a prompt, then a completion of which the tokens sampled by the policy are trained.

    Numbers by token are kept as a `NumberArray`, whatever sequence they are given as.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    is_trained: Sequence[bool]
    """One entry per completion token: True if the policy sampled it."""
    logprobs: Sequence[float]
    """One entry per completion token; 0.0 where not trained."""
    versions: tuple[VersionSpan, ...]
    """Spans of the trained tokens, in order, by policy version."""
    routing: tuple[bytes, ...] = ()
    """Experts that the engine chose, in pieces: together as many bytes for each token of `run_ids`, all `NOT_RECORDED`
    for one that is not recorded; empty if none is."""
    turns: tuple[tuple[int, int], ...] = ()
    """Index in the trajectory, and number of trained tokens, of each of its turns."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", IntArray(self.prompt_ids))
        object.__setattr__(self, "completion_ids", IntArray(self.completion_ids))
        object.__setattr__(self, "is_trained", BoolArray(self.is_trained))
        object.__setattr__(self, "logprobs", FloatArray(self.logprobs))

    @cached_property
    def num_trained(self) -> int:
        """Completion tokens that the policy sampled."""
        return sum(span.num_tokens for span in self.versions)

    @cached_property
    def run_ids(self) -> Ints:
        """Tokens that the model runs: nothing follows the last one."""
        import numpy as np

        return np.concatenate([self.prompt_ids, self.completion_ids[:-1]], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """A turn, and its place in a sample."""

    turn: Turn
    sample: int
    """Index of the sample that trains its output. Without output, the index of the sample before it, or -1."""
    num_known: int
    """Tokens of its prompt that were in the agent's context before; 0 where the context was rewritten."""


def place_turns(trajectory: Trajectory) -> Iterator[PlacedTurn]:
    """Yield every turn of a trajectory, in order."""
    sample, last = -1, None
    for turn in trajectory.turns:
        num_known = _num_run(last) + 1 if last is not None and _goes_on(turn.prompt_ids, last) else 0
        if turn.output_ids:
            sample += not num_known
            last = turn
        yield PlacedTurn(turn, sample, num_known)


def _goes_on(prompt_ids: Sequence[int], turn: Turn) -> bool:
    """True if a prompt starts with the tokens of a turn."""
    start, end = len(turn.prompt_ids), _num_run(turn) + 1
    return prompt_ids[:start] == turn.prompt_ids and prompt_ids[start:end] == turn.output_ids


def _runs(trajectory: Trajectory) -> Iterator[list[tuple[int, Turn]]]:
    """Yield the turns of each sample, with their index in the trajectory; a turn without output is of none."""
    spoken = ((index, one) for index, one in enumerate(place_turns(trajectory)) if one.turn.output_ids)
    for _, run in groupby(spoken, key=lambda pair: pair[1].sample):
        yield [(index, one.turn) for index, one in run]


def samples_of(trajectory: Trajectory) -> Iterator[Sample]:
    """Yield the samples of one trajectory, in order. A turn without output gives none."""
    for run in _runs(trajectory):
        spans = tuple((index, len(turn.output_ids)) for index, turn in run)
        yield _join_turns([turn for _, turn in run], spans)


def samples_in(episodes: Iterable[Episode]) -> Iterator[tuple[tuple[int, int, int], Sample]]:
    """Yield every sample of a group's payload with its (episode, trajectory, sample) index, in the order of columns.

    Failed episodes are included, so that the order depends on the payload alone.
    """
    for e, episode in enumerate(episodes):
        for t, trajectory in enumerate(episode.trajectories):
            for s, sample in enumerate(samples_of(trajectory)):
                yield (e, t, s), sample


def _join_turns(run: list[Turn], spans: tuple[tuple[int, int], ...]) -> Sample:
    first = run[0]
    ids, trained, logprobs, length = [], [], [], len(first.prompt_ids)
    for turn in run:
        observed = turn.prompt_ids[length:]
        ids += [observed, turn.output_ids]
        trained += [bytes(len(observed)), b"\1" * len(turn.output_ids)]
        logprobs += [(0.0,) * len(observed), turn.logprobs]
        length += len(observed) + len(turn.output_ids)
    versions = tuple(span for turn in run for span in turn.versions)
    is_trained, routing = BoolArray.over(b"".join(trained)), _routing_of(run)
    joined = IntArray.of_parts(*ids), is_trained, FloatArray.of_parts(*logprobs)
    return Sample(first.prompt_ids, *joined, versions, routing, spans)


def without_repeats(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without the experts that were recorded again when a turn repeated what was said before."""
    turns: list[Turn] = []
    num_before = 0
    """Positions that the sample has records of."""
    for one in place_turns(trajectory):
        turn, num_before = one.turn, num_before if one.num_known else 0
        if _is_recorded(turn):
            first = turn.routing[0]
            num_repeated = min(num_before, len(turn.prompt_ids))
            cut = len(first) // len(turn.prompt_ids) * num_repeated
            turn, num_before = replace(turn, routing=(first[cut:], *turn.routing[1:])), _num_run(turn)
        turns.append(turn)
    return replace(trajectory, turns=tuple(turns))


def _routing_of(run: list[Turn]) -> tuple[bytes, ...]:
    """Return what was recorded for turns of one sample: a position counts as in the turn that recorded it first.

    The first turn with records has those of its whole prompt.
    """
    recorded = [turn for turn in run if _is_recorded(turn)]
    if not recorded:
        return ()
    num_bytes = sum(map(len, recorded[0].routing)) // _num_run(recorded[0])
    pieces: list[bytes] = []
    num_done = 0
    for turn in recorded:
        first, *others = turn.routing
        missing = len(turn.prompt_ids) * num_bytes - len(first) - num_done  # where a turn between has no records
        pieces += [bytes([NOT_RECORDED]) * missing, first[max(0, -missing) :], *others]
        num_done = _num_run(turn) * num_bytes
    return (*pieces, bytes([NOT_RECORDED]) * (_num_run(run[-1]) * num_bytes - num_done))


def _is_recorded(turn: Turn) -> bool:
    return bool(turn.routing) and len(turn.routing) == len(turn.output_ids)


def _num_run(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.output_ids) - 1


def meta_of(episodes: tuple[Episode, ...]) -> tuple[EpisodeMeta, ...]:
    """Return the metadata of each episode of a group. No sample is built for it."""
    import numpy as np

    found = [
        ((e, t), [turn for _, turn in run])
        for e, episode in enumerate(episodes)
        for t, trajectory in enumerate(episode.trajectories)
        for run in _runs(trajectory)
    ]
    last_turns = (turns[-1] for _, turns in found)
    ids = [np.concatenate([turn.prompt_ids, turn.output_ids[:-1]], dtype=np.int64) for turn in last_turns]
    metas: dict[tuple[int, int], list[SampleMeta]] = {}
    for (place, turns), run_ids, (order, num_shared) in zip(found, ids, token_order(ids), strict=True):
        prompt_ids = turns[0].prompt_ids
        meta = SampleMeta(
            num_prompt=len(prompt_ids),
            num_completion=len(run_ids) + 1 - len(prompt_ids),
            num_trained=sum(len(turn.output_ids) for turn in turns),
            prompt_key=hash(prompt_ids),
            order=order,
            num_shared=num_shared,
        )
        metas.setdefault(place, []).append(meta)
    return tuple(
        EpisodeMeta(
            tuple(
                TrajectoryMeta(
                    o.agent,
                    o.parent,
                    o.outcome,
                    o.reward,
                    tuple(metas.get((e, t), ())),
                    policy=o.policy,
                    num_turns=len(o.turns),
                )
                for t, o in enumerate(episode.trajectories)
            ),
            episode.num_tool_calls,
            episode.num_sequential,
            episode.proposals,
            episode.weight,
            tools_s=_tools_s(episode),
        )
        for e, episode in enumerate(episodes)
    )


def _tools_s(episode: Episode) -> dict[str, float]:
    """Seconds by tool; `environment`: of environments. A call of a tool that does not exist takes no time."""
    found: dict[str, float] = {}
    for span in episode.spans:
        if span.kind != "turn" and span.seconds > 0:
            name = span.name if span.kind == "tool" else "environment"
            found[name] = found.get(name, 0.0) + span.seconds
    return found


def versions_of(episodes: tuple[Episode, ...], policy: str = POLICY) -> tuple[VersionSpan, ...]:
    """Return the number of tokens that this policy sampled, by version, over all episodes, oldest first."""
    tokens: Counter[int] = Counter()
    spoken = (t for episode in episodes for t in episode.trajectories if t.policy == policy)
    for trajectory in spoken:
        for turn in trajectory.turns:
            for span in turn.versions:
                tokens[span.version] += span.num_tokens
    return tuple(VersionSpan(v, tokens[v]) for v in sorted(tokens))
