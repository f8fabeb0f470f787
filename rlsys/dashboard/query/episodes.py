"""Recorded group for the pages: its episodes in a list, and one episode token by token."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from math import exp
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from rlsys.agents.tool_calls import ToolCall, read_calls
from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.index.folders import as_text
from rlsys.dashboard.index.groups import RewardRange
from rlsys.dashboard.responses import EpisodeAnswer, EpisodeRow, GroupAnswer, TrajectoryAnswer, TurnAnswer
from rlsys.replay.rollout_json import RolloutRecord, TokenStats
from rlsys.types import Episode, EpisodeSpan, Json, Task, Trajectory, Turn

_MOST_TEXT = 2000
_DIGITS = 6
_MOST_RATIO = 700.0
"""Largest log-ratio that is shown, because the exponential of more overflows a float."""

_Mask: TypeAlias = Literal["trained", "left_out", "context"]


class Neighbours(NamedTuple):
    """Group ids of the neighbours of a group in its step."""

    previous: int | None
    next: int | None


def rewards_of(record: RolloutRecord) -> RewardRange:
    """Rewards of the roots of its episodes."""
    roots = (episode.trajectories[0] for episode in record.episodes)
    return RewardRange.of([None if root.outcome.is_failed else root.reward for root in roots])


def num_tokens(episode: Episode) -> int:
    """Tokens sampled in an episode, by all its agents."""
    return sum(len(turn.output_ids) for t in episode.trajectories for turn in t.turns)


def group_answer(record: RolloutRecord, beside: Neighbours) -> GroupAnswer:
    """Describe the episodes of a group."""
    return GroupAnswer(
        step=record.step,
        group_id=record.key.group_id,
        previous_group_id=beside.previous,
        next_group_id=beside.next,
        task_id=record.task.id,
        prompt=_messages(record.task),
        answer=record.task.answer,
        info=record.task.info,
        replica=record.replica,
        is_zero_std=rewards_of(record).is_zero_std,
        episodes=[_row(record, e) for e in range(len(record.episodes))],
    )


def episode_answer(record: RolloutRecord, episode: int, run_dir: Path | None) -> EpisodeAnswer:
    """Describe one episode, token by token; `run_dir` is None for one that was not trained. Raises `NoSuch`."""
    if not 0 <= episode < len(record.episodes):
        raise NoSuch(f"group {record.key.group_id} has no episode {episode}, but 0 to {len(record.episodes) - 1}")
    trajectories = record.episodes[episode].trajectories
    return EpisodeAnswer(
        step=record.step,
        group_id=record.key.group_id,
        episode=episode,
        num_episodes=len(record.episodes),
        task_id=record.task.id,
        prompt=_messages(record.task),
        answer=record.task.answer,
        parts=record.parts[episode],
        reward=trajectories[0].reward,
        began_s=record.episodes[episode].began_s or None,
        seconds=record.episodes[episode].seconds,
        timeline=record.episodes[episode].spans,
        trajectories=[_trajectory(record, episode, t) for t in range(len(trajectories))],
        replay=f"rlsys replay {shlex.quote(as_text(run_dir))} --step {record.step}" if run_dir else "",
    )


def _messages(task: Task) -> Sequence[Mapping[str, Json]]:
    if isinstance(task.prompt, str):
        return [{"role": "prompt", "content": task.prompt}]
    return [dict(message) for message in task.prompt]  # type: ignore[misc]  (a typed dict of JSON)


def _row(record: RolloutRecord, e: int) -> EpisodeRow:
    episode, root = record.episodes[e], record.episodes[e].trajectories[0]
    turns = [turn for t in episode.trajectories for turn in t.turns]
    versions = [span.version for turn in turns for span in turn.versions]
    return EpisodeRow(
        episode=e,
        reward=root.reward,
        advantage=_advantage(record, e, 0),
        outcome=root.outcome.kind.value,
        reason=root.outcome.reason,
        parts=record.parts[e],
        num_tokens=num_tokens(episode),
        num_turns=len(turns),
        seconds=episode.seconds,
        agents=[t.agent for t in episode.trajectories],
        num_tool_calls=episode.num_tool_calls,
        versions=(min(versions), max(versions)) if versions else None,
        text=root.turns[-1].text[:_MOST_TEXT] if root.turns else "",
    )


def _trajectory(record: RolloutRecord, e: int, t: int) -> TrajectoryAnswer:
    trajectory, assigned = record.episodes[e].trajectories[t], record.advantages[e][t]
    is_own = trajectory.policy == record.policy
    is_assigned = any((a.episode, a.trajectory) == (e, t) for a in record.assigned)
    otherwise: _Mask = "context" if not is_own else "trained" if is_assigned else "left_out"
    spans = [span for span in record.episodes[e].spans if span.kind == "turn" and span.trajectory == t]
    timed = spans if len(spans) == len(trajectory.turns) else [None] * len(trajectory.turns)
    turns = zip(trajectory.turns, _readings(record, e, t, trajectory), timed, strict=True)
    return TrajectoryAnswer(
        index=t,
        agent=trajectory.agent,
        policy=trajectory.policy,
        parent=trajectory.parent,
        reward=trajectory.reward,
        advantage=_advantage(record, e, t),
        outcome=trajectory.outcome.kind.value,
        reason=trajectory.outcome.reason,
        turns=[_turn(turn, reading, assigned, otherwise, span) for turn, reading, span in turns],
    )


def _advantage(record: RolloutRecord, e: int, t: int) -> float | None:
    """Advantage shared by all tokens; None for one advantage per token, where the assigned value is only their
    origin."""
    has_own = any(reading.advantages for reading in _token_stats(record, e, t))
    return None if has_own else record.advantages[e][t]


def _token_stats(record: RolloutRecord, e: int, t: int) -> Sequence[TokenStats]:
    return record.readings[e][t] if record.readings else ()


def _readings(record: RolloutRecord, e: int, t: int, trajectory: Trajectory) -> Sequence[TokenStats]:
    """Token statistics of each turn, empty if not recorded."""
    found = _token_stats(record, e, t)
    return found if len(found) == len(trajectory.turns) else [TokenStats()] * len(trajectory.turns)


def _turn(turn: Turn, reading: TokenStats, assigned: float | None, mask: _Mask, span: EpisodeSpan | None) -> TurnAnswer:
    calls = [_call(call) for call in _calls(turn.text)]
    start_s, seconds = (span.start_s, span.seconds) if span else (None, None)
    if len(reading.pieces) != len(turn.output_ids) or not reading.pieces:
        return TurnAnswer(
            said=reading.said,
            text=turn.text,
            pieces=[turn.text],
            logprobs=[],
            ratios=[],
            entropies=[],
            advantages=[],
            masks=[],
            versions=[],
            finish=turn.finish,
            start_s=start_s,
            seconds=seconds,
            tool_calls=calls,
        )
    if turn.output_ids and assigned == 0 and not reading.trainer_logprobs:  # it went through no model
        mask = "left_out"
    is_trained = mask == "trained"
    ratios = [_ratio(p, q) for p, q in zip(reading.trainer_logprobs, turn.logprobs, strict=False)]
    same = [assigned] * len(reading.pieces) if assigned is not None else []
    return TurnAnswer(
        said=reading.said,
        text=turn.text,
        pieces=reading.pieces,
        logprobs=_round_values(turn.logprobs),
        ratios=ratios,
        entropies=_round_values(reading.entropies),
        advantages=(_round_values(reading.advantages) or same) if is_trained else [None] * len(reading.pieces),
        masks=["left_out" if left_out else mask for left_out in reading.is_masked or [False] * len(reading.pieces)],
        versions=list(islice(_version_of_each_token(turn), len(reading.pieces))),
        finish=turn.finish,
        start_s=start_s,
        seconds=seconds,
        tool_calls=calls,
    )


def _version_of_each_token(turn: Turn) -> Iterator[int]:
    return chain.from_iterable(repeat(span.version, span.num_tokens) for span in turn.versions)


def _round_values(values: Sequence[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]


def _ratio(trainer_logprob: float, logprob: float) -> float:
    return exp(min(trainer_logprob - logprob, _MOST_RATIO))


def _calls(text: str) -> Iterator[ToolCall]:
    """Parsed tool calls; an invalid call stays in the text."""
    return (call for call in read_calls(text)[1] if isinstance(call, ToolCall))


def _call(call: ToolCall) -> Mapping[str, Json]:
    return {"name": call.name, "arguments": dict(call.arguments)}
