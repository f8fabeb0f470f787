"""Workload dominated by slow tools: sort six digits repeatedly, each time after a tool call.

An episode has 1 to 12 turns, mostly few. Before each turn a tool takes 50 to 500 ms (lognormal), then a new agent sorts
the digits that the tool returned. The number of turns and the latencies depend only on the task and the episode's
number, so every run of the benchmark waits for the same tools.
"""

from __future__ import annotations

import asyncio
import math
import random

from rlsys.agents.workflow import Session, Workflow

MAX_TURNS = 12
SHORTEST_S, LONGEST_S = 0.05, 0.5
MEDIAN_S = 0.15


class SlowTools(Workflow):
    """Workflow with one agent per turn, with a reward of 1.0 for the digits in order, else 0.0."""

    async def run(self, session: Session) -> None:
        """Alternate between a tool and a turn."""
        chance = random.Random(f"{session.task.id}/{session.episode_index}")
        digits = random.Random(session.task.id)
        for turn in range(num_turns(chance)):
            await asyncio.sleep(latency_s(chance))
            asked = "".join(digits.choices("0123456789", k=6))
            speaker = session.agent(f"turn-{turn}")
            said = await speaker.chat(f"{asked}>")
            session.reward(float(said == "".join(sorted(asked))), speaker)


def num_turns(chance: random.Random) -> int:
    """Draw the number of turns, 1 to 12, lognormal: half of all episodes have two at most."""
    return min(MAX_TURNS, max(1, round(chance.lognormvariate(math.log(2.0), 0.8))))


def latency_s(chance: random.Random) -> float:
    """Draw the seconds of one tool call, lognormal between the limits."""
    return min(LONGEST_S, max(SHORTEST_S, chance.lognormvariate(math.log(MEDIAN_S), 0.7)))
