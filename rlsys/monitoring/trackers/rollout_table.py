"""Table of episodes of a step, sampled from the file that has all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rlsys.errors import DataError
from rlsys.monitoring.tracker import RolloutRow

LONGEST = 10_000
"""Most characters of a prompt or a text in a table; the file has the rest."""


def sampled(path: Path, most: int) -> list[RolloutRow]:
    """Sample at most `most` episodes of a file of rollouts, evenly from the lowest reward to the highest.

    Episodes without a reward come first. The file is read group by group, because decoding a line blocks the driver's
    event loop: it is blocked for one group at most. Raises `OSError`, and `DataError` for a file that has no rollouts.
    """
    try:
        with path.open("rb") as file:
            rows = [row for line in file for row in _rows(orjson.loads(line))]
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no file of rollouts, or damaged: {error!r}") from error
    rows.sort(key=lambda row: (row.reward is not None, row.reward, row.group_id, row.episode))
    if len(rows) <= most:
        return rows
    last = len(rows) - 1
    return [rows[round(place * last / max(most - 1, 1))] for place in range(most)]


def _rows(group: Mapping[str, Any]) -> Iterator[RolloutRow]:
    task = group["task"]
    prompt = _cut(_asked(task["prompt"]))
    whole = {(a["episode"], a["trajectory"]): a["advantage"] for a in group["assigned"] if a["sample"] is None}
    for number, episode in enumerate(group["episodes"]):
        root = episode["trajectories"][0]
        yield RolloutRow(
            step=group["step"],
            task_id=task["id"],
            group_id=group["group_id"],
            episode=number,
            reward=root["reward"],
            advantage=whole.get((number, 0)),
            num_tokens=sum(len(turn["output_ids"]) for t in episode["trajectories"] for turn in t["turns"]),
            outcome=root["outcome"]["kind"],
            prompt=prompt,
            text=_cut("\n\n".join(turn["text"] for turn in root["turns"])),
        )


def _asked(prompt: str | list[Mapping[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text) - LONGEST:,} characters more)"
