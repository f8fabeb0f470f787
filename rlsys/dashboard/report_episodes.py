"""Episodes in a report: those of the last step, with their texts."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.dashboard.http_problems import NoSuch
from rlsys.dashboard.markup import Html, h
from rlsys.dashboard.plots import short
from rlsys.dashboard.queries import Readings
from rlsys.dashboard.responses import EpisodeRow, GroupAnswer, GroupRow

_MOST_TEXT = 4000
"""Most characters of one prompt."""


def episodes(readings: Readings, run: str) -> Iterator[Html]:
    """Best group of the newest step with written rollouts, its worst group, and one with equal rewards."""
    written = readings.run(run).steps_written
    if written is None:
        return
    step = written[1]
    rows = readings.groups(run, step).groups
    yield h("h2", f"Episodes of step {step}")
    scored = [row for row in rows if row.reward_mean is not None]
    chosen: dict[int, str] = {}
    if scored:
        best, worst = (pick(scored, key=_mean) for pick in (max, min))
        chosen[best.group_id] = "Best group"
        chosen.setdefault(worst.group_id, "Worst group")
    equal = next((row for row in rows if row.is_zero_std and row.group_id not in chosen), None)
    if equal is not None:
        chosen[equal.group_id] = "A group of equal rewards, which cannot teach by comparison"
    for group_id, title in chosen.items():
        try:
            yield _group(title, readings.group(run, step, group_id))
        except NoSuch as error:  # a damaged line: show the other groups
            yield h("p", f"{title}: {error}", class_="muted")


def _mean(row: GroupRow) -> float:
    assert row.reward_mean is not None
    return row.reward_mean


def _group(title: str, group: GroupAnswer) -> Html:
    prompt = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in group.prompt)
    return h(
        "section",
        h("h3", f"{title}: task {group.task_id}, group {group.group_id}"),
        h("p", "Prompt", class_="muted"),
        h("pre", cut(prompt, _MOST_TEXT), dir="auto"),
        *([h("p", "Expected: ", h("code", cut(group.answer, 300)))] if group.answer is not None else []),
        h("div", *map(_episode, group.episodes), class_="episodes"),
    )


def _episode(episode: EpisodeRow) -> Html:
    reason = f" ({episode.reason})" if episode.reason else ""
    facts = [
        f"reward {short(episode.reward)}",
        f"advantage {short(episode.advantage)}",
        f"{episode.outcome}{reason}",
        f"{episode.num_tokens} tokens, {episode.num_turns} turn{'s' if episode.num_turns != 1 else ''}",
        *(f"{name} {short(value)}" for name, value in episode.parts.items()),
    ]
    return h(
        "article",
        h("h4", f"Episode {episode.episode}"),
        h("p", ", ".join(facts), class_="muted"),
        h("pre", episode.text or "(it said nothing)", dir="auto"),
    )


def cut(text: str, most: int) -> str:
    """Cut a text to `most` characters, followed by the number of those left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} characters more)"
