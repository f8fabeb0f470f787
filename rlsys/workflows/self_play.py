"""Workflow of a proposer that makes a task, and solvers that try it.

    proposer   <task>17 * 23</task>                      rewarded for a task that is neither too easy nor too hard
    solvers        391   401   391   391    in parallel    each rewarded for a right answer

With one policy for both roles, the policy plays against itself; `agents` in the configuration binds each to a policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal, cast

from pydantic import Field

from rlsys.agents.tool_calls import spoken
from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.errors import ToolError
from rlsys.types import Prompt, Task
from rlsys.util.importing import import_object
from rlsys.util.number_ranges import Count
from rlsys.workflows.tool_use import loadable, opening_messages

PROPOSER = "Make one task of the kind that you are asked for, and write it within <task> and </task>."
SOLVER = "Solve the task."
INVALID = -1.0
"""Reward of a proposer whose reply contains no task: less than for a task that teaches nothing."""
PROPOSED = "proposed"
"""Column of a proposed task, with the task."""
Fraction = Annotated[float, Field(ge=0, le=1)]
_TASK = re.compile(r"<task>(.+?)</task>", re.DOTALL)


def load_judge(spec: str) -> Callable[[str, str], float]:
    """Import the function `module:name`. Raises `ValueError`."""
    found = import_object("judge", spec)
    if not callable(found):
        raise ValueError(f"the judge {spec!r} is no function")
    return cast("Callable[[str, str], float]", found)


@dataclass(frozen=True, kw_only=True)
class SelfPlay(Workflow):
    """One proposer, the root, and `attempts` solvers of the task that it makes.

    Every episode of a group has a different task, and a policy-gradient algorithm compares the solvers of all of them:
    solvers of an easier task come out ahead. R-Zero trains its solver on several answers to one task, in alternating
    phases. `propose_within` gives solvers groups of one task beside the others.

    `judge` gives a solver's reward. The proposer's is 1 - |1 - 2 p| for the mean p of the solvers' rewards (R-Zero,
    arXiv:2508.05004): 1 if half of them are right, 0 if all or none are, and -1 for a reply without a task. A
    solver out of turns or context counts as wrong. A solver whose tools raise `ToolError` fails, and does not count.
    """

    judge: Annotated[str, loadable(load_judge)]
    """`module:function`: called with the task and a solver's reply, returns 0 to 1, quickly. An exception fails the
    episode."""
    attempts: Count = 4
    """Solvers per task."""
    propose_within: tuple[Fraction, Fraction] | None = None
    """Mean reward of the solvers within which a task becomes one of the run: it joins the source of data with
    `path: proposed`, whose tasks only the solver plays, the whole group on one task. [0, 0.5] are tasks that the policy
    mostly fails (ReverseGen). None: no task does."""
    proposer_reward: Literal["balance", "failure"] = "balance"
    """Reward of the proposer for the mean p of the solvers' rewards. `balance`: 1 - |1 - 2 p| (R-Zero). `failure`:
    1 - p (ReverseGen)."""

    async def run(self, session: Session) -> None:
        if session.task.info.get(PROPOSED):
            solver, asked = session.agent("solver"), str(session.task.info[PROPOSED])
            session.reward(load_judge(self.judge)(asked, await self.solve(solver, asked)))
            return
        proposer = session.agent("proposer")
        task = self.read(await proposer.chat(self.ask(session.task)))
        if task is None:
            session.reward(INVALID)
            return
        solvers = [session.agent("solver", parent=proposer) for _ in range(self.attempts)]
        replies = await session.gather(*(self.solve(solver, task) for solver in solvers))
        scores: list[float] = []
        for solver, reply in zip(solvers, replies, strict=True):
            if isinstance(reply, ToolError):
                solver.fail(str(reply))
            else:
                scores.append(load_judge(self.judge)(task, reply) if isinstance(reply, str) else 0.0)
                session.reward(scores[-1], solver)
        if scores:
            mean = fmean(scores)
            session.reward(1 - mean if self.proposer_reward == "failure" else 1 - abs(1 - 2 * mean))
            if self.propose_within and self.propose_within[0] <= mean <= self.propose_within[1]:
                session.propose({"prompt": task, PROPOSED: task})
        else:
            proposer.fail("the tools of all solvers broke")

    def ask(self, task: Task) -> Prompt:
        """Write the proposer's prompt; `task` describes the kind of task to make."""
        return opening_messages(PROPOSER, task.prompt)

    def read(self, reply: str) -> str | None:
        """Parse the task in a proposer's reply; None if there is none."""
        found = _TASK.search(spoken(reply))
        return found[1].strip() or None if found else None

    async def solve(self, solver: Agent, task: str) -> str:
        """Let one solver try the task, and return its reply."""
        return await solver.chat(opening_messages(SOLVER, task))
