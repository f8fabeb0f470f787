"""Sessions that compute, in replicas and in a host apart from engines: seconds of a step.

    python -m benchmarks.session_hosts [--short]

Each turn of a session first computes for some milliseconds in Python, as an environment does that is not a process of
its own. One replica of the tiny policy, one host or none, in turn; a ratio above 1 means that the host is faster.
Prints one JSON object.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from benchmarks.measure import parser_of, print_result, sorter, train
from rlsys.agents.workflow import Session, Workflow

TURNS = 4
WORK_MS = 4.0
"""Milliseconds of CPU time before each turn."""


@dataclass(frozen=True, kw_only=True)
class Computes(Workflow):
    """Sort the same digits again and again, with a computation before each turn."""

    work_ms: float = WORK_MS

    async def run(self, session: Session) -> None:
        for turn in range(TURNS):
            compute(self.work_ms)
            agent = session.agent(f"turn-{turn}")
            said = await agent.chat(session.task.prompt)
            session.reward(float(said == session.task.answer), agent)


def compute(milliseconds: float) -> None:
    """Hold the interpreter's lock for so long."""
    until = time.thread_time() + milliseconds / 1000
    while time.thread_time() < until:
        sum(range(200))


def step_s(num_hosts: int, steps: int) -> float:
    """Return the median seconds of a step, without the first two."""
    overrides = [
        "rollout.workflow=benchmarks.session_hosts:Computes",
        f"rollout.session_hosts={num_hosts}",
        "rollout.replicas=1",
        "train.groups_per_step=8",
        "asynchrony.max_staleness=1",
        f"run.steps={steps}",
    ]
    rows, _ = train(sorter("short"), *overrides)
    return median(row["time/step"] for row in rows[2:] if "time/step" in row)


def main() -> None:
    """Measure both ways in turn."""
    options = parser_of(__doc__).parse_args()
    repeats, steps = (1, 4) if options.size == "short" else (3, 22)
    pairs = [(step_s(0, steps), step_s(1, steps)) for _ in range(repeats)]
    print_result(
        {
            "in_replica_s": median(here for here, _ in pairs),
            "in_host_s": median(there for _, there in pairs),
            "speedup": median(here / there for here, there in pairs),
            "speedups": sorted(here / there for here, there in pairs),
        }
    )


if __name__ == "__main__":
    main()
