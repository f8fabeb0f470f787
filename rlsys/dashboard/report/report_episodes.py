"""Best and worst groups of a run in its report, with their prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.query.queries import Readings
from rlsys.dashboard.query.rollout_listing import ScoredGroup
from rlsys.dashboard.report.markup import Html, cut, h
from rlsys.dashboard.report.plots import short
from rlsys.dashboard.responses import EpisodeRow, GroupAnswer

_NUM_GROUPS = 2
"""Groups of each kind."""
_MOST_UNREADABLE = 50
"""Groups that are not written, or damaged, after which no more are looked up."""
_NUM_ANSWERS = 4
_MOST_REWARDS = 32
_PROMPT, _ANSWER = (360, 4), (240, 6)
"""Most characters and lines."""


def best_and_worst(readings: Readings, run: str) -> Iterator[Html]:
    """Groups with the highest and the lowest mean reward of all written steps, each of another task; newest first."""
    groups = readings.rollouts.scored_groups(run)
    if not groups:
        return
    yield h("h2", "Best and worst groups")
    shown: set[str] = set()
    for title, sign in (("Best group", -1), ("Worst group", 1)):
        ranked = sorted(groups, key=lambda group: (sign * group.reward, -group.step, group.group_id))
        yield from islice(_readable(readings, run, title, ranked, shown), _NUM_GROUPS)


def _readable(readings: Readings, run: str, title: str, ranked: list[ScoredGroup], shown: set[str]) -> Iterator[Html]:
    """Groups of tasks that are not yet `shown`."""
    num_unreadable = 0
    for group in ranked:
        if group.task_id in shown:
            continue
        try:
            found = _group(readings, run, title, readings.rollouts.group(run, group.step, group.group_id))
        except NoSuch:
            num_unreadable += 1
            if num_unreadable == _MOST_UNREADABLE:
                return
            continue
        shown.add(group.task_id)
        yield found


def _group(readings: Readings, run: str, title: str, group: GroupAnswer) -> Html:
    prompt = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in group.prompt)
    rewards = [short(one.reward) if one.outcome != "failed" else "failed" for one in group.episodes[:_MOST_REWARDS]]
    more = f" and {len(group.episodes) - _MOST_REWARDS} more" if len(group.episodes) > _MOST_REWARDS else ""
    expected = () if group.answer is None else ("; expected: ", h("code", cut(group.answer, 80, 2)))
    return h(
        "section",
        h("h3", f"{title}: task {cut(group.task_id, 60)}, step {group.step}, group {group.group_id}"),
        h("p", f"Rewards: {', '.join(rewards)}{more}", *expected, class_="muted"),
        h("pre", cut(prompt, *_PROMPT), dir="auto"),
        h(
            "div",
            *(_episode(one, _answer(readings, run, group, one)) for one in _extreme_episodes(group.episodes)),
            class_="episodes",
        ),
    )


def _extreme_episodes(episodes: Sequence[EpisodeRow]) -> Sequence[EpisodeRow]:
    """The answers with the highest and the lowest rewards of a group, in this order."""
    ranked = sorted(episodes, key=lambda one: (one.reward is None, -(one.reward or 0.0)))
    half = _NUM_ANSWERS // 2
    return ranked if len(ranked) <= _NUM_ANSWERS else [*ranked[:half], *ranked[-half:]]


def _answer(readings: Readings, run: str, group: GroupAnswer, episode: EpisodeRow) -> str:
    """Last reply of an episode's root, whole."""
    turns = readings.rollouts.episode(run, group.step, group.group_id, episode.episode).trajectories[0].turns
    return turns[-1].text if turns else ""


def _episode(episode: EpisodeRow, answer: str) -> Html:
    outcome = "" if episode.outcome == "ok" else f", {episode.outcome}"
    reason = f": {cut(episode.reason, 100, 2)}" if episode.reason else ""
    advantage = "" if episode.advantage is None else f", advantage {short(episode.advantage)}"
    parts = "".join(f", {cut(name, 20)} {short(value)}" for name, value in islice(episode.parts.items(), 3))
    return h(
        "article",
        h("h4", f"Episode {episode.episode}: reward {short(episode.reward)}"),
        h("p", f"{episode.num_tokens} tokens{advantage}{parts}{outcome}{reason}", class_="muted"),
        h("pre", cut(answer, *_ANSWER) or "(empty)", dir="auto"),
    )
