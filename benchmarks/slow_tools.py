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


class SlowTools(Workflow):
    """Workflow with one agent per turn, with a reward of 1.0 for the digits in order, else 0.0."""

    async def run(self, session: Session) -> None:
        """Alternate between a tool and a turn; half of all episodes have two turns at most."""
        chance = random.Random(f"{session.task.id}/{session.episode_index}")
        digits = random.Random(session.task.id)
        num_turns = min(MAX_TURNS, max(1, round(chance.lognormvariate(math.log(2.0), 0.8))))
        for turn in range(num_turns):
            latency_s = chance.lognormvariate(math.log(0.15), 0.7)
            await asyncio.sleep(min(LONGEST_S, max(SHORTEST_S, latency_s)))
            asked = "".join(digits.choices("0123456789", k=6))
            speaker = session.agent(f"turn-{turn}")
            said = await speaker.chat(f"{asked}>")
            session.reward(float(said == "".join(sorted(asked))), speaker)
