"""An episode too large to read at once: 10,000 tokens of a lead, and forty subagents in two rows."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.histories import History, Shape
from tests.rollouts import lines_of, write_lines

NUM_TOKENS = 10_000
NUM_SUBAGENTS = 40
STEP, SERIAL = 2, 3
"""Where it is."""


def long_run(folder: Path) -> Path:
    """A run of two steps whose last group begins with that episode."""
    history = History(folder, Shape(steps=STEP, groups=3, size=2, replicas=2, tasks=3))
    history.start()
    for _ in range(STEP):
        history.step()
    history.end("finished")
    path = folder / "rollouts" / f"step_{STEP:06}.parquet"
    lines = lines_of(path)
    _lengthen(lines[0])
    write_lines(path, lines)
    return folder


def _lengthen(line: dict) -> None:
    """Make the first episode of a group the long one: three versions, and an advantage for each token."""
    assert line["group_id"] == SERIAL
    episode, readings = line["episodes"][0], line["readings"][0]
    lead, subagent = episode["trajectories"][0], episode["trajectories"][1]
    turn, reading = lead["turns"][0], readings[0][0]
    random = Random(3)
    pieces = [f" w{i}" if i % 12 else f"\nw{i}" for i in range(NUM_TOKENS)]
    logprobs = [-4 * random.random() ** 3 for _ in pieces]
    turn |= {"text": "".join(pieces), "output_ids": [1] * NUM_TOKENS, "logprobs": logprobs, "finish": "length"}
    turn["versions"] = [{"version": v, "num_tokens": n} for v, n in ((0, 6_000), (1, 3_000), (2, 1_000))]
    reading |= {
        "pieces": pieces,
        "trainer_logprobs": [p + random.gauss(0, 0.2) for p in logprobs],
        "entropies": [2 * random.random() for _ in pieces],
        "advantages": [random.gauss(0, 1) for _ in pieces],
        "is_masked": [i % 50 == 0 for i in range(NUM_TOKENS)],
    }
    for number in range(1, NUM_SUBAGENTS):
        parent = 0 if number < NUM_SUBAGENTS // 2 else number - NUM_SUBAGENTS // 2 + 1
        episode["trajectories"].append({**subagent, "agent": f"helper-{number}", "parent": parent})
        readings.append(readings[1])
        line["assigned"].append({"episode": 0, "trajectory": len(readings) - 1, "advantage": 0.5, "sample": None})
