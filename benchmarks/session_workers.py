"""Sessions that compute, beside the engine and in a session worker apart from it: seconds of a step.

    python -m benchmarks.session_workers [--short]

Each turn of a session first computes for some milliseconds in Python, as an environment does that is not a process of
its own. One replica of the tiny policy, and one session worker: in the replica's process (`beside_s`), or in a process
of its own (`apart_s`), in turn. A `speedup` above 1 means that a process of its own is faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from benchmarks.measure import in_turn, parser_of, print_result, ratios, sorter, spread, train
from rlsys.agents.workflow import Session, Workflow

TURNS = 4
WORK_MS = 4.0
"""Milliseconds of CPU time before each turn."""


@dataclass(frozen=True, kw_only=True)
class Apart(Workflow):
    """Sort the same digits again and again, with a computation before each turn."""

    work_ms: float = WORK_MS

    async def run(self, session: Session) -> None:
        for turn in range(TURNS):
            compute(self.work_ms)
            agent = session.agent(f"turn-{turn}")
            said = await agent.chat(session.task.prompt)
            session.reward(float(said == session.task.answer), agent)


@dataclass(frozen=True, kw_only=True)
class Beside(Apart):
    """The same workflow, which claims to be light: it is played in the process of the replica."""

    is_light: ClassVar[bool] = True


def compute(milliseconds: float) -> None:
    """Hold the interpreter's lock for so long."""
    until = time.thread_time() + milliseconds / 1000
    while time.thread_time() < until:
        sum(range(200))


def step_s(workflow: type[Workflow], steps: int) -> dict[str, float]:
    """Measure the median seconds of a step, without the first two."""
    overrides = [
        f"rollout.workflow=benchmarks.session_workers:{workflow.__name__}",
        "rollout.replicas=1",
        "train.groups_per_step=8",
        "asynchrony.max_staleness=1",
        f"run.steps={steps}",
    ]
    rows, _ = train(sorter("short"), *overrides)
    return {"step_s": median(row["time/step"] for row in rows[2:] if "time/step" in row)}


def main() -> None:
    """Measure both ways in turn."""
    options = parser_of(__doc__).parse_args()
    repeats, steps = (1, 4) if options.size == "short" else (3, 22)
    runs = in_turn(repeats, (Beside, Apart), lambda _, workflow: step_s(workflow, steps))
    print_result(
        {
            "beside_s": spread([run["step_s"] for run in runs[Beside]]),
            "apart_s": spread([run["step_s"] for run in runs[Apart]]),
            "speedup": ratios(runs[Beside], runs[Apart], "step_s"),
        }
    )


if __name__ == "__main__":
    main()
